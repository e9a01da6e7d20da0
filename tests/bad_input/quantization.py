"""Bad input of quantize.py and quality.py: flags, outputs, damaged files, recipes, texts."""

from __future__ import annotations

import functools
import struct

from tests.bad_input.core import EMBEDDING, F32, I32, gguf
from tests.bad_input.harness import Case, case_of

WHOLE = gguf(EMBEDDING)


of = functools.partial(case_of, ("quantize.py",))


def model(content: bytes | str, *wanted: str) -> Case:
    """Return a case whose model is a bad file."""
    return of("--model=x.gguf|--format=q4_0|--output=o.gguf", *wanted, x_gguf=content)


def header(at: int, value: bytes) -> bytes:
    """Return the small file with some bytes of its head changed."""
    return WHOLE[:at] + value + WHOLE[at + len(value) :]


OUT, FOLDER = "--output=o.gguf", "--output=made"
TEXT = "Some words, and more of them. " * 4

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
    of(f"{OUT}|--bits=4", "--format=int has no type in GGUF", "q8_0"),
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
    of("--output=configs", "--output=configs exists and is not an empty folder"),
    of("--output=configs|--overwrite", "--output=configs exists and is not an empty folder"),
    of("--output=o.gguf", "--output=o.gguf exists", "--overwrite", o_gguf="mine"),
    of("--output=a.txt/o.gguf", "a.txt is a file", a_txt="mine"),
    of("--output=/proc/none/o.gguf", "/proc/none", "nothing can be written"),
    of("--output=/dev/null|--overwrite", "/dev/null exists and is not an empty folder"),
    model("", "x.gguf", "not a GGUF file"),
    model("GGUF", "x.gguf", "truncated GGUF file of 4 bytes"),
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
    of(f"{FOLDER}|--format=q4_1", "--format=q4_1 with a folder (made)", "int, int8, q4_0 or q8_0"),
    of(f"{FOLDER}|--format=bfloat16", "--format=bfloat16 with a folder"),
    of(f"{FOLDER}|--embedding=q8_0", "--embedding=q8_0 is for .gguf files"),
    of(f"{FOLDER}|--bits=1", "--bits", "1", "[2, 8]"),
    of(f"{FOLDER}|--bits=9", "--bits", "9", "[2, 8]"),
    of(f"{FOLDER}|--bits=four", "--bits", "four"),
    of(f"{FOLDER}|--bits=4|--format=q4_0", "--bits=4 goes with --format=int, and it is q4_0"),
    of(f"{FOLDER}|--group_size=64", "--group_size=64 goes with --format=int"),
    of(f"{FOLDER}|--bits=4|--group_size=-1", "--group_size", "-1"),
    of(f"{FOLDER}|--zero=integer", "--zero=integer goes with --format=int"),
    of(f"{FOLDER}|--bits=4|--zero=least", "--zero", "least"),
    of(f"{FOLDER}|--scales=best", "--scales", "best", "mse"),
    of(f"{FOLDER}|--rounding=up", "--rounding", "up", "gptq"),
    of(f"{FOLDER}|--equalize=all", "--equalize", "all", "awq"),
    of(f"{FOLDER}|--activations=int8", "--activations", "int8", "dynamic"),
    of(f"{FOLDER}|--activations=dynamic", "--activations=dynamic", "need weights of 8 bits"),
    of(f"{FOLDER}|--bits=8|--activations=static", "--activations=static", "with a scale an output"),
    of(f"{FOLDER}|--format=int8|--activation_scales=mse", "--activation_scales=mse goes with --activations=static"),
    of(f"{OUT}|--format=q8_0|--activations=dynamic", "--activations=dynamic: a GGUF file has none"),
    of(f"{OUT}|--format=float32|--rounding=gptq", "--rounding=gptq does nothing with --format=float32"),
    of(f"{OUT}|--format=q4_0|--rounding=gptq|--embedding=q4_0", "--embedding=q4_0 with --rounding", "wanted q8_0"),
    of(f"{OUT}|--rows=4", "--rows=4 is for calibration"),
    of(f"{FOLDER}|--length=64", "--length=64 is for calibration"),
    of(f"{FOLDER}|--rounding=gptq|--rows=0", "--rows", "0"),
    of(f"{FOLDER}|--rounding=gptq|--length=1", "--length", "1"),
    of(f"{FOLDER}|--rounding=gptq|--backend=equinox", "--backend", "equinox"),
    of(f"{FOLDER}|--rounding=gptq|--data=none.txt", "none.txt"),
    of(f"{FOLDER}|--rounding=gptq|--data=x.txt", "prompts: the text has", "a prompt of 256 was wanted", x_txt=TEXT),
    of(f"{FOLDER}|--rounding=gptq|--data=x.txt", "has no text", x_txt=""),
    of(f"{FOLDER}|--model=x.gguf", "x.gguf", "truncated", x_gguf=b"GGUF\x03\0\0\0"),
    of("--output=configs|--bits=3", "--output=configs exists and is not an empty folder"),
    of("--output=a.txt/made|--bits=3", "a.txt is a file", a_txt="mine"),
    of(f"{FOLDER}|--bits=3|--model=x.gguf|--group_size=48", "tensors do not fit", x_gguf=WHOLE),
]

