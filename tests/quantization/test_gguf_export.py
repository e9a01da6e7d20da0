"""GGUF files written again with fewer bits: what is read back is what rounding says, and llama.cpp reads it too."""

from __future__ import annotations

import numpy as np
import pytest

from jaxbench.native import checkpoint, formats, library
from jaxbench.pretrained import assets, gguf_file, weights
from jaxbench.quantization import gguf_export, grids, inputs, quantize
from jaxbench.quantization.recipe import Recipe, dequantized


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A Llama of two layers as a GGUF file in float32, its metadata those of the default model."""
    import gguf

    source = gguf_file.read(assets.fetch_default_model())
    reader = gguf.GGUFReader(str(source.path))
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, arch="llama")
    sizes = {
        "llama.block_count": 2, "llama.embedding_length": 64, "llama.feed_forward_length": 96,
        "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1, "llama.rope.dimension_count": 32,
    }  # fmt: skip
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, sizes.get(field.name, field.contents()), kind, sub_type=inner)
    rng = np.random.default_rng(0)
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64),
              "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}  # fmt: skip
    tensors = {"token_embd.weight": (49152, 64), "output_norm.weight": (64,)}
    for i in range(2):
        tensors |= {f"blk.{i}.{name}.weight": shape for name, shape in shapes.items()}
        tensors |= {f"blk.{i}.{name}.weight": (64,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in tensors.items():
        writer.add_tensor(name, rng.normal(size=shape).astype(np.float32) / 8)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path


@pytest.mark.parametrize("format", ["q8_0", "q4_0", "q4_1", "bfloat16"])
def test_a_file_read_back_has_the_numbers_that_its_rounding_stands_for(small, format, tmp_path):
    written = gguf_export.export(small, tmp_path / "out.gguf", format=format)
    plain, rounded = weights.load_checkpoint(small), weights.load_checkpoint(written.path)
    assert rounded.config == plain.config
    bound = {"q8_0": 0.01, "q4_0": 0.15, "q4_1": 0.12, "bfloat16": 0.004}[format]
    for name, value in plain.params.items():
        error = np.linalg.norm(rounded.params[name] - value) / np.linalg.norm(value)
        if value.ndim == 1:
            assert error == 0, f"{name} is no matrix"
        else:
            assert 0 < error < (0.01 if name == "embed.embedding" else bound), name
    assert written.bytes < small.stat().st_size and len(written.errors) == 15
    middle, largest = gguf_export.summary(written.errors)
    assert 0 < middle <= largest < bound


def test_the_default_model_in_its_own_format_is_the_same_model(tmp_path):
    source = assets.fetch_default_model()
    written = gguf_export.export(source, tmp_path / "same.gguf", format="q4_1", embedding="q8_0")
    assert written.errors == {}, "its matrices are of these types already"
    first, second = gguf_file.read(source), gguf_file.read(written.path)
    skipped = {"general.file_type"}
    assert {k: v for k, v in first.metadata.items() if k not in skipped} == {
        k: v for k, v in second.metadata.items() if k not in skipped
    }
    for name in first.tensors:
        assert np.array_equal(first.tensor(name), second.tensor(name)), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "q3_k"}, "--format='q3_k' is not one of float32, bfloat16, q8_0, q4_0, q4_1"),
        ({"format": "q4_0", "embedding": "int8"}, "--embedding='int8' is not one of"),
        ({"format": "q4_0", "source": "."}, "is a folder, and only GGUF files are written as GGUF"),
    ],
)
def test_bad_settings_are_named(small, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        gguf_export.export(arguments.pop("source", small), tmp_path / "x.gguf", **arguments)
    assert not (tmp_path / "x.gguf").exists()


def test_weights_too_large_for_a_formats_scales_are_refused_and_nothing_is_written(small, tmp_path):
    content = bytearray(small.read_bytes())
    at = gguf_file.read(small).tensors["blk.1.ffn_up.weight"].offset
    content[at : at + 4] = np.float32(1e8).tobytes()
    (tmp_path / "large.gguf").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"tensor blk\.1\.ffn_up\.weight has weights up to 100000000\.0, too large for"
    ):
        gguf_export.export(tmp_path / "large.gguf", tmp_path / "out.gguf", format="q4_0")
    assert not (tmp_path / "out.gguf").exists()


def test_a_file_of_another_alignment_keeps_it(small, tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "aligned.gguf", arch="llama")
    writer.add_custom_alignment(128)
    names = ("odd", "even")
    for name in names:
        writer.add_tensor(name, np.full(5, len(name), np.float32))  # 20 bytes: the next begins at 128
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    file = gguf_file.read(tmp_path / "aligned.gguf")
    made = gguf_export._write(
        file, tmp_path / "out.gguf", lambda name: (gguf_export._raw(file, name), "F32", None), 0, lambda line: None
    )
    reader = gguf.GGUFReader(str(tmp_path / "out.gguf"))
    assert made == {} and reader.alignment == 128
    for tensor in reader.tensors:
        np.testing.assert_array_equal(tensor.data, np.full(5, len(tensor.name)))
    read = gguf_file.read(tmp_path / "out.gguf")
    assert [read.tensor(name)[0] for name in names] == [3, 4] and read.tensors["even"].offset % 128 == 0


def test_a_file_of_floats_without_a_version_of_blocks_gets_one(small, tmp_path):
    import gguf

    source, key = gguf.GGUFReader(str(small)), "general.quantization_version"
    bare = gguf.GGUFWriter(tmp_path / "bare.gguf", arch="llama")
    for field in source.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", key):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            bare.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in source.tensors:
        bare.add_tensor(tensor.name, np.array(tensor.data))
    for step in (bare.write_header_to_file, bare.write_kv_data_to_file, bare.write_tensors_to_file):
        step()
    bare.close()
    assert key not in gguf.GGUFReader(str(tmp_path / "bare.gguf")).fields
    for path in (tmp_path / "bare.gguf", small):
        written = gguf_export.export(path, tmp_path / f"{path.stem}-q8.gguf", format="q8_0").path
        assert gguf.GGUFReader(str(written)).fields[key].contents() == gguf.GGML_QUANT_VERSION == 2


def test_the_input_is_never_written_over(small):
    before = small.read_bytes()
    with pytest.raises(ValueError, match="is the input"):
        gguf_export.export(small, small, format="q4_0", overwrite=True)
    assert small.read_bytes() == before


def test_files_keep_the_numbers_of_every_quantised_format(small, tmp_path):
    path = gguf_export.export(small, tmp_path / "q.gguf", format="q4_1").path
    file = gguf_file.read(path)
    from jaxbench.native import checkpoint

    rows = checkpoint.gguf_rows(file, "blk.1.ffn_down.weight")
    assert rows.format == "q4_1" and np.array_equal(formats.dequantized(rows), file.tensor("blk.1.ffn_down.weight"))


@pytest.mark.parametrize("format", ["q4_0", "q4_1", "q8_0"])
def test_a_quantised_model_is_written_with_its_own_numbers(small, format, tmp_path):
    held = weights.load_checkpoint(small)
    tokens = np.random.default_rng(0).integers(0, 49152, (4, 16))
    settings = Recipe(**grids.NAMED[format]._asdict(), rounding="gptq", equalize="awq")
    made = quantize.quantize(
        held.config, held.params, settings, calibrator=inputs.LayerByLayer(held.config), tokens=tokens
    )
    written = gguf_export.export(small, tmp_path / "out.gguf", format=format, quantized=made)
    read = weights.load_checkpoint(written.path)
    for name, value in dequantized(made).items():
        np.testing.assert_array_equal(read.params[name], value, err_msg=name)
    assert (read.params["layers.0.mlp_norm.scale"] != held.params["layers.0.mlp_norm.scale"]).any()
    if library.is_available():
        packed = checkpoint.load(written.path)
        assert packed.matrices["layers.1.attention.q_proj"].format == format


def test_a_grid_that_gguf_has_no_type_for_is_refused(small, tmp_path):
    held = weights.load_checkpoint(small)
    made = quantize.quantize(held.config, held.params, Recipe(bits=3))
    with pytest.raises(ValueError, match="GGUF has no type here for .*wanted q8_0, q4_0, q4_1"):
        gguf_export.export(small, tmp_path / "out.gguf", format="q4_0", quantized=made)
    assert not list(tmp_path.iterdir())
