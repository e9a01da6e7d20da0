"""Timetable of a pipeline's stages and micro-batches (S file). Letters: M micro-batches, S stages, s a stage.

The forward pass of micro-batch m is at tick m + s in both schedules; the last stage's is part of its backward pass.

- gpipe (Huang et al. 2019, arXiv:1811.06965): backward after every forward, at tick M + m + 2S - 2 - s. A stage keeps
  the inputs of all M micro-batches.
- 1f1b (Narayanan et al. 2019, "PipeDream", section 3.2): backward at tick m + 2S - 2 - s. A stage keeps the inputs of
  at most 2S - 1 micro-batches, so memory does not grow with M.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Work(NamedTuple):
    """One pass of one micro-batch through one stage."""

    tick: int
    stage: int
    kind: str  # forward or backward; the last stage's forward is part of its backward and not listed
    micro_batch: int


def timing(schedule: str, stages: int, micro_batches: int) -> tuple[int, int]:
    """Return the tick of micro-batch 0's backward pass in stage 0, and the number of inputs that a stage keeps."""
    is_gpipe = schedule == "gpipe"
    return 2 * stages - 2 + is_gpipe * micro_batches, micro_batches if is_gpipe else 2 * stages - 1


def timetable(schedule: str, stages: int, micro_batches: int) -> Iterator[Work]:
    """Yield the passes of all stages, tick by tick: the explicit schedule of the compiled program."""
    offset, _ = timing(schedule, stages, micro_batches)
    for tick in range(offset + micro_batches):
        for stage in range(stages):
            forward, backward = tick - stage, tick - (offset - stage)
            if 0 <= forward < micro_batches and stage != stages - 1:
                yield Work(tick, stage, "forward", forward)
            if 0 <= backward < micro_batches:
                yield Work(tick, stage, "backward", backward)
