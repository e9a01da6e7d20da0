"""Files in chunks: every line once, bad ones named, the same chunks in every run."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.text import dataset, lines, packing


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(lines, "CHUNK_LINES", 3)
    monkeypatch.setattr(lines, "CHUNK_BYTES", 200)


def write(path, content: bytes) -> str:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def read_all(path: str, **how) -> tuple[list[lines.Record], list[lines.Bad]]:
    parts = [lines.read(chunk, **how) for chunk in lines.chunks(path)]
    return [one for records, _ in parts for one in records], [one for _, bad in parts for one in bad]


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_every_line_comes_once_with_its_number(suffix, end, tmp_path, small_chunks):
    texts = ["one", "", "three is a long line " * 20, "vier \u00e4", "  ", "six", "seven"]
    path = write(tmp_path / f"a.{suffix}", "\n".join(texts).encode() + end)
    records, bad = read_all(path)
    assert bad == []
    assert [(one.line, one.content) for one in records] == [(i, t) for i, t in enumerate(texts, 1) if t.strip()]
    chunks = list(lines.chunks(path))
    assert len(chunks) >= 3 and [one.number for one in chunks] == list(range(len(chunks)))
    assert [one.first_line for one in chunks[1:]] > [1] and len({one.name for one in chunks}) == len(chunks)
    assert sum(one.read_bytes for one in chunks) == (tmp_path / f"a.{suffix}").stat().st_size


@given(st.lists(st.binary(max_size=12).filter(lambda x: b"\n" not in x and not x.endswith(b"\r")), max_size=12))
def test_any_bytes_are_either_a_record_or_a_bad_line(tmp_path_factory, rows):
    path = write(tmp_path_factory.mktemp("bytes") / "a.txt", b"\n".join(rows))
    records, bad = read_all(path)
    rows = [row.removeprefix(b"\xef\xbb\xbf") if i == 0 else row for i, row in enumerate(rows)]
    seen = {i for i, row in enumerate(rows, 1) if row.strip()}
    assert {one.line for one in records} | {one.line for one in bad} == seen
    assert {one.line: one.content.encode() for one in records} == {
        i: row for i, row in enumerate(rows, 1) if i in seen and i not in {one.line for one in bad}
    }


def test_bad_lines_are_numbered_and_the_rest_goes_on(tmp_path, small_chunks):
    rows = [
        json.dumps({"text": "first", "id": 7}).encode(),
        b'{"text": "\xff\xfe"}',
        b'{"text": "cut',
        b'{"txt": "x"}',
        b'["text"]',
        b'{"text": 5}',
        b'{"text": "\\ud800"}',
        b'{"text": [1, -2]}',
        json.dumps({"text": [1, 2], "prompt": 1}).encode(),
        b'{"text": "x", "prompt": "two"}',
    ]
    records, bad = read_all(write(tmp_path / "a.jsonl", b"\n".join(rows)), prompt_field="prompt")
    assert [(one.line, one.id, one.content, one.prompt_tokens) for one in records] == [
        (1, "7", "first", 0),
        (9, None, [1, 2], 1),
    ]
    assert [one.line for one in bad] == [2, 3, 4, 5, 6, 7, 8, 10]
    words = ["not UTF-8 (byte 0xff", "not JSON", "no key 'text'", "a list", "a int", "surrogate", "a list", "'prompt'"]
    assert [word for word, one in zip(words, bad) if word not in one.problem] == []


def test_a_byte_order_mark_is_no_text(tmp_path):
    records, _ = read_all(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello\n"))
    assert records[0].content == "hello"


def test_only_the_end_of_a_name_says_what_its_lines_are(tmp_path):
    name = tmp_path / "notes.jsonl.txt"
    records, bad = read_all(write(name, b"no JSON\n"))
    assert [one.content for one in records] == ["no JSON"] and bad == []
    assert packing.load_text(name) == list(dataset.documents(name)) == ["no JSON\n"]


def test_a_damaged_file_names_the_last_good_line(tmp_path, small_chunks):
    content = gzip.compress(b"".join(f"line {i}\n".encode() for i in range(5000)))
    path = tmp_path / "a.txt.gz"
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"a.txt.gz is damaged after line \d+"):
        read_all(str(path))


def test_files_are_found_by_pattern_and_bad_ones_named(tmp_path):
    for name in ("b.jsonl", "a.jsonl.gz"):
        write(tmp_path / name, b"{}\n")
    assert lines.find(f"{tmp_path}/*.jsonl*") == [f"{tmp_path}/a.jsonl.gz", f"{tmp_path}/b.jsonl"]
    with pytest.raises(ValueError, match="names no file"):
        lines.find(f"{tmp_path}/*.txt")
    with pytest.raises(ValueError, match=r"c.txt is empty, 0 bytes"):
        lines.find(write(tmp_path / "c.txt", b""))
    with pytest.raises(ValueError, match=r"unknown suffix, wanted one of .jsonl"):
        lines.find(write(tmp_path / "d.csv", b"x"))
