"""Bad input of compress.py: commands, flags, settings, texts, models."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np

from jaxbench.compress import document
from tests.bad_input.core import EMBEDDING, folder, gguf
from tests.bad_input.harness import Case, case_of

TRAIN, TINY = ("compress.py", "train"), "--config=configs/compress/tiny.yaml"
COMPRESS, ASK, LIST, EVALUATE, PACK, BENCHMARK = (
    ("compress.py", each) for each in ("compress", "ask", "list", "evaluate", "pack", "benchmark")
)
ALL = "--set=questions.share=1"
BOTH, OUT = "--input=a.txt|--output=o.safetensors", "--output=o.json"
WORDS = "the mill by the river " * 40


of, text, figures, asked = (functools.partial(case_of, each) for each in (TRAIN, COMPRESS, EVALUATE, ASK))


def model(**changes: object) -> Case:
    """Return the case of a model folder whose config.json is changed."""
    return Case((*TRAIN, TINY, "--set=model=model"), tuple(str(value) for value in changes.values()), folder(**changes))


def vectors() -> bytes:
    """Return a compressed text of one vector at 8 tokens per vector."""
    places = np.array([4], np.int32)
    made = document.CompressionResult(np.zeros((1, 576), np.float32), np.array([[0, 20]]), places, 8, 8, 0.0, "", "")
    with tempfile.TemporaryDirectory() as place:
        document.save(f"{place}/v", made)
        return Path(place, "v").read_bytes()


CASES = [
    Case("compress.py trane", ("'trane' is no command", "nearest is train")),
    Case("compress.py 7", ("'7' is no command", "wanted one of compress")),
    of("now", "'now' is not a flag"),
    of("--dta=a.txt", "--dta", "nearest is --data"),
    of("--device=gpu", "--device=gpu", "this machine has none"),
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
    of("--set=accumulation=3", "rows.batch=2 is not a multiple of accumulation=3"),
    of("--set=steps=10", "warmup_steps=60", "steps=10"),
    of("--set=rows.weights=[1]", "rows.weights=[1.0]", "5 shares"),
    of("--set=rows.weights=[1,1,1,1,1]", "rows.weights=", "add up to 1"),
    of("--set=rows.in_clear=0.5", "rows.in_clear=0.5: not of rows of texts"),
    of("--set=questions.rows.short=0.5", "questions.rows.short=0.5: not of rows of questions"),
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
    of("--set=rows.readable=-1", "readable", "-1"),
    of("--set=rows.short=-0.5", "short", "-0.5"),
    of("--set=rows.sampled=0", "sampled", "0"),
    of("--set=rows.clear=-1", "clear", "-1"),
    of("--set=rows.aligned=2", "aligned", "2"),
    of("--set=fast=0", "fast", "0"),
    of("--set=distilled=-1", "distilled", "-1"),
    of("--set=trained=decoder", "trained", "decoder"),
    of("--set=trained=adapters", "trained=adapters with lora=None: nothing would learn"),
    of("--set=rows.ratio=5", "ratio=5; wanted one of 2, 4, 8, 16, 32"),
    of("--set=rows.num_chunks=200", "the longest text has", "wanted 51392"),
    of(f"{TINY}|--data=none.txt", "none.txt"),
    of(f"{TINY}|--data=a.csv", "a.csv", "unknown suffix", a_csv="text"),
    of(f"{TINY}|--data=a.txt", "a.txt", "no text", a_txt=""),
    of(f"{TINY}|--data=a.txt", "a.txt", "not UTF-8", "0xff", a_txt=b"words \xff"),
    of(f"{TINY}|--data=a.jsonl", "a.jsonl line 2", '"text"', a_jsonl='{"text": "a"}\n{"txt": "b"}\n'),
    of(f"{TINY}|--data=a.txt", "the longest text has", "wanted 384", a_txt=WORDS),
    of(f"{TINY}|--held_out=none.txt", "none.txt"),
    of(f"{TINY}|--held_out=a.txt", "the longest text has", "wanted 384", a_txt=WORDS),
    of(f"{TINY}|--set=model=none.gguf", "none.gguf does not exist"),
    of(f"{TINY}|--set=model=a.txt", "a.txt", "not a GGUF file", a_txt="text"),
    of(f"{TINY}|--set=model=x.gguf", "x.gguf", "truncated", x_gguf=gguf(EMBEDDING)[:60]),
    of(f"{TINY}|--set=start=none.safetensors", "none.safetensors is no file"),
    of("--set=chunk=1", "chunk", "1"),
    of("--set=chunk=48", "chunk=48", "divide"),
    of("--set=rows.in_clear=1", "in_clear", "1"),
    of("--set=questions.share=0", "share", "0"),
    of("--set=questions.rows.batch=3|--set=accumulation=2", "questions.rows.batch=3 is not a multiple"),
    of("--set=questions.rows.weights=[1]", "questions.rows.weights=[1.0]", "5 shares"),
    of(f"{TINY}|--questions=q.jsonl", "--questions=q.jsonl and the setting questions=None", q_jsonl=""),
    of(f"{TINY}|{ALL}", "--questions= and the setting questions="),
    of(f"{TINY}|{ALL}|--questions=none.jsonl", "none.jsonl is no file"),
    of(f"{TINY}|{ALL}|--questions=q.jsonl", "q.jsonl line 1 has no 'question'", q_jsonl='{"context": "a"}\n'),
    of(f"{TINY}|{ALL}|--questions=q.jsonl|--data=a.txt", "--data=a.txt", "questions.share=1", q_jsonl="", a_txt=WORDS),
    case_of(BENCHMARK, "", "--output"),
    case_of(BENCHMARK, f"{OUT}|--lengths=0", "--lengths=0; wanted numbers from 1 on"),
    case_of(BENCHMARK, f"{OUT}|--lengths=1k", "--lengths", "'1k' is no whole number"),
    case_of(BENCHMARK, f"{OUT}|--batches=0", "--batches=0; wanted numbers from 1 on"),
    case_of(BENCHMARK, f"{OUT}|--num_layers=0", "--num_layers", "0"),
    case_of(BENCHMARK, f"{OUT}|--num_layers=31", "num_layers=31 of a decoder that has 30"),
    case_of(BENCHMARK, f"{OUT}|--name=rfcc-base-5x", "ratio=5; wanted one of 2, 4, 8, 16, 32"),
    case_of(PACK, "--output=o.safetensors", "--weights"),
    case_of(PACK, "--weights=w.safetensors|--output=o.safetensors", "w.safetensors is no file"),
    case_of(PACK, "--weights=w.safetensors|--output=o.safetensors", "is damaged", w_safetensors="text"),
    case_of(PACK, "--weights=w.safetensors|--output=w.safetensors", "is the input", w_safetensors="text"),
    case_of(PACK, "--weights=w.safetensors|--output=o.safetensors|--bits=1", "--bits", "1"),
    text("--name=rfcc-base-8x", "--input"),
    text("--input=a.txt", "--output is missing; see --help", a_txt=WORDS),
    text("--input=a.txt|--output=a.txt", "--output=a.txt is the input a.txt", a_txt=WORDS),
    text(f"{BOTH}|--name=rfcc-base-3x", "ratio=3; wanted one of 2, 4, 8, 16, 32", a_txt=WORDS),
    text(f"{BOTH}|--name=8x", "'8x'; wanted rfcc-base-Nx", a_txt=WORDS),
    text(BOTH, "--input=a.txt is no file"),
    text(BOTH, "a.txt is empty", a_txt=""),
    text(BOTH, "a.txt is no UTF-8 text: byte 6", a_txt=b"words \xff"),
    text(f"{BOTH}|--workdir=a.txt", "--workdir=a.txt cannot be a folder", a_txt=WORDS),
    text(f"{BOTH}|--dtype=int3", "--dtype", "int3", a_txt=WORDS),
    text(f"{BOTH}|--weights=w.safetensors", "w.safetensors is no file", a_txt=WORDS),
    text(f"{BOTH}|--weights=w.safetensors", "w.safetensors is damaged", a_txt=WORDS, w_safetensors="text"),
    text(f"{BOTH}|--model=none.gguf", "none.gguf does not exist", a_txt=WORDS),
    text(f"{BOTH}|--precision=int8", "--precision", "int8", a_txt=WORDS),
    text(f"{BOTH}|--backend=equinox", "--backend", "equinox", a_txt=WORDS),
    text(f"{BOTH}|--dtpe=int8", "--dtpe", "nearest is --dtype", a_txt=WORDS),
    asked("--question=Who?", "--input"),
    asked("--input=a.txt", "--question", a_txt=WORDS),
    asked("--input=a.txt|--question= ", "--question=' '; wanted words", a_txt=WORDS),
    asked("--input=a.txt|--question=Who?", "--input=a.txt is no file"),
    asked("--input=a.txt|--question=Who?", "a.txt is empty", a_txt=""),
    asked("--input=a.txt|--question=Who?", "a.txt is no UTF-8 text: byte 6", a_txt=b"words \xff"),
    asked("--input=a.txt|--question=Who?|--name=rfcc-base-3x", "ratio=3; wanted one of 2, 4, 8, 16, 32", a_txt=WORDS),
    asked("--input=a.safetensors|--question=Who?", "a.safetensors is no file; `compress.py compress` makes one"),
    asked("--input=a.safetensors|--question=Who?", "a.safetensors is damaged", a_safetensors="text"),
    asked(
        "--input=a.safetensors|--question=Who?|--name=rfcc-base-2x",
        "--name=rfcc-base-2x, and a.safetensors was compressed by rfcc-base-8x; leave it out",
        a_safetensors=vectors(),
    ),
    asked("--input=a.txt|--question=Who?|--weights=w.safetensors", "w.safetensors is no file", a_txt=WORDS),
    asked("--input=a.txt|--qestion=Who?", "--qestion", "nearest is --question", a_txt=WORDS),
    case_of(LIST, "--weights=w.safetensors", "w.safetensors is no file"),
    case_of(LIST, "--weights=w.safetensors", "w.safetensors is damaged", w_safetensors="text"),
    figures("--ratios=8", "--output"),
    figures(f"{OUT}|--ratios=eight", "--ratios", "'eight' is no whole number"),
    figures(f"{OUT}|--ratios=5", "ratio=5; wanted one of 2, 4, 8, 16, 32"),
    figures(f"{OUT}|--ratios=", "--ratios=; wanted one at least"),
    figures("--output=o.svg", "--output=o.svg ends with .svg"),
    figures(OUT, "o.svg, which is written beside it, exists", o_svg="mine"),
    figures(f"{OUT}|--tokens=8001", "8193 positions; wanted at most the decoder's context, 8192"),
    figures(f"{OUT}|--windows=0", "windows", "0"),
    figures(f"{OUT}|--data=none.txt", "none.txt"),
    figures(f"{OUT}|--data=a.txt", "the longest text has", "wanted 704", a_txt=WORDS),
    figures(f"{OUT}|--questions=none.jsonl", "none.jsonl is no file"),
    figures(f"{OUT}|--questions=q.jsonl|--data=a.txt", "--data=a.txt: not of figures of questions", a_txt=WORDS),
    figures(f"{OUT}|--needles=100|--windows=3", "--windows=3: not of figures of needles"),
    figures(f"{OUT}|--count=3", "--count=3: not of figures of texts"),
    figures(f"{OUT}|--tokens=0", "--tokens", "0"),
    figures(f"{OUT}|--questions=q.jsonl", "q.jsonl has none", q_jsonl=""),
    figures(f"{OUT}|--questions=q.jsonl|--needles=100", "--needles=100: not of figures of questions"),
    figures(f"{OUT}|--needles=-1", "--needles", "-1"),
    figures(f"{OUT}|--needles=5000|--data=a.txt", "needles: the longest text has", "wanted 5000", a_txt=WORDS),
    figures(f"{OUT}|--store=int3", "--store", "int3"),
    figures(f"{OUT}|--questions=q.jsonl|--count=1", "--count", "1", q_jsonl=""),
    figures(f"{OUT}|--weights=w.safetensors", "w.safetensors is no file"),
    model(hidden_size=0),
    model(model_type="bert"),
]
