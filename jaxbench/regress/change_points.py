"""Find change points in a series' history, which annotate it and never gate (S file).

Kernel change-point detection with a penalised number of segments (Celisse et al. 2018, JMLR 19(22); PELT of Killick et
al. 2012, JASA 107:1590-1598; both in ruptures) on logarithms scaled by the noise between neighbouring runs, so that one
outlier has no effect. 1 of 100 series of independent noise has a change point (docs/performance_history.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST = 4  # runs per segment, at least
GAMMA = 0.25  # of the kernel, in units of the noise's variance
PENALTY = 1.0  # per change point, in units of the logarithm of the number of runs
NOISELESS = 1e-9  # relative change below which two values are the same


class ChangePoint(NamedTuple):
    """A run at which the level of a series changes."""

    index: int  # of the first run of the new level
    before: float  # median of the segment that ends there
    after: float


def change_points(values: Sequence[float], *, counted: bool = False) -> list[ChangePoint]:
    """Find the change points of a series in time order; none if a value is not finite, or too few values.

    Args:
      counted: the series has no noise, so every change is a change point, in a series of any length, from 0 and to 0
        too. Any other series has none if a value is not positive.
    """
    x = np.asarray(values, np.float64)
    if len(x) < 2 or not np.all(np.isfinite(x)):
        return []
    edges = _edges_of_counts(x) if counted else _edges(x)
    bounds = [0, *edges, len(x)]
    levels = [float(np.median(x[start:end])) for start, end in zip(bounds, bounds[1:])]
    return [ChangePoint(at, levels[i], levels[i + 1]) for i, at in enumerate(edges)]


def _edges_of_counts(x: np.ndarray) -> list[int]:
    """First runs of new levels in a series without noise; a count may be 0, such as that of recompilations."""
    size = np.maximum(np.abs(x[1:]), np.abs(x[:-1]))
    return [int(i) + 1 for i in np.flatnonzero(np.abs(np.diff(x)) > NOISELESS * size)]


def _edges(x: np.ndarray) -> list[int]:
    """First runs of new levels in a series with noise, all of whose values are positive."""
    if len(x) < 2 * LEAST or x.min() <= 0 or (spread := _spread(np.diff(np.log(x)))) == 0:
        return []
    import ruptures

    scaled = (np.log(x) / spread)[:, None]
    found = ruptures.KernelCPD(kernel="rbf", min_size=LEAST, params={"gamma": GAMMA}).fit(scaled)
    return [int(edge) for edge in found.predict(pen=PENALTY * math.log(len(x)))[:-1]]


def _spread(steps: np.ndarray) -> float:
    """Estimate the noise from steps of the logarithms [R - 1] between neighbouring runs; 0 = nothing changes.

    It uses the median, so level shifts and outliers have little influence. If half of the steps are 0, values are
    rounded or hardly noisy: take half the smallest step, as noise of that size would leave fewer steps at 0.
    """
    size = np.abs(steps - np.median(steps))
    if (middle := float(np.median(size))) > NOISELESS:
        return middle * 1.4826 / math.sqrt(2)
    moved = size[size > NOISELESS]
    return float(moved.min()) / 2 if len(moved) else 0.0
