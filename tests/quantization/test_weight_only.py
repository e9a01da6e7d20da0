"""Weights that stay integers: their bytes, the the products of every backend and kernel, decoders."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref.quantization.packed_matmul
import torch_ref.quantization.weight_only
import torch_ref.sample
from jaxbench import initial, sample
from jaxbench.config import TransformerConfig
from jaxbench.eqx.quantization import weight_only as eqx_weight_only
from jaxbench.quantization import grids, linear, packed_matmul, packing, quantize, weight_only, weight_only_pallas
from jaxbench.quantization.grids import Grid
from jaxbench.quantization.recipe import Recipe

# Grid, inputs, outputs, rows: tiles that fit and tiles that do not, groups smaller and larger than a chunk of them.
CASES = {
    "q4_0": (Grid(4), 96, 40, 5),
    "q4_1": (grids.NAMED["q4_1"], 128, 130, 1),
    "q8_0": (Grid(8), 64, 16, 37),
    "one scale": (Grid(4, None, "integer", "float32"), 160, 24, 1),
    "large groups": (Grid(8, 64, "integer", "bfloat16"), 192, 33, 70),
    "2 bits": (Grid(2, 32, "least", "bfloat16"), 128, 64, 5),
    "3 bits": (Grid(3, 16), 64, 48, 5),
    "5 bits": (Grid(5, 32, "integer"), 64, 32, 5),
    "e4m3": (grids.NAMED["fp8"], 48, 136, 5),
}
ODD = {"odd groups": (Grid(4, 3, "least"), 27, 10, 5), "groups of 2": (Grid(2, 2, "integer"), 12, 10, 5)}
KERNELS = ("triton", "mosaic")
each_case = pytest.mark.parametrize("case", CASES)


@functools.cache
def matrix(case: str) -> grids.Quantized:
    """A matrix on a case's grid, with an output of zeros and one whose scales are float16's smallest."""
    grid, inputs, outputs, _ = (CASES | ODD)[case]
    weights = 0.1 * np.random.default_rng(0).normal(size=(outputs, inputs)).astype(np.float32)
    weights[1], weights[2] = 0, weights[2] * 1e-3
    return grids.nearest(weights, grid)


def inputs_of(case: str) -> np.ndarray:
    _, inputs, _, rows = (CASES | ODD)[case]
    return np.random.default_rng(1).normal(size=(rows, inputs)).astype(np.float32)


def by_kernel(case: str, x, kernel: str) -> np.ndarray:
    weights = packed_matmul.put(packing.pack(matrix(case)))
    how = {"implementation": kernel, "interpret": kernel in KERNELS}
    return np.asarray(jax.jit(functools.partial(weight_only_pallas.matmul, **how))(x, weights))


# Bytes


@pytest.mark.parametrize("case", CASES | ODD)
def test_a_code_lies_where_the_file_says(case):
    held, whole = packing.pack(matrix(case)), matrix(case)
    form, per_byte = held.form, {"2 bits": 4, "groups of 2": 2, "q4_0": 2, "q4_1": 2, "one scale": 2, "3 bits": 2}
    assert form.per_byte == per_byte.get(case, 1)
    assert held.codes.size == whole.codes.size // form.per_byte and held.codes.dtype.itemsize == 1
    for i in range(whole.codes.shape[1]):
        group, within = divmod(i, form.group)
        place, byte = divmod(within, form.span)
        row = held.codes[group * form.span + byte]
        if whole.grid.type == "int":
            row = (row.astype(int) >> (form.width * place)) % 2**form.width - form.offset
        np.testing.assert_array_equal(row.astype(np.float32), whole.codes[:, i].astype(np.float32))
    assert held.scales.dtype.name == whole.grid.scale_dtype
    np.testing.assert_array_equal(held.scales.T.astype(np.float32), whole.scales)


def test_four_bits_with_float16_scales_take_four_and_a_half_bits_a_weight():
    held = packing.pack(matrix("q4_0"))
    assert held.bytes * 8 == 4.5 * matrix("q4_0").codes.size == held.form.grid.bits_per_weight * 96 * 40


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_least_weights_take_as_many_bits_as_scales(dtype):
    grid = Grid(4, 32, "least", dtype)
    held = packing.pack(grids.nearest(np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32), grid))
    assert held.bytes * 8 == grid.bits_per_weight * 3 * 64


def test_a_scale_that_its_type_does_not_hold_is_refused():
    with pytest.raises(ValueError, match="no values of float16, the largest difference is"):
        packing.pack(matrix("q4_0")._replace(scales=matrix("q4_0").scales + np.float32(1e-6)))


@pytest.mark.parametrize(("dtype", "exponent", "fraction"), [("float16", 5, 10), ("float8_e4m3fn", 4, 3)])
def test_floats_given_as_bits_have_the_values_of_numpy(dtype, exponent, fraction):
    narrow = np.dtype(np.float16 if dtype == "float16" else ml_dtypes.float8_e4m3fn)
    bits = np.arange(2 ** (8 * narrow.itemsize)).astype(f"uint{8 * narrow.itemsize}")
    wanted = bits.view(narrow).astype(np.float32)
    found = weight_only_pallas.float_values(jnp.asarray(bits), exponent=exponent, fraction=fraction)
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(np.asarray(found)[finite], wanted[finite])
    assert finite.sum() > 0.9 * len(bits)


# Products


@pytest.mark.parametrize("case", CASES | ODD)
def test_products_are_those_of_the_dequantised_weights_on_both_backends(case):
    x = inputs_of(case)
    wanted = x.astype(np.float64) @ grids.dequantized(matrix(case)).T.astype(np.float64)
    theirs = torch_ref.quantization.packed_matmul
    found = {
        "jax": np.asarray(packed_matmul.matmul(jnp.asarray(x), packed_matmul.put(packing.pack(matrix(case))))),
        "torch": theirs.matmul(torch.tensor(x), theirs.put(packing.pack(matrix(case)))).numpy(),
    }
    for name, each in found.items():
        np.testing.assert_allclose(each, wanted, rtol=1e-5, atol=1e-5, err_msg=name)


@each_case
def test_one_row_as_a_sum_as_on_a_gpu_has_the_same_product(case):
    x, weights = jnp.asarray(inputs_of(case)[:1]), packed_matmul.put(packing.pack(matrix(case)))
    found = packed_matmul._product(x, weights, is_alone=True)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(found, packed_matmul.matmul(x, weights), rtol=1e-5, atol=1e-5)


@each_case
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernels_interpreted_compute_the_references_products(case, kernel):
    x = jnp.asarray(inputs_of(case))
    wanted = packed_matmul.matmul(x, packed_matmul.put(packing.pack(matrix(case))))
    np.testing.assert_allclose(by_kernel(case, x, kernel), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["q4_0", "e4m3"])
def test_bfloat16_rows_meet_weights_rounded_to_bfloat16_everywhere(case):
    x = inputs_of(case).astype(ml_dtypes.bfloat16)
    rounded = grids.dequantized(matrix(case)).T.astype(ml_dtypes.bfloat16)
    wanted = x.astype(np.float64) @ rounded.astype(np.float64)
    theirs = torch_ref.quantization.packed_matmul
    own = torch.tensor(x.astype(np.float32), dtype=torch.bfloat16)
    found = {name: by_kernel(case, jnp.asarray(x), name).astype(np.float64) for name in ("xla", *KERNELS)}
    found["torch"] = theirs.matmul(own, theirs.put(packing.pack(matrix(case)))).double().numpy()
    for name, each in found.items():  # half a unit of bfloat16, and float32's sums
        np.testing.assert_allclose(each, wanted, rtol=2**-8, atol=1e-5, err_msg=name)


def test_leading_axes_stay_and_the_platforms_kernel_is_xla_on_a_cpu():
    x = inputs_of("q4_0")
    found = by_kernel("q4_0", jnp.asarray(x)[None, :, None], "pallas")
    assert found.shape == (1, 5, 1, 40)
    np.testing.assert_array_equal(found[0, :, 0], by_kernel("q4_0", jnp.asarray(x), "xla"))


def test_what_the_kernel_does_not_take_is_xlas_or_is_said():
    x = jnp.asarray(inputs_of("odd groups"))
    wanted = x @ grids.dequantized(matrix("odd groups")).T
    np.testing.assert_allclose(by_kernel("odd groups", x, "pallas"), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="no kernel 'triton' for these weights: 3 bytes of 27 an output share a scale"):
        by_kernel("odd groups", x, "triton")
    with pytest.raises(ValueError, match=r"x has shape \(5, 26\), but the weights have 27 inputs"):
        by_kernel("odd groups", x[:, 1:], "xla")
    with pytest.raises(ValueError, match="implementation='fused' is not one of xla, pallas, triton, mosaic"):
        by_kernel("odd groups", x, "fused")


# Decoders


SIZES = {"vocab_size": 64, "d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "head_dim": 16}
FAMILIES = {
    "llama": ({"num_kv_heads": 2}, {"bits": 4}),
    "gpt2": (
        {"num_kv_heads": 4, "norm": "layernorm", "activation": "gelu", "position": "learned", "use_bias": True},
        {"bits": 5, "group_size": None, "zero": "least", "scale_dtype": "bfloat16"},
    ),
}
BACKENDS = {
    "flax": (weight_only, sample),
    "equinox": (eqx_weight_only, sample),
    "torch": (torch_ref.quantization.weight_only, torch_ref.sample),
}
TOKENS = np.random.default_rng(7).integers(0, 64, (3, 12)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(12, dtype=np.int32), TOKENS.shape)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    """A quantised model with biases that are not 0."""
    shape, recipe = FAMILIES[request.param]
    config = TransformerConfig(**SIZES, **shape, max_seq_len=16)
    params, random = initial.initial_params(config, 0), np.random.default_rng(0)
    params = {n: v + 0.2 * random.normal(size=v.shape).astype(np.float32) for n, v in params.items()}
    return quantize.quantize(config, params, Recipe(**recipe, scales="minmax"))


def logits(decoder) -> np.ndarray:
    return np.asarray(nnx.jit(lambda m, *given: m(*given))(decoder, jnp.asarray(TOKENS), jnp.asarray(POSITIONS)))


def test_all_backends_have_the_logits_of_the_decoder_on_dequantised_weights(model):
    wanted = logits(linear.build(model))
    found = {name: logits(weight_only.build(model, implementation=name)) for name in ("xla", "pallas")}
    found["equinox"] = np.asarray(
        jax.jit(eqx_weight_only.build(model).__call__)(jnp.asarray(TOKENS), jnp.asarray(POSITIONS))
    )
    with torch.no_grad():
        torch_model = torch_ref.quantization.weight_only.build(model)
        found["torch"] = torch_model(torch.tensor(TOKENS), torch.tensor(POSITIONS)).numpy()
    for name, each in found.items():
        assert np.linalg.norm(each - wanted) < 1e-5 * np.linalg.norm(wanted), name


def test_in_bfloat16_the_logits_differ_by_sums_alone(model):
    wanted = logits(linear.build(model, dtype="bfloat16")).astype(np.float32)
    found = logits(weight_only.build(model, dtype="bfloat16")).astype(np.float32)
    assert np.linalg.norm(found - wanted) < 5e-3 * np.linalg.norm(wanted)


def test_the_generators_go_on_alike_with_the_integers(model):
    """Cached steps, compiled; PyTorch's the same tokens."""
    wanted = None
    for module, own in BACKENDS.values():
        settings = own.SamplingParams(temperature=1.0)
        generator = own.Generator(module.build(model), eos_id=None, sampling=settings)
        found = generator([[3, 5, 7], [11]], max_new_tokens=6, seed=5).tokens
        wanted = found if wanted is None else wanted
        np.testing.assert_array_equal(found, wanted)
    assert len(np.unique(wanted)) > 4


def test_layers_hold_integers_and_no_float_copy(model):
    held = {n: packing.pack(m) for n, m in model.matrices.items() if n.startswith("layers.")}
    decoders = [each.build(model) for each, _ in BACKENDS.values()]
    biases = {name: 4 * value.size for name, value in model.params.items() if name.endswith("bias")}
    for name, packed in held.items():
        _, index, part, module = name.split(".")
        own = packed.bytes + biases.get(f"{name}.bias", 0)
        for decoder in decoders:
            linear_layer = getattr(getattr(decoder.layers[int(index)], part), module)
            arrays = linear_layer.parameters() if decoder is decoders[2] else jax.tree.leaves(linear_layer)
            assert sum(each.nbytes for each in arrays) == own


def test_activations_of_few_bits_are_another_builders(model):
    for module, _ in BACKENDS.values():
        with pytest.raises(ValueError, match="activations=dynamic, wanted float: use quantization.linear.build"):
            module.build(model._replace(activations="dynamic"))
        with pytest.raises(ValueError, match="implementation='fused' is not one of"):
            module.build(model, implementation="fused")
