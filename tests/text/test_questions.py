"""Files of questions: what is damaged is one error with its place."""

import gzip
import json

import pytest

from jaxbench.text import questions

ROW = {"context": "c", "question": "q", "answers": ["a", "b"], "title": "t"}


def row(**changes):
    return json.dumps(ROW | changes).encode() + b"\n"


def damaged():
    """Return a packed file whose compressed bytes are none."""
    content = bytearray(gzip.compress(row() * 50, mtime=0))
    content[20:26] = bytes(255 - byte for byte in content[20:26])
    return bytes(content)


def test_a_question_is_its_fields(tmp_path):
    (tmp_path / "q.jsonl").write_bytes(row() + b"\n" + row(answers=[]))
    first, second = questions.read(tmp_path / "q.jsonl")
    assert first == questions.Asked("c", "q", ("a", "b"), "t") and second.answers == ()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("q.jsonl.gz", damaged(), r"q\.jsonl\.gz is damaged"),
        ("q.jsonl", row() + b"[" * 100_000, r"q\.jsonl line 2 is no JSON"),
        ("q.jsonl", row(answers=["a", ["b"]]), r"q\.jsonl line 1 has the answer \['b'\], wanted texts"),
        ("q.jsonl", row(answers=[None]), r"q\.jsonl line 1 has the answer None, wanted texts"),
        ("q.jsonl", row() + row(context="\ud800 c"), r"q\.jsonl line 2 has a lone surrogate"),
        ("q.jsonl", row(answers=["a", "\udfff"]), r"q\.jsonl line 1 has a lone surrogate"),
    ],
)
def test_what_is_no_question_is_one_error_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        questions.read(tmp_path / name)
