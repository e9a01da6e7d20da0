"""Prompts and responses as padded arrays: which responses share a row, and the sizes of compiled programs (S file).

What the arrays mean: reader.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

PROMPT_SIZES = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)  # tokens; longer: multiples of 4096
RESPONSE_SIZES = (64, 128, 256, 384, 512, 1024, 2048)  # slots of a row; longer: multiples of 2048


class Text(NamedTuple):
    """A prompt as token ids, and where its context is."""

    ids: Sequence[int]
    context: range  # the context's tokens, may be empty; never the prompt's last token


class PromptArrays(NamedTuple):
    """Prompts without their last tokens: what read_prompt takes."""

    tokens: Int32[np.ndarray, "B P"]
    positions: Int32[np.ndarray, "B P"]
    is_context: Bool[np.ndarray, "B P"]
    num_attended: Int32[np.ndarray, " B"]


class ResponseArrays(NamedTuple):
    """Responses packed into rows: the fields of reader.Responses."""

    tokens: Int32[np.ndarray, "B T"]
    targets: Int32[np.ndarray, "B T"]
    positions: Int32[np.ndarray, "B T"]
    segments: Int32[np.ndarray, "B T"]
    is_generated: Bool[np.ndarray, "B T"]


def bucket(length: int, sizes: Sequence[int]) -> int:
    """Return the least size that holds `length` tokens: one of sizes, or a multiple of the last."""
    return next((size for size in sizes if size >= length), -(-length // sizes[-1]) * sizes[-1])


def pack(lengths: Sequence[int], capacity: int, *, max_responses: int | None = None) -> list[list[int]]:
    """Pack responses, by index, into rows of `capacity` slots: the longest first, each into the first row with room.

    A response longer than `capacity` gets a row to itself. max_responses: of a row; None = any number.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = (row for row, left in enumerate(room) if left >= lengths[index] and len(rows[row]) != max_responses)
        place = next(fits, None)
        if place is None:
            place = len(rows)
            rows.append([])
            room.append(max(capacity, lengths[index]))
        rows[place].append(index)
        room[place] -= lengths[index]
    return rows


def num_attended(num_context: int, share: float) -> int:
    """Number of a context's tokens that count as attended to: a share of them, rounded down, at least one."""
    return max(1, int(num_context * share + 1e-9))


def prompt_arrays(texts: Sequence[Text], *, share: float, size: int | None = None) -> PromptArrays:
    """Arrays of prompts, one per row, padded at the end.

    Raises:
      ValueError: a prompt has no token before its last, or its context is not among the tokens before its last.
    """
    for text in texts:
        if len(text.ids) < 2 or not 0 <= text.context.start <= text.context.stop < len(text.ids):
            raise ValueError(
                f"prompt: {len(text.ids)} tokens with context {text.context}; wanted two or more, and a context that "
                "ends before the last"
            )
    size = size or bucket(max(len(text.ids) - 1 for text in texts), PROMPT_SIZES)
    tokens, positions = np.zeros((len(texts), size), np.int32), np.full((len(texts), size), -1, np.int32)
    is_context = np.zeros(tokens.shape, bool)
    for row, text in enumerate(texts):
        length = len(text.ids) - 1
        tokens[row, :length], positions[row, :length] = text.ids[:-1], np.arange(length)
        is_context[row, text.context.start : text.context.stop] = True
    limits = [num_attended(len(text.context), share) for text in texts]
    return PromptArrays(tokens, positions, is_context, np.array(limits, np.int32))


def response_arrays(
    texts: Sequence[Text], rows: Sequence[Sequence[Sequence[int]]], *, size: int | None = None
) -> ResponseArrays:
    """Arrays of responses by row: those after the row's prompt, one after the other, padded at the end.

    Raises:
      ValueError: a response has no token.
    """
    if any(len(response) == 0 for row in rows for response in row):
        raise ValueError(f"response: wanted at least one token in each, got {[[len(r) for r in row] for row in rows]}")
    size = size or bucket(max(sum(map(len, row)) for row in rows), RESPONSE_SIZES)
    shape = (len(rows), size)
    tokens, targets, segments = (np.zeros(shape, np.int32) for _ in range(3))
    positions, is_generated = np.full(shape, -1, np.int32), np.zeros(shape, bool)
    for row, (text, responses) in enumerate(zip(texts, rows, strict=True)):
        start = 0
        for segment, response in enumerate(responses):
            part = slice(start, start + len(response))
            tokens[row, part], targets[row, part] = [text.ids[-1], *response[:-1]], response
            positions[row, part] = len(text.ids) - 1 + np.arange(len(response))
            segments[row, part] = segment
            is_generated[row, start + 1 : part.stop] = True
            start = part.stop
    return ResponseArrays(tokens, targets, positions, segments, is_generated)


def places(responses: Sequence[Sequence[int]]) -> list[slice]:
    """Return the slots of each response of a row."""
    ends = np.cumsum([len(response) for response in responses])
    return [slice(int(end) - len(response), int(end)) for response, end in zip(responses, ends)]
