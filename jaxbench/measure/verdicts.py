"""Verdicts that hold on a noisy machine (S file: numpy and scipy only).

The unit of replication is a launch: one set of fresh worker processes, one per arm, run in turn. A launch gives one
log ratio per arm (arm over baseline, oriented so that > 0 is better), and the interval is a t-interval over launches.
More rounds inside a launch never narrow it, because each process has its own offset that rounds do not average out.
A percentile is given only where its 95 % bound exists.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import special

Verdict = Literal["faster", "slower", "undecided"]
# Upper over lower end of a ratio's interval: a wider one allows both ten times faster and ten times slower, more than
# any two arms here have ever differed.
MAX_WIDTH = 100.0
POWER = 0.9  # share of cases in which a ratio called decidable gets a verdict


class Interval(NamedTuple):
    """A mean of log ratios with its confidence interval, which is infinite for a single launch."""

    mean: float  # mean log ratio
    low: float
    high: float
    p_value: float  # two-sided, of "the ratio lies within the margin"
    num_launches: int
    df: float  # degrees of freedom of its standard error; 0 = one launch
    error: float  # standard error of the mean

    def ratio(self) -> tuple[float, float, float]:
        """Return (point, low, high) as plain ratios."""
        return _exp(self.mean), _exp(self.low), _exp(self.high)


def median(samples: Sequence[float]) -> float:
    """Return the median; the mean is 2-5 times noisier on a shared machine and is never used for a verdict."""
    if not len(samples):
        raise ValueError(f"verdicts: the median of {len(samples)} samples is undefined")
    return float(np.median(np.asarray(samples, dtype=np.float64)))


def log_ratio(arm: Sequence[float], baseline: Sequence[float], *, higher_is_better: bool) -> float:
    """Return one launch's log ratio of medians, oriented so that > 0 means the arm is better."""
    top, bottom = median(arm), median(baseline)
    if not (top > 0 and bottom > 0):
        raise ValueError(f"verdicts: a ratio needs positive medians, got {top} against {bottom}")
    value = math.log(top) - math.log(bottom)  # a quotient may overflow
    return value if higher_is_better else -value


def t_interval(log_ratios: Sequence[float], *, confidence: float = 0.95, margin: float = 0.0) -> Interval:
    """Return the t-interval over launches of per-launch log ratios.

    `margin` is the relative difference that does not count (0.05 = 5 %); it affects the p-value only.
    """
    if not 0.5 < confidence < 1:
        raise ValueError(f"verdicts: confidence={confidence} must lie between 0.5 and 1")
    values = np.asarray(log_ratios, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"verdicts: log ratios must be a non-empty list of finite numbers, got {log_ratios!r}")
    count, mean = len(values), float(values.mean())
    if count == 1:
        return Interval(mean, -math.inf, math.inf, 1.0, 1, 0.0, math.inf)
    error = float(values.std(ddof=1)) / math.sqrt(count)
    return interval(mean, error, count - 1, count, confidence=confidence, margin=margin)


def interval(
    mean: float, error: float, df: float, num_launches: int, *, confidence: float = 0.95, margin: float = 0.0
) -> Interval:
    """Return the t-interval around a mean with its standard error and degrees of freedom."""
    half = float(special.stdtrit(df, 0.5 + confidence / 2)) * error  # as stats.t.ppf, without its argument checks
    excess = max(abs(mean) - math.log1p(margin), 0.0)
    if error == 0:
        p_value = 0.0 if excess > 0 else 1.0
    else:
        p_value = float(2 * special.stdtr(df, -excess / error))
    return Interval(mean, mean - half, mean + half, min(p_value, 1.0), num_launches, float(df), error)


class Judgement(NamedTuple):
    """Verdict on one row of a family."""

    verdict: Verdict
    p_value: float  # after Holm's correction
    decidable: float  # smallest ratio above 1 that such launches decide in nine of ten cases; infinite for one launch


