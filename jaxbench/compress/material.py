"""Sources of a compressor's training rows: texts, and questions over passages (S file)."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from jaxbench.compress import questions, rows
from jaxbench.compress.config import CompressorConfig
from jaxbench.compress.train_config import TrainingConfig
from jaxbench.text import dataset

HELD_OUT = 0.1  # share of the documents, if no others are named


class Material(NamedTuple):
    """One source of rows."""

    draw: Callable[..., rows.Draw]  # (RowsConfig, seed=, step=) -> a step's rows
    rows: rows.RowsConfig
    share: float  # of steps, in proportion to the others'
    sum: str  # checksum of its tokens: a run resumes only with the material that it began with


def of_texts(texts: Sequence[Int32[np.ndarray, " N"]], shape: CompressorConfig, settings: TrainingConfig) -> Material:
    """Material of texts, to be read back and continued."""
    share = 1.0 if settings.questions is None else 1.0 - settings.questions.share
    return Material(functools.partial(rows.draw, texts, shape), settings.rows, share, _sum(texts))


def of_questions(found: Sequence[questions.Question], shape: CompressorConfig, settings: TrainingConfig) -> Material:
    """Material of questions, to be answered; only those that fit in a row.

    Raises:
      ValueError: none fits, or the settings have no rows for them.
    """
    if settings.questions is None:
        raise ValueError(
            f"train: {len(found)} questions, and questions={settings.questions}; wanted their share and rows"
        )
    kept = questions.fitting(found, shape, settings.questions.rows)
    sum = _sum([ids for each in kept for ids in each[1:4]])
    return Material(
        functools.partial(questions.draw, kept, shape), settings.questions.rows, settings.questions.share, sum
    )


def draw(materials: Sequence[Material], *, seed: int, step: int) -> rows.Draw:
    """Draw the rows of one step from one of the materials."""
    shares = np.array([each.share for each in materials])
    chosen = np.random.default_rng((seed, step, 1)).choice(len(materials), p=shares / shares.sum())
    return materials[chosen].draw(materials[chosen].rows, seed=seed, step=step)


def of_files(
    settings: TrainingConfig, shape: CompressorConfig, tokenizer: Any, *, data: str | None, held_out: str | None,
    question_files: Sequence[str],
) -> tuple[list[Material], list[Material]]:  # fmt: skip
    """Materials to train on, and held-out ones: texts, questions, or both.

    Args:
      data, held_out: documents; None = the default text, and the last tenth of `data`.

    Raises:
      ValueError: files and settings do not go together, or a file is missing or damaged.
    """
    if bool(question_files) != (settings.questions is not None):
        raise ValueError(
            f"--questions={','.join(question_files)} and the setting questions={settings.questions}; wanted files and "
            "their share, or neither"
        )
    has_texts = settings.questions is None or settings.questions.share < 1
    if not has_texts and (data or held_out):
        raise ValueError(
            f"--questions with --data={data} and --held_out={held_out}: with questions.share=1 no step is of texts"
        )
    found = [_of_documents(settings, shape, tokenizer, data, held_out)] if has_texts else []
    if question_files:
        all = [each for path in question_files for each in questions.of_file(path, tokenizer)]
        found.append([of_questions(side, shape, settings) for side in questions.split(all)])
    learned, judged = zip(*found)
    return list(learned), list(judged)


def _of_documents(
    settings: TrainingConfig, shape: CompressorConfig, tokenizer: Any, data: str | None, held_out: str | None
) -> list[Material]:
    corpus = dataset.prepare(data, tokenizer=tokenizer)
    if held_out is None:
        corpus, other = dataset.split(corpus, HELD_OUT)
    else:
        other = dataset.prepare(held_out, tokenizer=tokenizer)
        if other.sha256 == corpus.sha256:
            raise ValueError(f"--held_out={held_out} is the text of --data={data or 'default'}; name another one")
    named, found = [data or "default", held_out or f"the last {HELD_OUT:.0%} of {data or 'default'}"], []
    for each, name in zip((corpus, other), named):
        dataset.check(each, vocab_size=shape.decoder.vocab_size, what=f"the text {name}")
        found.append(of_texts([each.ids[a:b] for a, b in itertools.pairwise(each.starts)], shape, settings))
    return found


def _sum(texts: Sequence[Int32[np.ndarray, " N"]]) -> str:
    """CRC-32 of texts."""
    sum = functools.reduce(lambda sum, text: zlib.crc32(np.ascontiguousarray(text).view(np.uint8), sum), texts, 0)
    return f"{sum:08x}"
