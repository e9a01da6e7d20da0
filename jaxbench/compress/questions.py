"""Questions over passages as rows that a compressor's decoder is tuned on: vectors, question, answer (S file).

Articles, not questions, are split into training and held-out ones, so that no passage is on both sides. Some rows have
passages as plain text: whole, truncated or none. Without them, the plain-text baseline would be the decoder reading
what it was never trained on.
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
ASKED = 0.25  # share of the articles that are held out: asked about, not trained on
FORMS, FORM_SHARES = ("whole", "beginning", "nothing"), (0.5, 0.3, 0.2)  # of a passage as plain text


class Question(NamedTuple):
    """A question with its passage, as tokens and as words."""

    title: str
    context: Int32[np.ndarray, " N"]
    question: Int32[np.ndarray, " L"]  # "Question: ... Answer:"
    answer: Int32[np.ndarray, " U"]  # the first of `answers`, or NO_ANSWER, and the end token
    answers: tuple[str, ...]


def of_file(path: str | Path, tokenizer: Any) -> list[Question]:
    """Read the questions of a file as tokens of a tokenizer.

    Raises:
      ValueError: as text/questions.read raises.
    """
    found = []
    for each in questions.read(path):
        answer = answer_ids(each.answers[0] if each.answers else NO_ANSWER, tokenizer)
        context, question = _ids(each.context, tokenizer), _ids(asked(each.question), tokenizer)
        found.append(Question(each.title, context, question, answer, each.answers))
    return found


def answer_ids(text: str, tokenizer: Any) -> Int32[np.ndarray, " U"]:
    """Tokens of an answer, and the end token if the model has one."""
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return np.append(_ids(f" {text}", tokenizer), end).astype(np.int32)


def _ids(text: str, tokenizer: Any) -> Int32[np.ndarray, " N"]:
    return np.array(tokenizer.encode(text, add_special=False), np.int32)


def asked(question: str) -> str:
    """Text between a passage, as vectors or plain text, and an answer."""
    return f"\nQuestion: {question.strip()}\nAnswer:"


def split(found: Sequence[Question], share: float = ASKED) -> tuple[list[Question], list[Question]]:
    """Split into training questions and those of about `share` of the articles, chosen only by title, to ask."""

    def is_asked(title: str) -> bool:
        return int.from_bytes(hashlib.sha256(title.encode()).digest()[:4]) < share * 2**32

    sides: tuple[list[Question], list[Question]] = ([], [])
    for each in found:
        sides[is_asked(each.title)].append(each)
    return sides


def drawn(found: Sequence[Question], count: int, *, seed: int) -> list[Question]:
    """Draw `count` questions at random, or all if there are fewer.

    Raises:
      ValueError: there are none, or those drawn are about one article, none has an answer, or one has no passage.
    """
    if not found:
        raise ValueError(f"questions: {len(found)} are about articles that are not learned from; wanted more articles")
    order = np.random.default_rng(seed).permutation(len(found))[:count]
    chosen = [found[i] for i in np.sort(order)]
    titles, answered = {each.title for each in chosen}, sum(bool(each.answers) for each in chosen)
    if len(titles) < 2 or not answered:
        raise ValueError(
            f"questions: {len(chosen)} were drawn, about {len(titles)} articles, {answered} of them with an answer; "
            "wanted two articles and an answer at least: ask more, or name other files"
        )
    empty = [each.title for each in chosen if not len(each.context)]
    if empty:
        raise ValueError(
            f"questions: {len(empty)} of {len(chosen)} have an empty passage, about {empty[0]!r}; wanted text"
        )
    return chosen


def fitting(found: Sequence[Question], config: CompressorConfig, settings: rows.RowsConfig) -> list[Question]:
    """Select questions whose passage, question and answer fit in a row.

    Raises:
      ValueError: none fits.
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
    """Draw the rows of one step, each a question after a passage's vectors or, in a share of steps, plain text.

    Raises:
      ValueError: the ratio is not one of the compressor's.
    """
    if settings.ratio is not None:
        config.check_ratio(settings.ratio)
    random = np.random.default_rng((seed, step))
    is_clear = bool(settings.in_clear) and random.random() < settings.in_clear
    ratio = settings.ratio or int(random.choice(config.ratios, p=settings.weights))
    made = []
    for i in random.integers(len(found), size=settings.batch):
        one, aligned = found[i], bool(random.random() < settings.aligned)
        passage, clear = one.context, one.question
        if is_clear:  # the whole passage, its first 1 / ratio, or nothing
            form = random.choice(FORMS, p=FORM_SHARES)
            kept = {"whole": len(passage), "beginning": len(passage) // ratio, "nothing": 0}[form]
            passage, clear = passage[:0], np.concatenate([passage[:kept], clear])
        made.append(
            rows.row(
                passage, one.answer, rows.ANSWER, config, config.ratios[-1] if is_clear else ratio,
                settings.num_chunks, aligned=aligned, clear=clear,
            )
        )  # fmt: skip
    room = settings.clear + config.prefix - 1 + (settings.num_chunks * config.chunk if is_clear else 0)
    # No local targets: next to answers of a few tokens the local head would dominate the loss (compressor.loss_of).
    return rows.Draw(ratio, rows.stacked(made, settings.num_targets, clear=room))
