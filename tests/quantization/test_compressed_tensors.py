"""Folders in compressed-tensors' layout: what its own package and transformers read is what was written."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jaxbench import initial, transformer
from jaxbench.config import TransformerConfig
from jaxbench.native import checkpoint, library
from jaxbench.native import model as native_model
from jaxbench.pretrained import compressed_tensors, small_tokenizers, weights
from jaxbench.quantization import folder_export, folder_import, grids, quantize
from jaxbench.quantization.grids import Grid
from jaxbench.quantization.recipe import Recipe, dequantized

CONFIG = TransformerConfig(
    vocab_size=64, d_model=64, d_ff=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_seq_len=32
)
GRIDS = [grids.NAMED["q4_0"], Grid(4, 16, "integer"), Grid(3, 32), Grid(2, 32, "integer", "float32"),
         Grid(8, 32), Grid(8, None, "none", "bfloat16"), Grid(5, None, "integer", "float32")]  # fmt: skip
PARAMS = initial.initial_params(CONFIG, 3)


def _saved(folder, grid, **recipe):
    made = quantize.quantize(CONFIG, PARAMS, Recipe(**grid._asdict(), embedding_bits=None, **recipe))
    folder_export.save(folder, made, None, tokenizer=small_tokenizers.ByteTokenizer())
    return made


@given(bits=st.integers(2, 8), shape=st.tuples(st.integers(1, 5), st.integers(1, 70)), seed=st.integers(0, 99))
def test_packed_codes_come_back(bits, shape, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, shape).astype(np.uint8)
    words = compressed_tensors.packed(codes, bits)
    assert words.shape == (shape[0], -(-shape[1] * bits // 32))
    np.testing.assert_array_equal(compressed_tensors.unpacked(words, bits, shape[1]), codes)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_layouts_own_package_reads_the_same_weights(grid):
    package = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    weight = np.random.default_rng(0).normal(size=(40, 96)).astype(np.float32)
    matrix = grids.nearest(weight, grid, rule="mse")
    described = compressed_tensors.described(grid, "float")
    stored = compressed_tensors.stored(matrix, described["format"])
    scheme = package.quantization.QuantizationConfig.model_validate(described).config_groups["group_0"]
    compressor = package.BaseCompressor.get_value_from_registry(described["format"])
    tensors = {
        # its product is in the scales' type; in float32 it is ours
        name: torch.tensor(value.astype(np.float32)) if name == "weight_scale" else torch.tensor(value)
        for name, value in stored.items()
    }
    found = compressor.decompress(tensors, scheme)["weight"]
    np.testing.assert_array_equal(found.numpy(), grids.dequantized(matrix))


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 32)])
def test_signed_codes_with_zeros_are_read_as_the_layouts_own_package_reads_them(bits, group, tmp_path):
    package = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from safetensors.numpy import load_file, save_file

    _saved(tmp_path / "made", Grid(bits, group, "integer", "float32"))
    read_before = weights.load_checkpoint(tmp_path / "made").params
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    path = tmp_path / "made" / "config.json"
    values = json.loads(path.read_text())
    described = values["quantization_config"]
    described["format"] = described["config_groups"]["group_0"]["format"] = "int-quantized"
    path.write_text(json.dumps(values))
    scheme = package.quantization.QuantizationConfig.model_validate(described).config_groups["group_0"]
    packed, flat = (package.BaseCompressor.get_value_from_registry(f"{each}-quantized") for each in ("pack", "int"))
    for name in [each for each in tensors if each.endswith("weight_packed")]:
        module = name.removesuffix("weight_packed")
        parts = ("weight_packed", "weight_shape", "weight_scale", "weight_zero_point")
        held = {part: torch.from_numpy(tensors.pop(module + part)) for part in parts}
        whole = packed.decompress(dict(held), scheme)["weight"]
        zeros = compressed_tensors.unpacked(held["weight_zero_point"].numpy().T, bits, len(whole)).T
        signed = torch.from_numpy(zeros.astype(np.int16) - 2 ** (bits - 1)).to(torch.int8).contiguous()
        again = {"weight": whole, "weight_scale": held["weight_scale"], "weight_zero_point": signed}
        tensors |= {module + part: value.numpy() for part, value in flat.compress(again, scheme).items()}
    save_file(tensors, tmp_path / "made" / "model.safetensors")
    for name, value in weights.load_checkpoint(tmp_path / "made").params.items():
        np.testing.assert_array_equal(value, read_before[name], err_msg=name)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_folder_read_back_has_the_same_numbers(grid, tmp_path):
    made = _saved(tmp_path / "made", grid)
    read = weights.load_checkpoint(tmp_path / "made")
    assert read.config == CONFIG
    for name, value in dequantized(made).items():
        np.testing.assert_array_equal(read.params[name], value, err_msg=name)


@pytest.mark.skipif(not library.is_available(), reason="native kernels need a C compiler")
@pytest.mark.parametrize(("name", "format"), [("q4_0", "q4_0"), ("q8_0", "q8_0"), ("int8", "int8"), ("w3", "float32")])
def test_native_kernels_take_a_folders_integers_as_they_lie(name, format, tmp_path):
    made = _saved(tmp_path / "made", grids.NAMED.get(name, Grid(3)))
    packed = checkpoint.load(tmp_path / "made")
    assert {m.format for n, m in packed.matrices.items() if n != "embed"} == {format}
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 9)))
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    native = native_model.build(packed)
    found = native.logits(native.features(tokens, positions)[0])
    wanted = transformer.build(CONFIG, dequantized(made))(tokens, positions)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_static_activation_ranges_are_kept(tmp_path):
    from jaxbench.quantization import inputs

    tokens = np.random.default_rng(0).integers(0, 64, (4, 16))
    recipe = Recipe(**grids.NAMED["int8"]._asdict(), activations="static", embedding_bits=None)
    made = quantize.quantize(CONFIG, PARAMS, recipe, calibrator=inputs.LayerByLayer(CONFIG), tokens=tokens)
    folder_export.save(tmp_path / "made", made, None, tokenizer=small_tokenizers.ByteTokenizer())
    described = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    layout = compressed_tensors.layout(described, tmp_path)
    assert layout.activations == "static" and layout.grid.bits == 8 and layout.format == "int-quantized"
    import safetensors.numpy

    tensors = safetensors.numpy.load_file(tmp_path / "made" / "model.safetensors")
    step = tensors["model.layers.1.mlp.down_proj.input_scale"]
    assert step.shape == (1,) and step[0] == np.float32(made.input_ranges["layers.1.mlp.down_proj"] / 127)


def _changed(tmp_path, change):
    _saved(tmp_path / "made", grids.NAMED["q4_0"])
    path = tmp_path / "made" / "config.json"
    values = json.loads(path.read_text())
    change(values["quantization_config"])
    path.write_text(json.dumps(values))
    return tmp_path / "made"


WEIGHTS = ("config_groups", "group_0", "weights")
BAD = [
    (("quant_method",), "gptq", "quant_method='gptq', wanted compressed-tensors"),
    (("format",), "marlin-24", "format='marlin-24', wanted pack-quantized or int-quantized"),
    (("config_groups",), {}, "config_groups={}, wanted one group"),
    (("config_groups", "group_0", "targets"), ["Embedding"], "targets="),
    (WEIGHTS, None, "weights=None, wanted integers"),
    ((*WEIGHTS, "type"), "float", "wanted integers"),
    ((*WEIGHTS, "num_bits"), 1, "num_bits=1, wanted 2 to 8"),
    ((*WEIGHTS, "num_bits"), "4", "num_bits='4', wanted 2 to 8"),
    ((*WEIGHTS, "strategy"), "block", "strategy='block with group_size=32'"),
    ((*WEIGHTS, "group_size"), 64, "weight_scale has shape"),
    ((*WEIGHTS, "num_bits"), 8, "weight_packed has shape"),
    ((*WEIGHTS, "symmetric"), False, "stands without .*weight_zero_point"),
    (("config_groups", "group_0", "input_activations"), {"num_bits": 4}, "input_activations="),
    (("config_groups", "group_0", "output_activations"), {"num_bits": 8}, "output_activations=.* another function"),
    (("kv_cache_scheme",), {"num_bits": 8, "type": "float"}, "kv_cache_scheme=.* another function"),
    (("transform_config",), {"config_groups": {"R1": {"type": "hadamard"}}}, "transform_config=.* another function"),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD, ids=[".".join(path) for path, _, _ in BAD])
def test_a_folder_of_another_kind_is_refused_by_what_differs(path, value, message, tmp_path):
    def change(described):
        *parents, last = path
        for parent in parents:
            described = described[parent]
        described[last] = value

    with pytest.raises(ValueError, match=message):
        weights.load_checkpoint(_changed(tmp_path, change))


def test_groups_that_do_not_divide_a_matrix_are_refused_before_they_are_misread(tmp_path):
    def change(described):
        described["config_groups"]["group_0"]["weights"]["group_size"] = 40

    folder = _changed(tmp_path, change)  # as many groups as there are of 32, begun ones counted
    with pytest.raises(ValueError, match="group_size=40 does not divide the (64|96) inputs of model.layers.0.*weight"):
        weights.load_checkpoint(folder)


@pytest.mark.parametrize("part", ["weight_scale", "weight_shape", "weight_packed"])
def test_a_matrix_with_a_missing_part_is_refused(part, tmp_path):
    from safetensors.numpy import load_file, save_file

    _saved(tmp_path / "made", grids.NAMED["q4_0"])
    path = tmp_path / "made" / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"model.layers.0.mlp.up_proj.{part}"]
    save_file(tensors, path)
    wanted = "missing: model.layers.0.mlp.up_proj.weight" if part == "weight_packed" else f"without .*{part}"
    with pytest.raises(ValueError, match=wanted):
        weights.load_checkpoint(tmp_path / "made")


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("up_proj.weight", np.ones((96, 64), np.float32), "up_proj.weight and .*up_proj.weight_packed, wanted one"),
        ("up_proj.weight_packed", np.ones((96, 8), np.float32), "up_proj.weight_packed has type F32, wanted I32"),
        ("up_proj.weight_shape", np.array([96.0, 64.0], np.float32), "weight_shape has type F32, wanted I64 or I32"),
        ("up_proj.weight_zero_point", np.ones((12, 2), np.int32), "1 unused: .*up_proj.weight_zero_point"),
        ("up_proj.input_scale", np.ones(1, np.float32), "1 unused: model.layers.0.mlp.up_proj.input_scale"),
        ("other.weight_scale", np.ones((96, 2), np.float32), "1 unused: model.layers.0.mlp.other.weight_scale"),
    ],
)
def test_a_tensor_that_would_be_lost_or_taken_for_integers_is_refused_by_name(part, value, message, tmp_path):
    from safetensors.numpy import load_file, save_file

    _saved(tmp_path / "made", grids.NAMED["q4_0"])
    path = tmp_path / "made" / "model.safetensors"
    save_file(load_file(path) | {f"model.layers.0.mlp.{part}": value}, path)
    for load in (weights.load_checkpoint, folder_import.load):
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "made")


def test_floats_beside_a_scale_are_no_matrix_of_the_layout_and_zeros_of_zero_change_nothing(tmp_path):
    from safetensors.numpy import load_file, save_file

    _saved(tmp_path / "made", grids.NAMED["q4_0"])
    path, module = tmp_path / "made" / "model.safetensors", "model.layers.0.mlp.up_proj"
    tensors, wanted = load_file(path), weights.load_checkpoint(tmp_path / "made").params
    save_file(tensors | {f"{module}.weight_zero_point": np.zeros((12, 2), np.int32)}, path)
    for name, value in weights.load_checkpoint(tmp_path / "made").params.items():
        np.testing.assert_array_equal(value, wanted[name])
    # a folder saved before its weights were rounded: the function has them rounded, its file has not
    del tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_shape"]
    save_file(tensors | {f"{module}.weight": np.ones((96, 64), np.float32)}, path)
    with pytest.raises(ValueError, match=f"1 unused: {module}.weight_scale"):
        weights.load_checkpoint(tmp_path / "made")


def test_scales_that_are_not_finite_are_refused(tmp_path):
    from safetensors.numpy import load_file, save_file

    _saved(tmp_path / "made", grids.NAMED["q4_0"])
    path = tmp_path / "made" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight_scale"][0, 0] = np.inf
    save_file(tensors, path)
    with pytest.raises(ValueError, match="scales of model.layers.0.mlp.up_proj.weight have NaN"):
        weights.load_checkpoint(tmp_path / "made")
    if library.is_available():
        with pytest.raises(ValueError, match="NaN or infinite values: model.layers.0.mlp.up_proj.weight"):
            checkpoint.load(tmp_path / "made")


def test_what_has_no_place_in_the_layout_is_refused(tmp_path):
    with pytest.raises(ValueError, match="zero=least has no place"):
        _saved(tmp_path / "made", grids.NAMED["q4_1"])
    with pytest.raises(ValueError, match="codes of type e4m3"):
        _saved(tmp_path / "made", grids.NAMED["fp8"])
    made = quantize.quantize(CONFIG, PARAMS, Recipe(bits=4))
    with pytest.raises(ValueError, match="embed lies on"):
        folder_export.save(tmp_path / "made", made, None)
    assert not (tmp_path / "made").exists()


def test_a_family_without_a_place_in_the_layout_is_refused_before_its_matrices_are_rounded():
    from jaxbench.parity import cases

    folder_export.check_model(CONFIG)
    with pytest.raises(ValueError, match="gpt2 has Conv1D in their place"):
        folder_export.check_model(cases.GPT2)


def test_transformers_gives_a_folders_logits(tmp_path):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import transformers

    made = _saved(tmp_path / "made", Grid(4, 32, scale_dtype="float32"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    tokens, positions = np.arange(18).reshape(2, 9), np.broadcast_to(np.arange(9), (2, 9))
    with torch.no_grad():
        found = theirs(torch.tensor(tokens)).logits.numpy()
    wanted = transformer.build(CONFIG, dequantized(made))(jnp.asarray(tokens), jnp.asarray(positions))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activations", ["float", "dynamic", "static"])
def test_a_folder_is_read_as_the_model_that_was_written_with_its_eight_bit_inputs(activations, tmp_path):
    from jaxbench.quantization import inputs, linear

    tokens = np.random.default_rng(0).integers(0, 64, (4, 16))
    recipe = Recipe(**grids.NAMED["int8"]._asdict(), activations=activations, embedding_bits=None)
    made = quantize.quantize(CONFIG, PARAMS, recipe, calibrator=inputs.LayerByLayer(CONFIG), tokens=tokens)
    folder_export.save(tmp_path / "made", made, None, tokenizer=small_tokenizers.ByteTokenizer())
    found = folder_import.load(tmp_path / "made")
    assert found.activations == activations and found.config == made.config
    assert found.input_ranges == pytest.approx(made.input_ranges, rel=1e-6)
    for name, matrix in made.matrices.items():
        np.testing.assert_array_equal(found.matrices[name].codes, matrix.codes, err_msg=name)
        np.testing.assert_array_equal(found.matrices[name].scales, matrix.scales, err_msg=name)
    positions = jnp.broadcast_to(jnp.arange(16), tokens.shape)
    ours, wanted = (linear.build(each)(jnp.asarray(tokens), positions) for each in (found, made))
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5)
    held = weights.load_checkpoint(tmp_path / "made")
    floats = transformer.build(held.config, held.params)(jnp.asarray(tokens), positions)
    assert np.allclose(floats, wanted, rtol=1e-5, atol=1e-5) == (activations == "float")


def test_a_folder_of_floats_and_eight_bit_inputs_of_another_kind_are_refused(tmp_path):
    weights.save_checkpoint(tmp_path / "floats", CONFIG, PARAMS)
    with pytest.raises(ValueError, match="floats has no quantised matrix"):
        folder_import.load(tmp_path / "floats")
    _saved(tmp_path / "made", grids.NAMED["int8"], activations="dynamic")
    path = tmp_path / "made" / "config.json"
    values = json.loads(path.read_text())
    group = values["quantization_config"]["config_groups"]["group_0"]
    about = group["input_activations"]
    for changes, words in (
        ({"dynamic": False, "strategy": "tensor"}, "layers.0.self_attn.q_proj.input_scale is missing"),
        ({"symmetric": False}, "input_activations are not symmetric"),
        ({"dynamic": "local"}, "input_activations are not symmetric"),
    ):
        group["input_activations"] = about | changes
        path.write_text(json.dumps(values))
        with pytest.raises(ValueError, match=words):
            folder_import.load(tmp_path / "made")
        assert weights.load_checkpoint(tmp_path / "made").params  # its weights alone