TABLE = """calibration: {rows: 4, length: 32}
windows: 4
length: 32
methods:
  int4: {recipe: {bits: 4}}
  gptq: {recipe: {bits: 4, rounding: gptq}}
pairs: [[gptq, int4]]
"""


def table(old: str, new: str, *wanted: str) -> Case:
    """Return a case of quality.py whose configuration has one text changed."""
    assert old in TABLE, old
    return Case(("quality.py", "--config=t.yaml", "--workdir=out"), wanted, {"t.yaml": TABLE.replace(old, new)})


def quality(words: str, *wanted: str, **files: str | bytes) -> Case:
    """Return a case of quality.py."""
    given = {name.replace("_", "."): content for name, content in files.items()}
    return Case(("quality.py", "--config=t.yaml", *words.split()), wanted, {"t.yaml": TABLE} | given)


RECIPE = "{bits: 4}"
CASES += [
    Case(("quality.py", "--config=none.yaml"), ("none.yaml",)),
    Case(("quality.py", "--config="), ("--config is missing",)),
    quality("--workdir=t.yaml", "--workdir=t.yaml cannot be a folder"),
    quality("--workdir=/proc/none", "--workdir=/proc/none"),
    quality("--model=", "model: '' names nothing"),
    quality("--model=none/such.gguf", "none/such.gguf does not exist"),
    quality("--model=x.gguf", "x.gguf", x_gguf="mine"),
    quality("--model=x.gguf", "x.gguf", x_gguf=WHOLE[:60]),
    quality("--set=windows=1", "windows", "greater than or equal to 2"),
    quality("--set=windows=many", "windows"),
    quality("--set=length=8", "length", "greater than or equal to 16"),
    quality("--set=length=100000", "prompts: the text has"),
    quality("--set=calibration.rows=0", "calibration.rows"),
    quality("--set=calibration.length=4", "calibration.length"),
    quality("--set=calibration.data=none.txt", "none.txt"),
    quality("--set=calibration.data=x.txt", "prompts: the text has", x_txt=TEXT[:40]),
    quality("--set=calibration.data=x.doc", "x.doc has an unknown suffix", x_doc=TEXT),
    quality("--set=texts.other=x.txt", "prompts: the text has", x_txt=TEXT[:40]),
    quality("--set=texts.other=none.jsonl", "none.jsonl"),
    quality("--set=window=4", "window", "windows"),
    quality("--windows=4", "--windows"),
    quality("table", "'table' is not a flag"),
    table("methods:", "method:", "method"),
    table("methods:", "methods: [", "t.yaml"),
    table(RECIPE, "{bits: 1}", "bits", "greater than or equal to 2"),
    table(RECIPE, "{bits: 9}", "bits"),
    table(RECIPE, "{bits: 4.5}", "bits"),
    table(RECIPE, "{bits: 4, group_size: 0}", "group_size"),
    table(RECIPE, "{bits: 4, zero: some}", "zero"),
    table(RECIPE, "{bits: 4, scale_dtype: int8}", "scale_dtype"),
    table(RECIPE, "{bits: 4, scales: best}", "scales"),
    table(RECIPE, "{bits: 4, rounding: down}", "rounding"),
    table(RECIPE, "{bits: 4, equalize: all}", "equalize"),
    table(RECIPE, "{bits: 4, type: e4m3}", "type=e4m3 has 8 bits"),
    table(RECIPE, "{bits: 4, activations: dynamic}", "activations=dynamic need weights of 8 bits"),
    table(RECIPE, "{bits: 4, embedding_bits: 1}", "embedding_bits"),
    table(RECIPE, "{bit: 4}", "bit", "bits"),
    table("int4: {recipe: {bits: 4}}", "int4: {}", "a method has one of recipe, rounded, torchao and qwix"),
    table("int4: {recipe: {bits: 4}}", "int4: {rounded: q4_0, torchao: int4}", "got ['rounded', 'torchao']"),
    table("int4: {recipe: {bits: 4}}", "int4: {rounded: q3_k}", "rounded"),
    table("int4: {recipe: {bits: 4}}", "int4: {rounded: q4_0, native: {cache: q4_0}}", "cache"),
    table("pairs: [[gptq, int4]]", "pairs: [[gptq, int5]]", "pairs name methods that are not there: int5"),
    table("pairs: [[gptq, int4]]", "pairs: [[gptq]]", "pairs"),
]
