"""Is head worse than base? Verdicts for a run's series over its pairs of launches (S file).

A pair of launches, one fresh process of each side, gives one log ratio per series, oriented so that above 0 is worse.
Timed series are judged together: an interval for each from moderated variances over the pairs, p-values after Holm
within two families. Alpha is split over the looks and over the families: four fifths for the few primary series, so
that all the others do not cost them power. Exact series are compared by value, and a difference of any size counts.

- regression: worse beyond chance, and by more than the warning margin; critical where the whole interval is above the
  critical one.
- improvement: the same in the other direction.
- no change: the interval lies within the warning margin on both sides.
- undecided: none of these, with how many pairs of launches would decide.

An interval holds at the suite's level for its own series. For a family as a whole, the level holds for the claim that
no series is called worse, or better, by chance. A value that is not finite on head alone is a critical regression.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import stats

from jaxbench.measure import moderation, verdicts
from jaxbench.regress import metrics
from jaxbench.regress.metrics import Margin
from jaxbench.regress.suite import Suite

Verdict = Literal["regression", "improvement", "no change", "undecided"]
Level = Literal["", "warning", "critical"]
PRIMARY_SHARE = 0.8  # of alpha
MOST_LAUNCHES = 1000  # cap on the wanted pairs: more than anybody waits for


class Finding(NamedTuple):
    """Verdict on one series."""

    series: str
    verdict: Verdict
    level: Level  # of a regression
    worse: float  # share by which head is worse than base; below 0 it is better
    low: float  # lower end of its interval; equal to `worse` for exact series
    high: float
    base: float  # medians over launches
    head: float
    num_pairs: int
    wanted_pairs: int  # for an undecided series: pairs of launches that would decide it; 0 = not undecided


class Pair(NamedTuple):
    """Medians of both sides of a series in one pair of launches."""

    base: float
    head: float


def judge(pairs: Mapping[str, Sequence[Pair]], suite: Suite, *, num_looks: int = 1) -> list[Finding]:
    """Judge all series that both sides have.

    Args:
      pairs: by series, in the order of the launches.
      num_looks: how often a run may be judged before it ends; each look gets its share of alpha.
    """
    kinds = {name: metrics.metric_of(name).kind for name in pairs}
    pairs = {name: each for name, each in pairs.items() if kinds[name] != "noted"}
    measured = [name for name in pairs if kinds[name] in ("timed", "memory")]
    timed = [name for name in measured if all(0 < value < math.inf for pair in pairs[name] for value in pair)]
    alpha = suite.alpha / num_looks
    logs = [[log_ratio(name, pair) for pair in pairs[name]] for name in timed]
    intervals = dict(zip(timed, moderation.intervals(logs, confidence=1 - alpha), strict=True))
    shares = _shares_of_alpha({name: interval.p_value for name, interval in intervals.items()}, suite, alpha)
    left = _alphas_left(shares, suite, alpha)
    found = {
        name: _timed(name, interval, shares[name] <= 1, pairs[name], suite.margin(name), (alpha, left[name]))
        for name, interval in intervals.items()
    }
    found |= {name: _without_ratio(name, pairs[name]) for name in measured if name not in found}
    exact = {name: _exact(name, pairs[name], suite.margin(name)) for name in pairs if name not in found}
    return [(found | exact)[name] for name in pairs]


def _families(names: Iterable[str], suite: Suite, alpha: float) -> list[tuple[list[str], float]]:
    """Return the primary series and all others, each with its part of alpha; a family that is alone gets all of it."""
    primaries = set(suite.primaries())
    families = [[name for name in names if (name in primaries) == is_first] for is_first in (True, False)]
    parts = (PRIMARY_SHARE, 1 - PRIMARY_SHARE) if all(families) else (1.0, 1.0)
    return [(names, alpha * part) for names, part in zip(families, parts, strict=True)]


def _shares_of_alpha(p_values: Mapping[str, float], suite: Suite, alpha: float) -> dict[str, float]:
    """Return each series' p-value after Holm in its family, over that family's alpha; at most 1 = beyond chance."""
    found = {}
    for names, own in _families(p_values, suite, alpha):
        adjusted = verdicts.holm([p_values[name] for name in names])
        found |= {name: float(p) / own for name, p in zip(names, adjusted, strict=True)}
    return found


def _alphas_left(shares: Mapping[str, float], suite: Suite, alpha: float) -> dict[str, float]:
    """Return by series the p-value that it needs: alpha of its family over those that Holm leaves open."""
    found = {}
    for names, own in _families(shares, suite, alpha):
        num_open = sum(shares[name] > 1 for name in names)
        found |= dict.fromkeys(names, own / max(1, num_open))
    return found


def stored(record: Mapping[str, Any]) -> list[Finding]:
    """Return the findings of a run's record, of a run just made or of one that was read from its file.

    The file, which is JSON, has null for infinity (a rise from 0) and for any other value that is not finite.
    """
    null = {"base": math.nan, "head": math.nan}
    return [
        Finding(**{name: null.get(name, math.inf) if value is None else value for name, value in each.items()})
        for each in record["findings"]
    ]


def log_ratio(series: str, pair: Pair) -> float:
    """Return the log of how much worse head is in one pair of launches."""
    value = math.log(pair.head) - math.log(pair.base)  # a quotient may overflow
    return -value if metrics.metric_of(series).higher_is_better else value


def _timed(
    name: str, interval: verdicts.Interval, beyond_chance: bool, pairs: Sequence[Pair], margin: Margin,
    alphas: tuple[float, float],
) -> Finding:  # fmt: skip
    """Return the finding for a series with log ratios; alphas: as in `_wanted`."""
    worse, low, high = (share - 1 for share in interval.ratio())
    base, head = (verdicts.median(side) for side in zip(*pairs))
    least, most = math.log1p(margin.warning), math.log1p(margin.critical)
    verdict, level, wanted = "undecided", "", 0
    if beyond_chance and interval.mean > least:
        verdict, level = "regression", "critical" if interval.low > most else "warning"
    elif beyond_chance and interval.mean < -least:
        verdict = "improvement"
    elif -least < interval.low and interval.high < least:
        verdict = "no change"
    else:
        wanted = _wanted(interval, least, alphas)
    return Finding(name, verdict, level, worse, low, high, base, head, len(pairs), wanted)


def _wanted(interval: verdicts.Interval, least: float, alphas: tuple[float, float]) -> int:
    """Return how many pairs decide a series if its mean and its spread stay.

    A mean within the margin is decided by an interval that ends within it, one beyond the margin as soon as it is not
    by chance.

    Args:
      least: log of the warning margin.
      alphas: of a series' own interval, and of its p-value (`_alphas_left`).
    """
    if interval.df == 0 or not math.isfinite(interval.error):
        return 2
    spread, mean = interval.error * math.sqrt(interval.num_launches), abs(interval.mean)
    gap = mean if mean > least else max(least - mean, least / 4)  # a mean at the margin would never be decided
    alpha = alphas[mean > least]
    count = (stats.norm.ppf(1 - alpha / 2) * spread / gap) ** 2
    return int(min(MOST_LAUNCHES, max(interval.num_launches + 1, math.ceil(count))))


def _without_ratio(name: str, pairs: Sequence[Pair]) -> Finding:
    """Return the finding for a timed series that some launch gives no log ratio: a 0, or a value that is not finite.

    Medians of such a series say nothing about chance, so it is undecided, unless every value is 0. A launch whose value
    is not finite counts as in exact series: critical on head alone.
    """
    sides = [[*side] for side in zip(*pairs)]
    base, head = (verdicts.median(side) if np.isfinite(side).all() else math.nan for side in sides)
    if not (math.isfinite(base) and math.isfinite(head)):
        return _broken(name, base, head, len(pairs))
    if not any(value for side in sides for value in side):
        return Finding(name, "no change", "", 0.0, 0.0, 0.0, base, head, len(pairs), 0)
    worse = metrics.worsening(head, base, higher_is_better=metrics.metric_of(name).higher_is_better)
    return Finding(name, "undecided", "", worse, -1.0, math.inf, base, head, len(pairs), len(pairs) + 1)


def _exact(name: str, pairs: Sequence[Pair], margin: Margin) -> Finding:
    base, head = (verdicts.median(side) if np.isfinite(side).all() else math.nan for side in zip(*pairs))
    metric = metrics.metric_of(name)
    if not (math.isfinite(base) and math.isfinite(head)):
        return _broken(name, base, head, len(pairs))
    worse = metrics.worsening(head, base, higher_is_better=metric.higher_is_better)
    verdict, level = "no change", ""
    if worse > margin.warning:
        verdict, level = "regression", "critical" if worse > margin.critical else "warning"
    elif metrics.worsening(base, head, higher_is_better=metric.higher_is_better) > margin.warning:
        verdict = "improvement"
    return Finding(name, verdict, level, worse, worse, worse, base, head, len(pairs), 0)


def _broken(name: str, base: float, head: float, num_pairs: int) -> Finding:
    """Return the finding for a series with a non-finite value, such as the loss of a model that computes NaN."""
    verdict, level, worse = "no change", "", 0.0
    if math.isfinite(base):
        verdict, level, worse = "regression", "critical", math.inf
    elif math.isfinite(head):
        verdict, worse = "improvement", -1.0
    return Finding(name, verdict, level, worse, worse, worse, base, head, num_pairs, 0)
