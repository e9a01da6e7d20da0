"""Bad input of quantize.py: flags, outputs, damaged files."""

from __future__ import annotations

import struct

from tests.bad_input.core import EMBEDDING, F32, I32, gguf
from tests.bad_input.harness import Case

WHOLE = gguf(EMBEDDING)


def of(words: str, *wanted: str, **files: str | bytes) -> Case:
    """Return a case; underscores in the names of files stand for dots."""
    given = {name.replace("_", "."): content for name, content in files.items()}
    return Case(("quantize.py", *(word for word in words.split("|") if word)), wanted, given)


def model(content: bytes | str, *wanted: str) -> Case:
    """Return a case whose model is a bad file."""
    return of("--model=x.gguf|--format=q4_0|--output=o.gguf", *wanted, x_gguf=content)


def header(at: int, value: bytes) -> bytes:
    """Return the small file with some bytes of its head changed."""
    return WHOLE[:at] + value + WHOLE[at + len(value) :]


OUT = "--output=o.gguf"

CASES = [
    of("", "--output=None is missing"),
    of("--format=q4_0", "--output=None is missing"),
    of("--output=", "--output="),
    of(f"{OUT}|--format=q3_k", "--format", "q3_k", "q8_0|q4_0|q4_1"),
    of(f"{OUT}|--format=", "--format", "q8_0|q4_0|q4_1"),
    of(f"{OUT}|--format=4", "--format", "q8_0|q4_0|q4_1"),
    of(f"{OUT}|--format=Q4_0", "--format", "Q4_0"),
    of(f"{OUT}|--format=int8", "--format", "int8"),
    of(f"{OUT}|--embedding=int4", "--embedding", "int4"),
    of(f"{OUT}|--embedding=f16", "--embedding", "f16"),
    of(f"{OUT}|--formt=q4_0", "--formt", "nearest is --format"),
    of(f"{OUT}|--bits=4", "--bits"),
    of(f"{OUT}|q4_0", "'q4_0' is not a flag"),
    of(f"{OUT}|--overwrite=perhaps", "overwrite", "perhaps"),
    of(f"{OUT}|--model=", "model: '' names nothing"),
    of(f"{OUT}|--model=none/such.gguf", "none/such.gguf does not exist"),
    of(f"{OUT}|--model=configs", "--model=configs is a folder"),
    of(f"{OUT}|--model=x.txt", "x.txt", "not a GGUF file", x_txt="a text"),
    of(f"{OUT}|--model=x.json", "x.json", "not a GGUF file", x_json="{}"),
    of("--output=x.gguf|--model=x.gguf", "--output=x.gguf is the input", x_gguf=WHOLE),
    of("--output=x.gguf|--model=x.gguf|--overwrite", "--output=x.gguf is the input", x_gguf=WHOLE),
    of("--output=./x.gguf|--model=x.gguf|--overwrite", "is the input", x_gguf=WHOLE),
    of("--output=configs", "--output=configs is a folder"),
    of("--output=o.gguf", "--output=o.gguf exists", "--overwrite", o_gguf="mine"),
    of("--output=a.txt/o.gguf", "a.txt is a file", a_txt="mine"),
    of("--output=/proc/none/o.gguf", "/proc/none", "nothing can be written"),
    of("--output=/dev/null|--overwrite", "/dev/null is no ordinary file"),
    model("", "x.gguf", "not a GGUF file"),
    model("GGUF", "x.gguf", "not a GGUF file"),
    model(b"GGUF\x03\0\0\0", "x.gguf", "truncated"),
    model(header(4, struct.pack("<I", 1)), "x.gguf", "version 1"),
    model(header(4, struct.pack("<I", 9)), "x.gguf", "version 9"),
    model(header(8, struct.pack("<Q", 2**40)), "x.gguf"),
    model(header(16, struct.pack("<Q", 2**40)), "x.gguf"),
    model(WHOLE[:60], "x.gguf", "truncated"),
    model(WHOLE[: len(WHOLE) // 2], "x.gguf"),
    model(gguf(EMBEDDING, cut=64), "x.gguf", "truncated"),
    model(gguf(EMBEDDING, architecture="bert"), "x.gguf", "bert"),
    model(gguf(EMBEDDING, architecture=["llama"]), "x.gguf", "['llama']"),
    model(gguf({"token_embd.weight": ((16, 8), I32)}), "x.gguf", "token_embd.weight", "I32"),
    model(gguf({"token_embd.weight": ((16, 8), F32), "other.weight": ((8,), F32)}), "x.gguf", "tensors do not fit"),
    model(gguf(EMBEDDING, block_count=2_000_000_000), "x.gguf", "2000000000", "layers"),
    model(WHOLE, "x.gguf", "tensors do not fit", "missing"),
]
