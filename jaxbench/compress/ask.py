"""Ask a compressed text: a decoder reads its vectors block by block and gives the answer of one block.

Data flow: a text's vectors -> blocks of as many chunks as the decoder was tuned on, so that a text may be longer than
the decoder's context -> the most probable answer to each, and its margin: how much more probable it is than NO_ANSWER
-> the answer of the block with the largest margin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.compress import answering, evaluate, questions, reading
from jaxbench.compress.auto import AutoCompressor, Prompt
from jaxbench.compress.document import CompressionResult

CHUNKS = 1  # of a block, as in the question rows that the shipped weights were trained on


class Answer(NamedTuple):
    """An answer, and where it was read."""

    text: str | None  # None = no block answers the question
    margin: float  # log-probability of it with its end token, less that of NO_ANSWER, nats
    span: tuple[int, int]  # characters of the block: from, to


class Best(NamedTuple):
    """The answer of the best of many prompts."""

    block: int  # index of the prompt
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
      ValueError: the question is empty, or the vectors are for another decoder or from another compressor.
    """
    if not question.strip():
        raise ValueError(f"ask: the question is {question!r}; wanted words")
    compressor.check(result)
    tokenizer = compressor.tokenizer
    asked = np.array(tokenizer.encode(questions.asked(question), add_special=False), np.int32)
    places = blocks(result, CHUNKS * compressor.config.chunk)
    given = [answering.behind(compressor, result.vectors[a:b], asked) for a, b in places]
    best = best_of(reader, generate, tokenizer, given, progress=progress)
    start, end = places[best.block]
    return Answer(best.text, best.margin, (int(result.spans[start, 0]), int(result.spans[end - 1, 1])))


def best_of(
    reader: reading.Reader, generate: answering.Generate, tokenizer: Any, given: Sequence[Prompt],
    *, progress: Callable[[int], Any] = lambda count: None,
) -> Best:  # fmt: skip
    """Return the answer of the prompt with the largest margin over NO_ANSWER."""
    said: list[str] = []
    for first in range(0, len(given), evaluate.TOGETHER):
        part = given[first : first + evaluate.TOGETHER]
        said += answering.generated(generate, tokenizer, part)
        progress(len(part))
    margins = [
        own - none for own, none in zip(*(_logs(reader, tokenizer, given, said, each) for each in (False, True)))
    ]
    is_answer = np.array([bool(text) and not answering.is_no_answer(text) for text in said])
    best = int(np.argmax(np.where(is_answer, margins, -np.inf))) if is_answer.any() else int(np.argmax(margins))
    return Best(best, said[best] if is_answer.any() else None, float(margins[best]))


def blocks(result: CompressionResult, tokens: int) -> list[tuple[int, int]]:
    """Return which vectors make each block of `tokens` tokens: from, to."""
    numbers = result.positions // tokens
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    return list(zip(starts.tolist(), [*starts[1:].tolist(), len(numbers)]))


def _logs(
    reader: reading.Reader, tokenizer: Any, given: Sequence[Prompt], said: Sequence[str], no_answer: bool
) -> list[float]:
    """Log-probability of each prompt's answer, or of NO_ANSWER, including the end token, in nats."""
    rows = []
    for prompt, text in zip(given, said):
        answer = questions.answer_ids(questions.NO_ANSWER if no_answer else text, tokenizer)
        rows.append(reading.Row(np.array([*prompt.ids, *answer[:-1]], np.int32), answer, prompt.vectors))
    return [-float(heard.losses.sum()) for heard in reader(rows)]
