"""Questions over passages as rows that a compressor's decoder is tuned on: vectors, question, answer (S file).

Articles, not questions, are split into what is learned and what is asked, so that no passage is on both sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from jaxbench.compress import rows
from jaxbench.compress.config import CompressorConfig
from jaxbench.text import questions

NO_ANSWER = "unanswerable"


class Question(NamedTuple):
    """A question with its passage, in tokens and in words."""

    title: str
    context: Int32[np.ndarray, " N"]
    question: Int32[np.ndarray, " L"]  # "Question: ... Answer:"
    answer: Int32[np.ndarray, " U"]  # the first of `answers`, or NO_ANSWER, and the end
    answers: tuple[str, ...]


def of_file(path: str | Path, words: Any) -> list[Question]:
    """Questions of a file, in tokens of a tokenizer.

    Raises:
      ValueError: as text/questions.read raises.
    """
    end = [] if words.eos_id is None else [words.eos_id]

    def ids(text: str) -> np.ndarray:
        return np.array(words.encode(text, add_special=False), np.int32)

    found = []
    for each in questions.read(path):
        answer = np.append(ids(f" {each.answers[0] if each.answers else NO_ANSWER}"), end).astype(np.int32)
        found.append(Question(each.title, ids(each.context), ids(asked(each.question)), answer, each.answers))
    return found


def asked(question: str) -> str:
    """What stands behind vectors, or a passage in clear, in front of an answer."""
    return f"\nQuestion: {question.strip()}\nAnswer:"


def split(found: Sequence[Question], share: float) -> tuple[list[Question], list[Question]]:
    """Questions to learn from, and those of about `share` of the articles, chosen by their titles alone, to ask."""

    def is_asked(title: str) -> bool:
        return int.from_bytes(hashlib.sha256(title.encode()).digest()[:4]) < share * 2**32

    sides: tuple[list[Question], list[Question]] = ([], [])
    for each in found:
        sides[is_asked(each.title)].append(each)
    return sides


def fitting(found: Sequence[Question], config: CompressorConfig, settings: rows.RowsConfig) -> list[Question]:
    """Questions whose passage, question and answer have room in a row.

    Raises:
      ValueError: none has.
    """
    most = (settings.num_chunks * config.chunk, settings.clear, settings.num_targets)
    kept = [each for each in found if all(0 < len(ids) <= room for ids, room in zip(each[1:4], most))]
    if not kept:
        raise ValueError(
            f"questions: none of {len(found)} has room: num_chunks={settings.num_chunks} of {config.chunk} tokens, "
            f"clear={settings.clear}, num_targets={settings.num_targets}"
        )
    return kept


def draw(
    found: Sequence[Question], config: CompressorConfig, settings: rows.RowsConfig, *, seed: int, step: int
) -> rows.Draw:
    """Rows of one step, each a question that fits.

    Raises:
      ValueError: the ratio is not one of the compressor's.
    """
    if settings.ratio is not None:
        config.check_ratio(settings.ratio)
    random = np.random.default_rng((seed, step))
    ratio = settings.ratio or int(random.choice(config.ratios, p=settings.weights))
    made = []
    for i in random.integers(len(found), size=settings.batch):
        one, aligned = found[i], random.random() < settings.aligned
        made.append(
            rows.row(
                one.context, one.answer, rows.ANSWER, config, ratio, settings.num_chunks, aligned=bool(aligned),
                clear=one.question,
            )
        )  # fmt: skip
    arrays = rows.stacked(made, settings.num_targets, clear=settings.clear)
    return rows.Draw(ratio, arrays._replace(sampled=rows.sampled(arrays.context, settings.sampled, random)))
