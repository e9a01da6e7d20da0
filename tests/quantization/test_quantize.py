"""Models on grids: what each step is for, both calibrating backends, all decoders."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_ref.quantization.inputs
import torch_ref.quantization.linear
import torch_ref.quantization.products
from jaxbench import initial, transformer
from jaxbench.config import TransformerConfig
from jaxbench.eqx.quantization import linear as eqx_linear
from jaxbench.quantization import equalize, gptq, grids, inputs, linear, products, quantize, statistics
from jaxbench.quantization.recipe import Recipe, dequantized

SIDES = {"flax": inputs.LayerByLayer, "torch": torch_ref.quantization.inputs.LayerByLayer}
SIZES = {"vocab_size": 64, "d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "head_dim": 16}
FAMILIES = {
    "llama": {"num_kv_heads": 2},
    "gpt2": {"num_kv_heads": 4, "norm": "layernorm", "activation": "gelu", "position": "learned", "use_bias": True},
}
W8A8 = {"bits": 8, "group_size": None, "scale_dtype": "float32"}
TOKENS = np.random.default_rng(7).integers(0, 64, (12, 24))
POSITIONS = np.broadcast_to(np.arange(24, dtype=np.int32), TOKENS.shape)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    """Configuration and parameters, with norms and biases that are not 1 and 0 and channels of unlike size."""
    config = TransformerConfig(**SIZES, **FAMILIES[request.param], max_seq_len=32)
    random = np.random.default_rng(0)
    params = initial.initial_params(config, 0)
    for name, value in params.items():
        if value.ndim == 1:
            noise = random.normal(size=value.shape).astype(np.float32)
            params[name] = value * np.exp(noise) if name.endswith("scale") else value + 0.2 * noise
        elif name.startswith("layers"):
            params[name] = value * 3
    return config, params


def _logits(config, params):
    return np.asarray(transformer.build(config, params)(jnp.asarray(TOKENS), jnp.asarray(POSITIONS)))


def _error(config, params, recipe, side="flax"):
    found = quantize.quantize(config, params, Recipe(**recipe), calibrator=SIDES[side](config), tokens=TOKENS)
    reference = _logits(config, params)
    return np.linalg.norm(_logits(config, dequantized(found)) - reference) / np.linalg.norm(reference), found


@pytest.mark.parametrize("side", SIDES)
def test_gptq_and_awq_lose_less_than_rounding_to_nearest(model, side):
    nearest, _ = _error(*model, {"bits": 3}, side)
    gptq_error, _ = _error(*model, {"bits": 3, "rounding": "gptq"}, side)
    searched, _ = _error(*model, {"bits": 3, "scales": "mse"}, side)
    awq, _ = _error(*model, {"bits": 3, "scales": "mse", "equalize": "awq"}, side)
    assert gptq_error < 0.8 * nearest and awq < 0.97 * searched


@pytest.mark.parametrize("method", equalize.METHODS[1:])
def test_scaled_channels_compute_the_same_function(model, method):
    config, params = model
    side, layer = inputs.LayerByLayer(config), {}
    hidden = quantize.embedded(config, params, TOKENS)
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        own = {n.removeprefix(prefix): v for n, v in params.items() if n.startswith(prefix)}
        hidden, found = side.layer(i, own, hidden, histogram=False)
        changed = equalize.equalized(own, config, found, grids.Grid(3), method=method)
        assert any((changed[n] != own[n]).any() for n in own)
        layer |= {prefix + n: v for n, v in changed.items()}
    np.testing.assert_allclose(_logits(config, params | layer), _logits(config, params), rtol=2e-4, atol=2e-4)


def test_both_backends_see_the_same_inputs(model):
    config, params = model
    sides = [make(config) for make in SIDES.values()]
    hidden = quantize.embedded(config, params, TOKENS)
    own = {n.removeprefix("layers.0."): v for n, v in params.items() if n.startswith("layers.0.")}
    (out, found), (other_out, other) = (side.layer(0, own, hidden, histogram=True) for side in sides)
    np.testing.assert_allclose(out, other_out, rtol=1e-4, atol=1e-4)
    assert found.keys() == other.keys() == set(statistics.SOURCES.values())
    for name, each in found.items():
        assert each.count == other[name].count == TOKENS.size
        for field in ("second_moment", "absolute", "largest"):
            np.testing.assert_allclose(getattr(each, field), getattr(other[name], field), rtol=1e-3, atol=1e-3)
        assert np.abs(np.cumsum(each.histogram - other[name].histogram)).max() <= 3
        assert each.histogram.sum() == TOKENS.size * len(each.largest)


def test_statistics_are_those_of_the_inputs():
    x = np.random.default_rng(0).normal(size=(5, 7, 16)).astype(np.float32)
    rows = x.reshape(-1, 16)
    moment, absolute, largest, histogram = (np.asarray(part) for part in inputs._statistics(jnp.asarray(x), True))
    np.testing.assert_allclose(moment, rows.T @ rows, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(absolute, np.abs(rows).sum(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(largest, np.abs(rows).max(axis=0))
    limits = statistics.edges()
    cumulated = [(np.abs(rows) <= limit).sum() for limit in limits]
    assert np.abs(np.cumsum(histogram) - cumulated).max() <= 1


@pytest.mark.parametrize("rule", ["minmax", "percentile", "mse"])
def test_a_static_range_leaves_out_what_its_rule_says(rule):
    values = np.abs(np.random.default_rng(0).normal(size=200_000)).astype(np.float32)
    values[0] = 1000.0
    _, absolute, largest, histogram = (np.asarray(p) for p in inputs._statistics(jnp.asarray(values[:, None]), True))
    found = statistics.InputStatistics(len(values), np.ones((1, 1)), absolute, largest, histogram)
    limit = statistics.static_range(found, rule)
    exact = {"minmax": 1000.0, "percentile": np.quantile(values, 0.9999)}
    if rule in exact:
        assert exact[rule] <= limit <= 1.1 * exact[rule]
        return

    def error(limit):
        step = limit / 127
        return ((np.clip(np.rint(values / step), -127, 127) * step - values) ** 2).sum()

    assert error(limit) <= 1.02 * min(error(candidate) for candidate in statistics.edges())


@pytest.mark.parametrize("degrees", [3, 100])
def test_a_static_range_of_float8_has_the_least_squared_error_of_float8(degrees):
    values = np.abs(np.random.default_rng(0).standard_t(degrees, size=100_000)).astype(np.float32)
    values[:1000] *= 1e-5  # codes below the normal ones
    _, absolute, largest, histogram = (np.asarray(p) for p in inputs._statistics(jnp.asarray(values[:, None]), True))
    found = statistics.InputStatistics(len(values), np.ones((1, 1)), absolute, largest, histogram)

    def error(limit):
        step = limit / 448
        codes = np.clip(values / step, 0, 448).astype(jnp.float8_e4m3fn).astype(np.float32)
        return ((codes * step - values) ** 2).sum()

    limit = statistics.static_range(found, "mse", type="e4m3")
    assert error(limit) <= 1.05 * min(error(candidate) for candidate in statistics.edges() if candidate < 1000)


def test_gptq_is_nearly_as_good_as_the_best_of_all_codes():
    """2 bits, 6 inputs: all 4^6 codes can be tried."""
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 6)) @ random.normal(size=(6, 6))
    moment, weights = (x.T @ x).astype(np.float32), random.normal(size=(20, 6)).astype(np.float32)
    grid = grids.Grid(2, None, scale_dtype="float32")
    found = gptq.gptq(weights, moment, grid, rule="minmax")
    every = np.stack(np.meshgrid(*[np.arange(-2, 2)] * 6), axis=-1).reshape(-1, 6)
    ratios = []
    for row, own, scale in zip(weights, grids.dequantized(found), found.scales[:, 0], strict=True):
        change = every * scale - row
        best = np.einsum("ci,ij,cj->c", change, moment, change).min()
        ratios.append((own - row) @ moment @ (own - row) / best)
    nearest = grids.dequantized(grids.nearest(weights, grid)) - weights
    ours = grids.dequantized(found) - weights
    assert np.median(ratios) < 1.5
    assert np.einsum("oi,ij,oj->", ours, moment, ours) < 0.75 * np.einsum("oi,ij,oj->", nearest, moment, nearest)


@pytest.mark.parametrize("kind", ["int", "e4m3"])
@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_products_in_eight_bits_are_equal_in_all_backends_and_near_the_floats(model, kind, activations):
    config, params = model
    recipe = W8A8 | {"activations": activations, "type": kind, "equalize": "smoothquant", "activation_scales": "mse"}
    _, found = _error(config, params, recipe)
    tokens, positions = jnp.asarray(TOKENS), jnp.asarray(POSITIONS)
    flax = np.asarray(linear.build(found)(tokens, positions))
    equinox = np.asarray(eqx_linear.build(found)(tokens, positions))
    with torch.no_grad():
        twin = torch_ref.quantization.linear.build(found)(torch.tensor(TOKENS), torch.tensor(POSITIONS)).numpy()
    reference = _logits(config, params)
    norm = np.linalg.norm(reference)
    error = np.linalg.norm(flax - reference) / norm
    np.testing.assert_array_equal(flax, equinox)
    assert np.linalg.norm(flax - twin) / norm < error / 5  # codes at the edge between two fall differently
    assert 1e-4 < error < (0.2 if kind == "e4m3" else 0.12)


BUILDERS = (linear.build, eqx_linear.build, torch_ref.quantization.linear.build)


@pytest.mark.parametrize("build", BUILDERS, ids=["flax", "equinox", "torch"])
@pytest.mark.parametrize("grid", [{"bits": 4}, {"bits": 8, "group_size": None, "zero": "integer"}])
def test_rounded_inputs_with_weights_in_groups_or_with_zeros_are_refused(model, build, grid):
    found = quantize.quantize(*model, Recipe(**grid))
    named = r"activations=dynamic with layers.0.attention.q_proj on Grid.*, wanted one scale per output and zero=none"
    with pytest.raises(ValueError, match=named):
        build(found._replace(activations="dynamic"))
    build(found)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_a_product_in_eight_bits_is_the_product_of_its_codes(kind):
    import ml_dtypes  # noqa: F401  names float8_e4m3fn

    random = np.random.default_rng(0)
    limit, kernel_type = products.LIMITS[kind], np.dtype(kind)
    x = random.normal(size=(3, 5, 32)).astype(np.float32)
    x[0, 0] = 0
    kernel = (random.uniform(-limit, limit, (32, 8))).astype(kernel_type)
    scale = random.uniform(0.5, 1.5, 8).astype(np.float32)
    for input_range in (None, 1.5):
        found = np.asarray(products.matmul(jnp.asarray(x), jnp.asarray(kernel), jnp.asarray(scale), input_range))
        largest = np.abs(x).max(axis=2, keepdims=True) if input_range is None else np.full((3, 5, 1), input_range)
        step = np.where(largest > 0, largest, limit) / limit
        codes = np.clip(x / step, -limit, limit)
        codes = np.rint(codes) if kind == "int8" else codes.astype(kernel_type).astype(np.float64)
        wanted = codes @ kernel.astype(np.float64) * step * scale
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=np.abs(wanted).max() * 2e-3)
        held = torch.tensor(kernel) if kind == "int8" else torch.tensor(kernel.view(np.uint8)).view(torch.float8_e4m3fn)
        twin = torch_ref.quantization.products.matmul(torch.tensor(x), held, torch.tensor(scale), input_range)
        np.testing.assert_allclose(twin.numpy(), found, rtol=1e-4, atol=np.abs(wanted).max() * 2e-3)


@pytest.mark.parametrize("input_range", [None, 1.5])
def test_a_row_with_a_nan_input_has_no_finite_product_in_eight_bits(input_range):
    x, kernel, scale = np.ones((2, 32), np.float32), np.ones((32, 8), np.int8), np.ones(8, np.float32)
    x[1, 3] = np.nan
    found = np.asarray(products.matmul(jnp.asarray(x), jnp.asarray(kernel), jnp.asarray(scale), input_range))
    twin = torch_ref.quantization.products.matmul(*map(torch.tensor, (x, kernel, scale)), input_range).numpy()
    for out in (found, twin):
        assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()


def test_counts_of_inputs_are_not_full_after_two_thousand_million():
    counts = np.zeros(statistics.BINS, np.int32)
    counts[200], counts[300] = 1_500_000_000, 1000
    one = statistics.InputStatistics(1, np.eye(1), np.ones(1), np.full(1, 1e6), counts)
    assert (one + one).histogram[200] == 3_000_000_000
    assert statistics.static_range(one + one, "percentile") == statistics.static_range(one, "percentile")


def test_what_is_not_calibrated_is_the_same_whoever_asks(model):
    config, params = model
    found = [quantize.quantize(config, params, Recipe(bits=4)) for _ in range(2)]
    for name, matrix in found[0].matrices.items():
        np.testing.assert_array_equal(matrix.codes, found[1].matrices[name].codes)
    assert found[0].params.keys() | {f"{n}.kernel" for n in found[0].matrices if n != "embed"} | {
        "embed.embedding"
    } == (params.keys())
    assert found[0].bytes < sum(v.nbytes for v in params.values()) / 5


def test_bytes_count_a_scale_and_a_zero_of_each_output(model):
    config, params = model
    recipe = Recipe(bits=4, group_size=None, zero="integer", scale_dtype="bfloat16", embedding_bits=None)
    made = quantize.quantize(config, params, recipe)
    matrices = sum(m.codes.size // 2 + len(m.codes) * 2 + len(m.codes) // 2 for m in made.matrices.values())
    assert made.bytes == matrices + 4 * sum(value.size for value in made.params.values())


def test_what_cannot_be_quantised_is_refused(model):
    config, params = model
    with pytest.raises(ValueError, match="need calibration tokens, got 0"):
        quantize.quantize(config, params, Recipe(rounding="gptq"))
    with pytest.raises(ValueError, match="group_size=48 does not divide"):
        quantize.quantize(config, params, Recipe(group_size=48))
    broken = params | {"layers.1.mlp.up_proj.kernel": params["layers.1.mlp.up_proj.kernel"] * np.nan}
    with pytest.raises(ValueError, match="layers.1.mlp.up_proj.kernel has NaN"):
        quantize.quantize(config, broken, Recipe())
    with pytest.raises(ValueError, match="activations=dynamic need weights of 8 bits"):
        Recipe(activations="dynamic")
    with pytest.raises(ValueError, match="inputs of it are all 0"):
        gptq.gptq(np.ones((2, 4), np.float32), np.zeros((4, 4), np.float32), grids.Grid(4, 4), name="it")
