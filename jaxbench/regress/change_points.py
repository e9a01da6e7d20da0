"""Since when is a series different: change points of its history, which annotate and never gate (S file).

Kernel change-point detection with the best number of segments by a penalty (Celisse et al. 2018, JMLR 19(22); PELT of
Killick et al. 2012, JASA 107:1590-1598; both in ruptures) on logarithms over the noise of neighbouring runs, so that
one outlier moves nothing. A series of independent noise has one in 1 of 100 (docs/performance_history.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST = 4  # runs of a segment
GAMMA = 0.25  # of the kernel, in units of the noise's variance
PENALTY = 1.0  # of a change point, times the logarithm of the number of runs
NOISELESS = 1e-9  # change of a logarithm below which two counts are the same


class ChangePoint(NamedTuple):
    """A run from which on a series is another."""

    index: int  # of the first run of the new level
    before: float  # median of the segment that ends there
    after: float


def change_points(values: Sequence[float], *, counted: bool = False) -> list[ChangePoint]:
    """Change points of a series in time order; none where a value is not positive or there are too few.

    Args:
      counted: runs do not differ by chance: every change is one, in a series of any length.
    """
    x = np.asarray(values, np.float64)
    if len(x) < 2 or not np.all(np.isfinite(x)) or x.min() <= 0:
        return []
    logs = np.log(x)
    steps = np.diff(logs)
    if counted:
        edges = [int(i) + 1 for i in np.flatnonzero(np.abs(steps) > NOISELESS)]
    elif len(x) < 2 * LEAST or (spread := _spread(steps)) == 0:
        edges = []
    else:
        import ruptures

        found = ruptures.KernelCPD(kernel="rbf", min_size=LEAST, params={"gamma": GAMMA}).fit((logs / spread)[:, None])
        edges = [int(edge) for edge in found.predict(pen=PENALTY * math.log(len(x)))[:-1]]
    bounds = [0, *edges, len(x)]
    levels = [float(np.median(x[start:end])) for start, end in zip(bounds, bounds[1:])]
    return [ChangePoint(at, levels[i], levels[i + 1]) for i, at in enumerate(edges)]


def _spread(steps: np.ndarray) -> float:
    """Spread of the noise, from steps of the logarithms [R - 1] between neighbouring runs; 0 = nothing moves.

    By the median, so that steps of level and outliers move it little. Where half of the steps are 0, values are rounded
    or hardly noisy: noise of half a unit of the last place, the smallest step, would leave fewer that are.
    """
    size = np.abs(steps - np.median(steps))
    if (middle := float(np.median(size))) > NOISELESS:
        return middle * 1.4826 / math.sqrt(2)
    moved = size[size > NOISELESS]
    return float(moved.min()) / 2 if len(moved) else 0.0
