"""The GGUF container: read as the gguf package writes it; damage is always one ValueError."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench import gguf_file

RANDOM = np.random.default_rng(0)
PLAIN = RANDOM.normal(size=(3, 5)).astype(np.float32)
ROWS = RANDOM.normal(size=(4, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file with every kind of metadata and three kinds of tensors."""
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.string", "naïve")
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.number", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_array("a.words", ["x", "yy", ""])
    writer.add_array("a.numbers", [3, 1, 2])
    writer.add_tensor("plain", PLAIN)
    writer.add_tensor("half", ROWS.astype(np.float16))
    kind = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("quantised", gguf.quants.quantize(ROWS, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_is_read_with_its_types(written):
    metadata = gguf_file.read(written).metadata
    expected = {"a.string": "naïve", "a.count": 7, "a.number": 0.5, "a.flag": True, "a.words": ["x", "yy", ""]}
    assert {key: metadata[key] for key in expected} == expected
    assert metadata["a.numbers"] == [3, 1, 2]


def test_tensors_have_the_slowest_axis_first_and_are_dequantised(written):
    file = gguf_file.read(written)
    np.testing.assert_array_equal(file.tensor("plain"), PLAIN)
    np.testing.assert_array_equal(file.tensor("half"), ROWS.astype(np.float16).astype(np.float32))
    step = (ROWS.reshape(-1, 32).max(1) - ROWS.reshape(-1, 32).min(1)) / 15  # Q4_1: 16 levels in each block of 32
    error = np.abs(file.tensor("quantised") - ROWS).reshape(-1, 32).max(1)
    assert file.tensor("quantised").dtype == np.float32
    assert (error <= 0.51 * step + 1e-3).all()


def test_everything_agrees_with_the_gguf_packages_own_reader(written):
    theirs, ours = gguf.GGUFReader(written), gguf_file.read(written)
    assert {t.name for t in theirs.tensors} == set(ours.tensors)
    for tensor in theirs.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.tensor(tensor.name), expected)


@given(share=st.floats(0, 0.999))
def test_file_cut_anywhere_is_one_error_that_names_it(written, share):
    content = written.read_bytes()
    cut = written.with_name("cut.gguf")
    cut.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"cut\.gguf: (truncated|not a GGUF file)"):
        gguf_file.read(cut)


@given(place=st.integers(0, 1000), value=st.integers(0, 255))
def test_changed_byte_in_the_header_is_read_or_one_error(written, place, value):
    content = bytearray(written.read_bytes())
    content[place % 700] = value
    changed = written.with_name("changed.gguf")
    changed.write_bytes(bytes(content))
    try:
        file = gguf_file.read(changed)
    except ValueError as error:
        assert "changed.gguf" in str(error)
        assert "\n" not in str(error)
    else:
        assert all(info.offset + info.size <= len(content) for info in file.tensors.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 a zip file", "not a GGUF file .starts with"),
        (b"GGUF\x01\0\0\0" + bytes(64), "GGUF version 1 is not supported, wanted one of .2, 3."),
        (b"GGUF\0\0\0\x03" + bytes(64), "GGUF version 50331648 is not supported"),  # big-endian
        (b"GGUF\x03\0\0\0" + b"\xff" * 64, "truncated or corrupt"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        gguf_file.read(tmp_path / "bad.gguf")
