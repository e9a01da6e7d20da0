"""Find the largest batch that fits, from what a run of each size needs (S file)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple


class LargestBatch(NamedTuple):
    """Outcome of a search for the largest batch that fits."""

    batch_size: int  # rows, a multiple of the micro-batches
    run_bytes: int  # what a run with it needs: state, batch, temporaries of a step or an evaluation
    limit_bytes: int
    tried: dict[int, int]  # batch size -> bytes


def find_optimal_batch_size(bytes_of: Callable[[int], int], *, limit_bytes: int, multiple: int = 1) -> LargestBatch:
    """Return the largest batch size, a multiple of `multiple`, whose run needs at most limit_bytes.

    Bytes grow almost linearly with the rows, so four sizes settle it: two, the one at which the line through them meets
    the limit, and the next. Where growth is not linear, every second attempt halves the gap.

    Args:
      bytes_of: batch size -> bytes that a run needs; must not fall as the batch grows.
      limit_bytes: of device memory.
      multiple: micro-batches of a step.

    Raises:
      ValueError: limit_bytes does not hold even the smallest batch.
    """
    tried: dict[int, int] = {}

    def fits(count: int) -> bool:
        tried[count * multiple] = bytes_of(count * multiple)
        return tried[count * multiple] <= limit_bytes

    if not fits(1):
        raise ValueError(
            f"batch size: a step of {multiple} rows needs {tried[multiple]} bytes, the limit is {limit_bytes}; shorten "
            "data.seq_len, or set step.remat.policy=block"
        )
    low, high, previous = 1, None, None  # the largest that fits, the smallest that does not, the one tried before low
    for attempt in itertools.count():
        if high is not None and high - low <= 1:
            break
        at = _expected(low, high, previous, tried, limit_bytes, multiple)
        middle = (low + high) // 2 if high is not None and attempt % 2 else at
        if fits(middle):
            low, previous = middle, low
        else:
            high = middle
    return LargestBatch(low * multiple, tried[low * multiple], limit_bytes, tried)


def _expected(
    low: int, high: int | None, previous: int | None, tried: dict[int, int], limit_bytes: int, multiple: int
) -> int:
    """Where the line through the two nearest sizes meets the limit, above `low` and below `high`."""
    other = high if high is not None else previous
    if other is None:
        return 2 * low
    rise = tried[other * multiple] - tried[low * multiple]
    slope = rise / (other - low)
    at = low + int((limit_bytes - tried[low * multiple]) / slope) if slope > 0 else 2 * low
    # A line through neighbouring sizes may overshoot: allow at most sixteen times the rows.
    return max(low + 1, min(at, 16 * low if high is None else high - 1))
