"""Questions over passages as rows that a compressor's decoder is tuned on: vectors, question, answer (S file).

A file of questions has a JSON object a line: `context`, `question`, `answers` (texts; none = it cannot be answered from
the passage) and `title`, of the article that the passage is from. Articles, not questions, are split into what is
learned and what is asked, so that no passage is on both sides.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from jaxbench.compress import rows
from jaxbench.compress.config import CompressorConfig

NO_ANSWER = "unanswerable"
FIELDS = ("context", "question", "answers", "title")


class Question(NamedTuple):
    """A question with its passage, in tokens and in words."""

    title: str
    context: Int32[np.ndarray, " N"]
    question: Int32[np.ndarray, " L"]  # "Question: ... Answer:"
    answer: Int32[np.ndarray, " U"]  # the first of `answers`, or NO_ANSWER, and the end
    answers: tuple[str, ...]


def read(path: str | Path, words: Any) -> list[Question]:
    """Questions of a .jsonl or .jsonl.gz file.

    Raises:
      ValueError: a line is no JSON object with FIELDS, or there is none; the message names it.
    """
    path, found = Path(path), []
    if not path.is_file():
        raise ValueError(f"questions: {path} is no file")
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            found.append(_question(line, f"{path} line {number}", words))
    if not found:
        raise ValueError(f"questions: {path} has none")
    return found


def _question(line: str, place: str, words: Any) -> Question:
    try:
        row = json.loads(line)
        missing = [name for name in FIELDS if name not in row]
    except (ValueError, TypeError) as error:
        raise ValueError(f"questions: {place} is no JSON object ({error})") from error
    if missing:
        raise ValueError(f"questions: {place} has no {missing[0]!r}; wanted {', '.join(FIELDS)}")
    end = [] if words.eos_id is None else [words.eos_id]
    ids = {
        "context": words.encode(row["context"], add_special=False),
        "question": words.encode(asked(row["question"]), add_special=False),
        "answer": words.encode(f" {row['answers'][0] if row['answers'] else NO_ANSWER}", add_special=False) + end,
    }
    return Question(
        row["title"], answers=tuple(row["answers"]), **{name: np.array(each, np.int32) for name, each in ids.items()}
    )  # fmt: skip


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
