"""A visit: one arm measures one workload until its samples have taken enough time (S file).

Sampling stops by time, so a fast workload has many samples and a slow one few. If the machine stalled during a visit
(the control loop, which no backend touches, became slower), the visit is repeated and its samples are discarded. Which
of a process's first samples are still warm-up is read from the samples themselves.
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
MOST_REPEATS = 1  # repeats of a visit because of a stall; the last one counts whatever happened
SLOWER = 1.1  # a first sample above this many times the median of those after it is warm-up


class Control:
    """A fixed numpy loop: if its time changes, the machine's speed changed."""

    def __init__(self, most_drift: float):
        self.most_drift = most_drift  # share by which the loop may be slower than its best time so far
        self.seconds: list[float] = []
        # Operands larger than the second-level cache, and a product of a few milliseconds on one core.
        self._matrix = np.full((256, 256), 1 / 256, np.float32)
        self._long = np.ones(4_000_000, np.float32)

    def is_calm(self, repeats: int = 5) -> bool:
        """Return True if the loop is as fast as before; the best of several runs, as cold caches may slow one run."""
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
    """Run `count` processes that each keep a core busy, while the context is open."""
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class Visit(NamedTuple):
    """Result of one visit."""

    answers: list[dict]  # one per sample
    repeats: int  # earlier visits that were discarded because the machine stalled
    joules: float | None  # energy that the machine used during the visit; None where no counter can be read


def visit(measure: Callable[[], dict | None], control: Control, *, sample_s: float) -> Visit:
    """Take the samples of one visit.

    Args:
      measure: takes one sample; returns None if the arm failed, which ends the visit.
      control: the control loop, calm at its last reading.
      sample_s: seconds after which sampling stops; at least one sample is taken.
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
    """Count the leading warm-up samples, each over SLOWER times the median of those after it; at most half of all."""
    first = 0
    while first < len(seconds) // 2 and seconds[first] > SLOWER * statistics.median(seconds[first + 1 :]):
        first += 1
    return first
