"""Evaluations of `compress.py evaluate`: continuations of texts, answers to questions, or needles in texts.

Inputs are read and checked before a model is loaded, and every part of a run is saved in `workdir`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench import store, terminal
from jaxbench.compress import answer_run, answering, document, evaluate, evaluate_run, needles, questions, reading
from jaxbench.compress.auto import AutoCompressor
from jaxbench.pretrained import weights
from jaxbench.pretrained.tokenizer import load_tokenizer
from jaxbench.text import dataset


class How(NamedTuple):
    """Settings of an evaluation."""

    load: Callable[[int], AutoCompressor]  # by ratio
    model: str | None  # the decoder; None = the default model
    precision: str
    ratios: tuple[int, ...]
    workdir: Path
    data: str | None = None  # documents; None = the default text
    questions: tuple[str, ...] = ()  # files, used instead of documents
    needles: int = 0  # tokens of the texts that a sentence is hidden in; 0 = continuations
    windows: int = 200
    tokens: int = evaluate.CONTEXT  # compressed, per window
    chunks: int = 48  # read back, of those windows
    count: int = 200  # of questions, or of needles per kind and depth
    seed: int = 0
    store: document.Dtype = "float32"  # format that vectors are rounded to
    adapters: bool = True  # of the decoder, if the weights have any
    backend: str = "flax"  # of the encoder: flax or torch


class Figures(NamedTuple):
    """Results of an evaluation."""

    rows: Any
    about: dict[str, Any]
    picture: str | None = None  # SVG


def run(how: How) -> Figures:
    """Run an evaluation.

    Raises:
      ValueError: a file is missing or damaged, a text too short or longer than the decoder's context, or the folder
        belongs to another run.
    """
    compute = _answers if how.questions else _needles if how.needles else _continuations
    return compute(how, load_tokenizer(how.model))


def _continuations(how: How, tokenizer: Any) -> Figures:
    following = evaluate.CLEAR + evaluate.ASKED
    reading.check_room(how.tokens + following, weights.read_config(how.model).max_seq_len)
    texts, sha256 = _documents(how, tokenizer)
    drawn = evaluate.windows(texts, how.windows, seed=how.seed, context=how.tokens)
    compressor, checkpoint = how.load(how.ratios[0]), weights.load_checkpoint(how.model)
    params = compressor.reader(checkpoint.params) if how.adapters else checkpoint.params
    side = answer_run.side(checkpoint.config, params, tokenizer, how.precision)
    start = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    plan = evaluate_run.Plan(how.ratios, min(how.chunks, how.windows), start or 0, how.store)
    workdir = _claimed(how, compressor, plan, how.windows, how.tokens, how.adapters, sha256)
    rows = evaluate_run.run(compressor, side, drawn, plan, workdir)
    rows.sort(key=lambda row: row["ratio"])
    about = _about(how, compressor) | {
        "data": Path(how.data or "default").name, "text_sha256": sha256, "windows": len(drawn), "tokens": how.tokens,
        "chunks": plan.chunks, "documents": len({window.document for window in drawn}), "adapters": how.adapters,
        "store": plan.store,
    }  # fmt: skip
    return Figures(rows, about, evaluate_run.picture(rows, about))


def _needles(how: How, tokenizer: Any) -> Figures:
    texts, sha256 = _documents(how, tokenizer)
    drawn = needles.needles(texts, tokenizer, length=how.needles, count=how.count, seed=how.seed)
    compressor, checkpoint = how.load(how.ratios[0]), weights.load_checkpoint(how.model)
    side = answer_run.side(checkpoint.config, compressor.reader(checkpoint.params), tokenizer, how.precision)
    workdir = _claimed(how, compressor, "needles", how.needles, how.count, sha256)
    rows = needles.run(compressor, side, drawn, how.ratios, workdir)
    about = {
        "data": Path(how.data or "default").name, "text_sha256": sha256, "tokens": how.needles,
        "of_a_kind_at_a_depth": how.count,
    }  # fmt: skip
    return Figures(rows, _about(how, compressor) | about)


def _answers(how: How, tokenizer: Any) -> Figures:
    names = [Path(path).name for path in how.questions]
    found = [each for path in how.questions for each in questions.of_file(path, tokenizer)]
    asked = questions.drawn(questions.split(found)[1], how.count, seed=how.seed)
    longest = max(len(each.context) + len(each.question) for each in asked)
    reading.check_room(1 + longest + answering.NEW_TOKENS, weights.read_config(how.model).max_seq_len)
    compressor, checkpoint = how.load(how.ratios[0]), weights.load_checkpoint(how.model)
    # a tag may have several vectors, which only the weights tell
    reading.check_room(compressor.config.prefix + longest + answering.NEW_TOKENS, checkpoint.config.max_seq_len)
    sums = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in how.questions]
    workdir = _claimed(how, compressor, "questions, beginnings as long as vectors", sums, how.count)
    rows = answer_run.of_questions(compressor, checkpoint, how.precision, asked, how.ratios, workdir)
    terminal.console().print(answer_run.table(rows))
    about = _about(how, compressor) | {
        "questions": names, "questions_sha256": sums, "asked": len(asked),
        "articles": len({each.title for each in asked}), "without_answer": sum(not each.answers for each in asked),
    }  # fmt: skip
    return Figures(rows, about)


def _documents(how: How, tokenizer: Any) -> tuple[list[Any], str]:
    """Token ids of each document, and the text's SHA-256."""
    corpus, name = dataset.prepare(how.data, tokenizer=tokenizer), how.data or "default"
    dataset.check(corpus, vocab_size=weights.read_config(how.model).vocab_size, what=f"the text {name}")
    return [corpus.ids[a:b] for a, b in itertools.pairwise(corpus.starts)], corpus.sha256


def _claimed(how: How, compressor: AutoCompressor, *what: Any) -> Path:
    """Claim the folder of the parts for this run and return it."""
    backend = "" if how.backend == "flax" else f"-{how.backend}"
    store.claim(how.workdir, f"{what}-{how.seed}-{compressor.id}-{how.precision}{backend}")
    return how.workdir


def _about(how: How, compressor: AutoCompressor) -> dict[str, Any]:
    return {
        "compressor": compressor.id, "model_sha256": compressor.model_sha256, "trained": dict(compressor.about),
        "precision": how.precision, "backend": how.backend,
    }  # fmt: skip
