"""Ask a compressed text: a decoder reads its vectors block by block, and says what one of them answers.

Data's way: a text's vectors -> blocks of as many chunks as the decoder was tuned on, so that a text may be longer than
the decoder's positions -> the most probable answer behind each, and how much more probable it is than the word that
says that there is none -> the answer of the block where that margin is largest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.compress import answering, evaluate, questions, reading
from jaxbench.compress.auto import AutoCompressor, Prompt
from jaxbench.compress.document import CompressionResult

CHUNKS = 1  # of a block, as in the rows of questions that the shipped weights were trained on


class Answer(NamedTuple):
    """An answer, and where it was read."""

    text: str | None  # None = no block answers the question
    margin: float  # log-probability of it with its end, beside that of "there is none", nats
    span: tuple[int, int]  # characters of the block that was read: from, to


class Best(NamedTuple):
    """The answer of one of many prompts."""

    block: int  # its number
    text: str | None
    margin: float


def ask(
    compressor: AutoCompressor, reader: reading.Reader, generate: answering.Generate, result: CompressionResult,
    question: str, *, progress: Callable[[int], Any] = lambda count: None,
) -> Answer:  # fmt: skip
    """Answer a question from a compressed text.

    Args:
      reader, generate: of the decoder that reads the compressor's vectors.

    Raises:
      ValueError: the question is empty, or the vectors are another decoder's or another compressor's.
    """
    if not question.strip():
        raise ValueError(f"ask: the question is {question!r}; wanted words")
    compressor.check(result)
    words = compressor.words
    asked = np.array(words.encode(questions.asked(question), add_special=False), np.int32)
    places = blocks(result, CHUNKS * compressor.config.chunk)
    given = [answering.behind(compressor, result.vectors[a:b], asked) for a, b in places]
    best = best_of(reader, generate, words, given, progress=progress)
    start, end = places[best.block]
    return Answer(best.text, best.margin, (int(result.spans[start, 0]), int(result.spans[end - 1, 1])))


def best_of(
    reader: reading.Reader, generate: answering.Generate, words: Any, given: Sequence[Prompt],
    *, progress: Callable[[int], Any] = lambda count: None,
) -> Best:  # fmt: skip
    """The answer behind that prompt where it is most probable beside "there is none"."""
    said: list[str] = []
    for first in range(0, len(given), evaluate.TOGETHER):
        part = given[first : first + evaluate.TOGETHER]
        said += answering.generated(generate, words, part)
        progress(len(part))
    margins = [own - none for own, none in zip(*(_logs(reader, words, given, said, each) for each in (False, True)))]
    is_answer = np.array([bool(text) and not answering.is_no_answer(text) for text in said])
    best = int(np.argmax(np.where(is_answer, margins, -np.inf))) if is_answer.any() else int(np.argmax(margins))
    return Best(best, said[best] if is_answer.any() else None, float(margins[best]))


def blocks(result: CompressionResult, tokens: int) -> list[tuple[int, int]]:
    """Which vectors make a block of so many tokens: from, to."""
    numbers = result.positions // tokens
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    return list(zip(starts.tolist(), [*starts[1:].tolist(), len(numbers)]))


def _logs(
    reader: reading.Reader, words: Any, given: Sequence[Prompt], said: Sequence[str], no_answer: bool
) -> list[float]:
    """Log-probability of what was said behind each prompt, or of NO_ANSWER, its end with it, nats."""
    rows = []
    for prompt, text in zip(given, said):
        answer = questions.answer_ids(questions.NO_ANSWER if no_answer else text, words)
        rows.append(reading.Row(np.array([*prompt.ids, *answer[:-1]], np.int32), answer, prompt.vectors))
    return [-float(heard.losses.sum()) for heard in reader(rows)]
