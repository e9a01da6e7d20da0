"""Numbers of rows that a runner has programs for (S file)."""

from __future__ import annotations

from jaxbench.serve.scheduler import Limits

FINE = 32  # up to so many rows, a size every four; above, steps of a quarter


def row_sizes(limits: Limits) -> tuple[int, ...]:
    """Return the sizes, ascending up to max_batch_tokens: at most a quarter of a step, or three rows, is padding."""
    most = limits.max_batch_tokens
    found = [size for size in (1, 2, *range(4, FINE + 1, 4)) if size < most]
    size = FINE
    while size < most:
        step = size // 4
        found += [each for each in range(size + step, 2 * size + 1, step) if each < most]
        size *= 2
    return (*found, most)
