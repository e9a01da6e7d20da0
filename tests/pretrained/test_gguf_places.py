"""Where the tensors of a GGUF file lie: an offset that was damaged is an error, not another tensor's numbers."""

import struct

import gguf
import numpy as np
import pytest

from jaxbench.pretrained import gguf_file


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, size in (("first", 5), ("half", 40), ("last", 8)):
        writer.add_tensor(name, np.arange(size, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("change", [32, -32, 1])
def test_a_tensor_that_begins_elsewhere_than_behind_the_one_before_is_refused_by_name(written, change):
    content, entry = bytearray(written.read_bytes()), b"\x04\0\0\0\0\0\0\0half"
    place = content.index(entry) + len(entry) + 4 + 8 + 4  # behind one dimension and the type
    (offset,) = struct.unpack_from("<Q", content, place)
    struct.pack_into("<Q", content, place, offset + change)
    begin = gguf_file.read(written).tensors["half"].offset
    changed = written.with_name("moved.gguf")
    changed.write_bytes(content)
    wanted = rf"moved\.gguf: corrupt.*'half' begins at byte {begin + change}, wanted {begin}: after the one before"
    with pytest.raises(ValueError, match=wanted):
        gguf_file.read(changed)


def test_tensors_behind_another_alignment_are_read(tmp_path):
    path = tmp_path / "wide.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(128)
    values = {name: np.full(size, size, np.float32) for name, size in (("a", 5), ("b", 33), ("c", 1))}
    for name, value in values.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = gguf_file.read(path)
    for name, value in values.items():
        np.testing.assert_array_equal(file.tensor(name), value)
