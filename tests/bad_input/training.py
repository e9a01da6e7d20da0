"""Bad data of train.py: command line, what the error says."""

from __future__ import annotations

import io

import numpy as np

from tests.bad_input.harness import Case

TINY = "train.py --config=configs/lm/tiny.yaml --workdir={tmp}/run --data={tmp}/"


def npy(*ids: int, dtype: str = "int64") -> bytes:
    """Return a .npy file of these ids, 50 times over."""
    file = io.BytesIO()
    np.save(file, np.array(ids * 50, dtype))
    return file.getvalue()


def data(name: str, content: str | bytes, *wanted: str, options: str = "") -> Case:
    """Return the case of a data file."""
    return Case(f"{TINY}{name} {options}".strip(), wanted, {name: content})


VOCABULARY = "--set=model.vocab_size=300"
CASES = [
    data("a.npy", npy(1, 2, -3, 4), "a.npy", "token id -3 at place 2", "wanted 0 to 299", options=VOCABULARY),
    data("a.npy", npy(1, 2, 300), "token id 300 at place 2", "model.vocab_size=300", options=VOCABULARY),
    data("a.npy", npy(1, 2**40), f"token id {2**40} at place 1", options=VOCABULARY),
    data("a.bin", np.array([5, 65535] * 50, "<u2").tobytes(), "token id 65535 at place 1", options=VOCABULARY),
    data("a.txt", "hello, world!", "held-out part of", "a.txt", "1 tokens in 1 documents", "no target"),
    data("a.txt", "x", "a.txt has 1 bytes", "at least 4", "longer text"),
    data("a.txt", "ab", "a.txt has 2 bytes", "longer text"),
    data("a.txt", "", "a.txt", "no text"),
    data("a.jsonl", '{"text": "a"}\n{"txt": "b"}\n', "a.jsonl line 2", '"text"'),
    data("a.jsonl", '{"text": "a"\n', "a.jsonl line 1", "not JSON"),
    data("a.jsonl", '{"text": "a"}\n' + "[" * 200_000 + "\n", "a.jsonl line 2", "not JSON"),
    data("a.txt", b"words \xff", "a.txt", "not UTF-8", "0xff"),
    data("a.npy", b"nothing", "a.npy", "cannot read", options=VOCABULARY),
    data("a.npy", npy(1, 2, dtype="float32"), "a.npy", "float32", options=VOCABULARY),
    data("a.bin", b"\x01", "a.bin", "cannot read", options=VOCABULARY),
    data("a.csv", "text", "a.csv", "unknown suffix"),
    data("a.txt.gz", b"\x1f\x8bnothing", "a.txt.gz", "cannot read"),
    Case("train.py --set=base_batch=8", ("base_batch=8 does nothing with learning_rate_scaling=none",)),
    Case("train.py --set=learning_rate_scaling=linear", ("learning_rate_scaling=linear with base_batch=None",)),
]