def judge(intervals: Sequence[Interval], *, confidence: float = 0.95, margin: float = 0.0) -> list[Judgement]:
    """Return the verdicts of a family of rows; all hold together with the given confidence (Holm)."""
    alpha = 1 - confidence
    p_values = holm([interval.p_value for interval in intervals])
    share = alpha / max(1, int((p_values > alpha).sum()))  # alpha of each row that is left when Holm stops
    judged = []
    for interval, p_value in zip(intervals, p_values, strict=True):
        verdict: Verdict = "undecided"
        if p_value <= alpha:
            verdict = "faster" if interval.mean > 0 else "slower"
        judged.append(Judgement(verdict, float(p_value), _decidable(interval, alpha=share, margin=margin)))
    return judged


def _decidable(interval: Interval, *, alpha: float, margin: float) -> float:
    if interval.num_launches < 2:
        return math.inf
    steps = float(special.stdtrit(interval.df, 1 - alpha / 2) + special.stdtrit(interval.df, POWER))
    return _exp(math.log1p(margin) + steps * interval.error)


def is_informative(low: float, high: float) -> bool:
    """Tell whether a ratio's interval is informative: it excludes 1, or is no wider than a factor of MAX_WIDTH.

    A few launches that differ widely give t-intervals such as [0.00, 456864.72]: correct, but of no use to a reader.
    """
    if not (0 < low and high < math.inf):
        return False
    return not low <= 1 <= high or high / low <= MAX_WIDTH


def holm(p_values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return Holm's step-down p-values [.. K] of families of K tests (scipy has no such function).

    Rejecting those at or below alpha has a family-wise error of at most alpha, under any dependence. They are never
    above Bonferroni's. Source: Holm 1979, Scandinavian Journal of Statistics 6(2):65-70.
    """
    p = np.asarray(p_values, np.float64)
    order = np.argsort(p, axis=-1, kind="stable")
    factors = np.arange(p.shape[-1], 0, -1, dtype=np.float64)
    stepped = np.maximum.accumulate(np.minimum(1.0, np.take_along_axis(p, order, axis=-1) * factors), axis=-1)
    return np.take_along_axis(stepped, np.argsort(order, axis=-1), axis=-1)


def samples_for_percentile(share: float, *, confidence: float = 0.95) -> int:
    """Return the least n with a distribution-free upper bound of the percentile: share**n <= 1 - confidence.

    299 for p99 at 95 %, 59 for p95, 29 for p90.
    """
    if not 0 < share < 1:
        raise ValueError(f"verdicts: percentile share={share} must lie strictly between 0 and 1")
    return math.ceil(math.log(1 - confidence) / math.log(share))


def percentiles(samples: Sequence[float], shares: Sequence[float] = (0.5, 0.9, 0.95, 0.99)) -> dict[str, float | None]:
    """Return {"p50": value, ...}; None where there are too few samples for the percentile to have a bound."""
    values = np.asarray(samples, dtype=np.float64)
    bounded: dict[str, float | None] = {}
    for share in shares:
        enough = len(values) >= (1 if share <= 0.5 else samples_for_percentile(share))
        bounded[f"p{share * 100:g}"] = float(np.quantile(values, share)) if enough and len(values) else None
    return bounded


def drift(control: Sequence[Sequence[float]]) -> float:
    """Return the share by which the control loop's launch medians differ: slowest over fastest, minus one.

    The control is a fixed numpy loop that no backend touches: if its time changes, the machine's speed changed.
    """
    medians = [median(samples) for samples in control if len(samples)]
    if not medians:
        return 0.0
    if min(medians) <= 0:
        raise ValueError(f"verdicts: control times must be positive, got medians {medians}")
    return max(medians) / min(medians) - 1


def _exp(value: float) -> float:
    return math.inf if value > math.log(sys.float_info.max) else math.exp(value)
