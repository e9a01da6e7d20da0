"""Bad input of prune.py: flags, settings that do not go together, outputs, damaged models."""

from __future__ import annotations

import functools
import json

from tests.bad_input.core import EMBEDDING, gguf
from tests.bad_input.harness import Case, case_of

WHOLE = gguf(EMBEDDING)
# A folder whose settings are whole and whose weights are missing.
LLAMA = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


of = functools.partial(case_of, ("prune.py",))


def model(words: str, *wanted: str, **files: str | bytes) -> Case:
    """Return a case of `prune.py model` with an output."""
    return of(f"model|--output=o|{words}", *wanted, **files)


def bad_model(content: bytes | str, *wanted: str) -> Case:
    """Return a case whose model is a bad file."""
    return model(f"{HALF}|--model=x.gguf", *wanted, x_gguf=content)


HALF = "--method=magnitude|--fraction=0.5"

CASES = [
    of("prune", "'prune' is no command of prune.py"),
    of("modle", "'modle' is no command of prune.py, the nearest is model"),
    of("--method=magnitude", "is no command of prune.py", "model, speed"),
    of("model", "--method=None is missing", "magnitude, wanda, 2:4"),
    of(f"model|{HALF}", "--output=None is missing"),
    of(f"model|{HALF}|--output=", "--output="),
    model("", "--method=None is missing"),
    model("--method=random", "--method", "random", "magnitude|wanda|2:4"),
    model("--method=", "--method"),
    model("--method=2:5", "--method", "2:5"),
    model("--method=magnitude", "--fraction=None", "wants a share between 0 and 1"),
    model("--method=magnitude|--fraction=0", "--fraction=0.0"),
    model("--method=magnitude|--fraction=1", "--fraction=1.0"),
    model("--method=magnitude|--fraction=50", "--fraction=50.0"),
    model("--method=wanda|--fraction=-0.5", "--fraction=-0.5"),
    model("--method=wanda|--fraction=nan", "--fraction=nan"),
    model("--method=wanda|--fraction=half", "--fraction", "half"),
    model("--method=2:4|--fraction=0.5", "--fraction=0.5 does not go with --method=2:4, only with magnitude, wanda"),
    model("--method=wanda-2:4|--scope=matrix", "--scope=matrix does not go with --method=wanda-2:4"),
    model("--method=structured|--fraction=0.5", "--fraction=0.5 does not go with --method=structured"),
    model("--method=structured", "--method=structured removes nothing", "--keep_kv_heads"),
    model("--method=wanda-structured", "removes nothing"),
    model(f"{HALF}|--keep_d_ff=8", "--keep_d_ff=8 does not go with --method=magnitude, only with structured"),
    model(f"{HALF}|--keep_kv_heads=1", "--keep_kv_heads=1 does not go with --method=magnitude"),
    model(f"{HALF}|--scope=row", "--scope", "row", "matrix|output|global"),
    model("--method=structured|--keep_d_ff=0", "--keep_d_ff", "0"),
    model("--method=structured|--keep_kv_heads=-1", "--keep_kv_heads", "-1"),
    model("--method=structured|--keep_kv_heads=two", "--keep_kv_heads", "two"),
    model("--method=structured|--keep_kv_heads=9", "--keep_kv_heads=9 is not between 1 and the model's 3"),
    model("--method=structured|--keep_d_ff=99999", "--keep_d_ff=99999 is not between 1 and the model's 1536"),
    model("--method=wanda|--fraction=0.5|--batches=0", "--batches=0: --method=wanda needs text"),
    model(f"{HALF}|--batches=-1", "--batches"),
    model(f"{HALF}|--batch_size=0", "--batch_size"),
    model(f"{HALF}|--seq_len=1", "--seq_len"),
    model(f"{HALF}|--seq_len=999999", "--seq_len=999999 is over the model's 8192"),
    model(f"{HALF}|--finetune_steps=-3", "--finetune_steps"),
    model(f"{HALF}|--learning_rate=0", "--learning_rate=0.0"),
    model(f"{HALF}|--learning_rate=1e-3", "--learning_rate=0.001 is for fine-tuning"),
    model(f"{HALF}|--batches=0|--seq_len=64", "--seq_len=64: no text is read"),
    model(f"{HALF}|--learning_rate=inf", "--learning_rate=inf"),
    model(f"{HALF}|--sead=3", "--sead", "nearest is --seed"),
    model(f"{HALF}|more", "'more' is not a flag"),
    model(f"{HALF}|--data=none.txt", "none.txt is no file"),
    model(f"{HALF}|--data=x.pdf", "x.pdf has an unknown suffix", x_pdf="text"),
    model(f"{HALF}|--model=none/such.gguf", "none/such.gguf does not exist"),
    model(f"{HALF}|--model=", "model: '' names nothing"),
    model(f"{HALF}|--model=configs", "configs"),
    model(f"{HALF}|--model=m", "missing model.safetensors", **{"m/config_json": json.dumps(LLAMA)}),
    of(f"model|{HALF}|--output=x.gguf|--model=x.gguf", "--output=x.gguf is the input", x_gguf=WHOLE),
    of(f"model|{HALF}|--output=m|--model=m", "--output=m is the input", **{"m/config_json": json.dumps(LLAMA)}),
    of(f"model|{HALF}|--output=configs", "--output=configs exists and is not an empty folder"),
    of(f"model|{HALF}|--output=o.txt", "--output=o.txt exists and is not an empty folder", o_txt="mine"),
    of(f"model|{HALF}|--output=a.txt/o", "a.txt is a file", a_txt="mine"),
    of(f"model|{HALF}|--output=/proc/none/o", "/proc/none", "nothing can be written"),
    bad_model("", "x.gguf", "not a GGUF file"),
    bad_model(WHOLE[:60], "x.gguf", "truncated"),
    bad_model(gguf(EMBEDDING, architecture="bert"), "x.gguf", "bert"),
    of("speed|--rounds=1", "--rounds", "1"),
    of("speed|--tokens=0", "--tokens", "0"),
    of("speed|--d_ff=6", "--d_ff=6 is not a multiple of 4"),
    of("speed|--local=0", "--local"),
    of("speed|--stride=0", "--stride"),
    of("speed|--output=o.json", "--output=o.json exists", "--overwrite", o_json="{}"),
    of("speed|--method=2:4", "--method"),
]
