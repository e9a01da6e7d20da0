"""Bad input of startup.py: flags, outputs, damaged models."""

from __future__ import annotations

import functools

from tests.bad_input.core import EMBEDDING, I32, folder, gguf
from tests.bad_input.harness import Case, case_of

WHOLE = gguf(EMBEDDING)


of = functools.partial(case_of, ("startup.py",))


def bad_model(content: bytes | str, *wanted: str) -> Case:
    """Return a case whose model is a bad file."""
    return of("--model=x.gguf", "x.gguf", *wanted, x_gguf=content)


CASES = [
    of("--rounds=1", "--rounds", "1", "[2, 1000]"),
    of("--rounds=0", "--rounds", "0"),
    of("--rounds=-3", "--rounds", "-3"),
    of("--rounds=1001", "--rounds", "1001"),
    of("--rounds=two", "--rounds", "two"),
    of("--rounds=2.5", "--rounds", "2.5"),
    of("--rounds=", "--rounds"),
    of("--rounds=nan", "--rounds", "nan"),
    of("--round=3", "--round", "nearest is --rounds"),
    of("--onlly=load", "--onlly", "nearest is --only"),
    of("--outptu=o.json", "--outptu", "nearest is --output"),
    of("--modell=default", "--modell", "nearest is --model"),
    of("--kernels=native", "--kernels"),
    of("--backend=torch", "--backend"),
    of("load", "'load' is not a flag"),
    of("--rounds=2|more", "'more' is not a flag"),
    of("--only=lode", "--only=lode is in no row's name", "load, Flax native"),
    of("--only=Load", "--only=Load is in no row's name"),
    of("--only=load,Flax", "--only=load,Flax is in no"),
    of("--only=first token;load", "--only=first token;load is in no"),
    of("--only=PyTorch XLA", "--only=PyTorch XLA is in no"),
    of("--only=.*", "--only=.* is in no"),
    of("--output=", "--output="),
    of("--output=a.txt/o.json", "a.txt is a file", a_txt="mine"),
    of("--output=/proc/none/o.json", "/proc/none"),
    of("--output=configs", "--output=configs"),
    of("--output=o.json", "--output=o.json exists", "--overwrite", o_json="{}"),
    of("--model=m.gguf|--output=m.gguf", "--output=m.gguf is the input m.gguf", m_gguf=WHOLE),
    of("--model=m.gguf|--output=./m.gguf|--overwrite", "m.gguf is the input m.gguf", m_gguf=WHOLE),
    Case(("startup.py", "--model=model", "--output=model/config.json", "--overwrite"), ("is the input",), folder()),
    of("--overwite", "--overwite", "nearest is --overwrite"),
    of("--model=", "model: '' names nothing"),
    of("--model=none.gguf", "none.gguf does not exist"),
    of("--model=none/such.gguf", "none/such.gguf does not exist"),
    of("--model=configs", "configs"),
    of("--model=a.txt", "a.txt", "not a GGUF file", a_txt="text"),
    Case(("startup.py", "--model=model"), ("hidden_size=0",), folder(hidden_size=0)),
    Case(("startup.py", "--model=model"), ("bert",), folder(model_type="bert")),
    Case(("startup.py", "--model=model"), ("config.json",), {"model/config.json": "{"}),
    bad_model("", "not a GGUF file"),
    bad_model("GGUF", "truncated GGUF file of 4 bytes"),
    bad_model(b"GGUF" + bytes([9, 0, 0, 0]) + bytes(16), "version 9"),
    bad_model(WHOLE[:60], "truncated"),
    bad_model(gguf(EMBEDDING, cut=64), "truncated"),
    bad_model(gguf(EMBEDDING, architecture="bert"), "bert"),
    bad_model(gguf(EMBEDDING, architecture=["llama"]), "['llama']"),
    bad_model(gguf({"token_embd.weight": ((16, 8), I32)}), "I32"),
    bad_model(gguf(EMBEDDING, block_count="many"), "many"),
    bad_model(gguf(EMBEDDING, attention__head_count=0)),
    bad_model(gguf(EMBEDDING, attention__head_count=["2"]), "head_count"),
    bad_model(gguf(EMBEDDING, attention__layer_norm_rms_epsilon="small"), "small"),
]
