"""A visit: one arm measures one workload until its samples have taken enough time (S file).

Samples are counted by time, so that a fast workload has many and a slow one few. A visit during which the machine
stalled (the control loop, which no backend touches, became slower) is made again and its samples are not used. Which of
a process's first samples are still warm-up is read from the samples themselves.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxbench.measure import energy

MOST_SAMPLES = 50  # of one visit
MOST_REPEATS = 1  # visits made again because of a stall; the last one counts whatever happened
SLOWER = 1.1  # a first sample above this many times the median of those after it is warm-up


class Control:
    """A fixed numpy loop: when it moves, the machine moved."""

    def __init__(self, most_drift: float):
        self.most_drift = most_drift  # share by which the loop may be slower than it was at its best
        self.seconds: list[float] = []
        # Operands larger than the second-level cache, and a product of a few milliseconds on one core.
        self._matrix = np.full((256, 256), 1 / 256, np.float32)
        self._long = np.ones(4_000_000, np.float32)

    def is_calm(self, repeats: int = 5) -> bool:
        """True where the loop is as fast as before; the best of several runs, for one says more about cold caches."""
        best = self._run()
        limit = (1 + self.most_drift) * min([*self.seconds, best])
        for _ in range(repeats - 1):
            if self.seconds and best <= limit:
                break
            best = min(best, self._run())
        self.seconds.append(best)
        return best <= (1 + self.most_drift) * min(self.seconds)

    def _run(self) -> float:
        matrix, start = self._matrix, time.perf_counter()
        for _ in range(4):
            matrix = matrix @ self._matrix
            self._long.sum()
        return time.perf_counter() - start


@contextlib.contextmanager
def competing(count: int) -> Iterator[None]:
    """Keep `count` processes at work that each take what they can of a core."""
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class Visit(NamedTuple):
    """What one visit gave."""

    answers: list[dict]  # one a sample
    repeats: int  # visits before it that were not used because the machine stalled
    joules: float | None  # that the machine took meanwhile; None where no counter can be read


def visit(measure: Callable[[], dict | None], control: Control, *, sample_s: float) -> Visit:
    """Samples of one visit.

    Args:
      measure: one sample; None where the arm failed, which ends the visit.
      control: whose last reading was calm.
      sample_s: seconds of sampling that are enough; one sample is made in any case.
    """
    for repeats in range(MOST_REPEATS + 1):
        answers, start, counters = [], time.monotonic(), energy.readings()
        while not answers or (time.monotonic() - start < sample_s and len(answers) < MOST_SAMPLES):
            answer = measure()
            if answer is None:
                return Visit(answers, repeats, None)
            answers.append(answer)
        joules = energy.spent(counters, energy.readings()) if counters else None
        if control.is_calm() or repeats == MOST_REPEATS:
            break
    return Visit(answers, repeats, joules)


def settled(seconds: Sequence[float]) -> int:
    """Number of leading samples that are warm-up: slower than the median of those after them; at most half of them."""
    first = 0
    while first < len(seconds) // 2 and seconds[first] > SLOWER * statistics.median(seconds[first + 1 :]):
        first += 1
    return first
