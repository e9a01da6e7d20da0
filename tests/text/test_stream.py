"""Text files read in pieces: the pieces are the text, and a byte that is none is named with its place."""

import codecs
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.text import stream


@given(text=st.text(st.sampled_from("aé—😀\n"), min_size=1, max_size=30), size=st.integers(1, 9))
def test_pieces_of_any_size_are_the_text(tmp_path_factory, text, size):
    path = tmp_path_factory.mktemp("stream") / "a.txt"
    path.write_bytes(text.encode())
    found = list(stream.read(path, size))
    assert "".join(piece for piece, _ in found) == text
    for i, (_, end) in enumerate(found):  # from the byte behind any piece on, the rest of the text
        rest = "".join(piece for piece, _ in found[i + 1 :])
        assert "".join(piece for piece, _ in stream.read(path, size, start=end)) == rest
    assert stream.check(path) == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_byte_order_mark_is_no_text(tmp_path, size):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfabc")
    assert "".join(piece for piece, _ in stream.read(path, size)) == "abc"
    assert list(stream.read(path, size))[-1][1] == 6


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("content, place", [(b"ab\xff", 2), ("é—".encode() + b"\x80", 5), (b"abc\xe2\x80", 3)])
def test_a_byte_that_is_no_text_is_named_with_its_place(tmp_path, content, place, size):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"a.txt is no UTF-8 text: byte {place} "):
        list(stream.read(path, size))


def test_a_file_that_is_missing_or_empty_is_named(tmp_path):
    with pytest.raises(ValueError, match="is no file"):
        stream.check(tmp_path / "a.txt")
    for content in (b"", codecs.BOM_UTF8):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(ValueError, match=rf"a.txt is empty, {len(content)} bytes; wanted a text"):
            stream.check(tmp_path / "a.txt")
