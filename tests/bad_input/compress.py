"""Bad input of compress.py: commands, flags, settings, texts, models."""

from __future__ import annotations

import functools

from tests.bad_input.core import EMBEDDING, folder, gguf
from tests.bad_input.harness import Case, case_of

TRAIN, TINY = ("compress.py", "train"), "--config=configs/compress/tiny.yaml"
WORDS = "the mill by the river " * 40


of = functools.partial(case_of, TRAIN)


def model(**changes: object) -> Case:
    """Return the case of a model folder whose config.json is changed."""
    return Case((*TRAIN, TINY, "--set=model=model"), tuple(str(value) for value in changes.values()), folder(**changes))


CASES = [
    Case("compress.py trane", ("'trane' is no command", "nearest is train")),
    Case("compress.py 7", ("'7' is no command", "wanted one of train")),
    of("now", "'now' is not a flag"),
    of("--dta=a.txt", "--dta", "nearest is --data"),
    of("--hold_out=a.txt", "--hold_out", "nearest is --held_out"),
    of("--config=", "--config"),
    of("--config=none.yaml", "none.yaml"),
    of("--config=configs/compress", "configs/compress"),
    of("--config=configs/lm/tiny.yaml", "configs/lm/tiny.yaml"),
    of("--config=a.yaml", "a.yaml", a_yaml="steps: [1"),
    of("--config=a.yaml", "a.yaml", "nearest is steps", a_yaml="stepps: 3\n"),
    of("--config=a.yaml", "a.yaml", "steps", a_yaml="steps: 1\nsteps: 2\n"),
    of("--config=a.yaml", "a.yaml", a_yaml="- steps\n"),
    of("--set=stps=1", "stps", "nearest is steps"),
    of("--set=steps", "steps"),
    of("--set=steps=0", "steps", "0"),
    of("--set=steps=1.5", "steps", "1.5"),
    of("--set=steps=many", "steps", "many"),
    of("--set=learning_rate=0", "learning_rate", "0"),
    of("--set=learning_rate=.nan", "learning_rate"),
    of("--set=weight_decay=-1", "weight_decay", "-1"),
    of("--set=precision=int8", "precision", "int8"),
    of("--set=num_layers=0", "num_layers", "0"),
    of("--set=num_layers=31", "num_layers=31 of a decoder that has 30"),
    of("--set=accumulation=0", "accumulation", "0"),
    of("--set=accumulation=3", "rows.batch=4 is not a multiple of accumulation=3"),
    of("--set=steps=10", "warmup_steps=60", "steps=10"),
    of("--set=rows.weights=[1]", "rows.weights=[1.0]", "5 shares"),
    of("--set=rows.weights=[1,1,1,1,1]", "rows.weights=", "add up to 1"),
    of("--set=seed=-1", "seed", "-1"),
    of("--set=held_out_every=0", "held_out_every", "0"),
    of("--set=held_out_batches=1", "held_out_batches", "1"),
    of("--set=held_out_ratio=3", "ratio=3; wanted one of 2, 4, 8, 16, 32"),
    of("--set=lora.rank=0", "rank", "0"),
    of("--set=lora.targets=[w_proj]", "w_proj", "q_proj"),
    of("--set=schedule.kind=step", "kind", "step"),
    of("--set=rows=3", "rows", "3"),
    of("--set=rows.bach=3", "bach", "nearest is rows.batch"),
    of("--set=rows.batch=0", "batch", "0"),
    of("--set=rows.num_chunks=0", "num_chunks", "0"),
    of("--set=rows.num_targets=0", "num_targets", "0"),
    of("--set=rows.num_targets=257", "num_targets=257; wanted at most a chunk of 256"),
    of("--set=rows.reconstruct=1.5", "reconstruct", "1.5"),
    of("--set=rows.dropout=1", "dropout", "1"),
    of("--set=rows.short=-0.5", "short", "-0.5"),
    of("--set=rows.sampled=0", "sampled", "0"),
    of("--set=rows.ratio=5", "ratio=5; wanted one of 2, 4, 8, 16, 32"),
    of("--set=rows.num_chunks=200", "the longest text has", "wanted 51456"),
    of(f"{TINY}|--data=none.txt", "none.txt"),
    of(f"{TINY}|--data=a.csv", "a.csv", "unknown suffix", a_csv="text"),
    of(f"{TINY}|--data=a.txt", "a.txt", "no text", a_txt=""),
    of(f"{TINY}|--data=a.txt", "a.txt", "not UTF-8", "0xff", a_txt=b"words \xff"),
    of(f"{TINY}|--data=a.jsonl", "a.jsonl line 2", '"text"', a_jsonl='{"text": "a"}\n{"txt": "b"}\n'),
    of(f"{TINY}|--data=a.txt", "the longest text has", "wanted 320", a_txt=WORDS),
    of(f"{TINY}|--held_out=none.txt", "none.txt"),
    of(f"{TINY}|--held_out=a.txt", "the longest text has", "wanted 320", a_txt=WORDS),
    of(f"{TINY}|--set=model=none.gguf", "none.gguf does not exist"),
    of(f"{TINY}|--set=model=a.txt", "a.txt", "not a GGUF file", a_txt="text"),
    of(f"{TINY}|--set=model=x.gguf", "x.gguf", "truncated", x_gguf=gguf(EMBEDDING)[:60]),
    model(hidden_size=0),
    model(model_type="bert"),
]
