"""Measure how reliable verdicts are on this machine: false alarms and power, from launches of two equal sides (S file).

Consecutive launches form real runs, each judged look by look as a run is; any verdict of worse or better is false.
Further runs are drawn from all launches, with the two sides swapped at random in each launch. Power is the share of
drawn runs that detect an injected slow-down: a constant factor on every time of head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from jaxbench.measure import moderation, verdicts
from jaxbench.regress import judge, metrics
from jaxbench.regress.judge import Finding, Pair
from jaxbench.regress.suite import Suite

SLOWER = (1.05, 1.1, 1.2)  # injected ratios
SAID = ("regression", "improvement")


class Share(NamedTuple):
    """A count out of a total."""

    count: int
    total: int

    @property
    def most(self) -> float:
        """Upper end of the one-sided 95 % Clopper-Pearson interval; drawn runs are not independent."""
        if not self.total:
            return 1.0
        test = stats.binomtest(self.count, self.total, alternative="less")
        return float(test.proportion_ci(0.95, method="exact").high)

    def __str__(self) -> str:
        share = self.count / self.total if self.total else math.nan
        return f"{100 * share:.1f} % ({self.count} of {self.total}; 95 %: at most {100 * self.most:.1f})"


class Qualification(NamedTuple):
    """Result of a qualification."""

    real: Share  # runs of consecutive launches with any false verdict, warnings included
    drawn: Share  # the same for runs drawn from all launches
    power: dict[float, Share]  # injected ratio -> primary series found to be worse
    smallest: dict[str, float]  # series -> smallest worsening decided in nine of ten cases; median over runs
    left_out: list[str]  # series that are not in every launch, such as a percentile with too few tokens for a bound


def measure(pairs: Mapping[str, Sequence[Pair]], suite: Suite, *, num_drawn: int = 300) -> Qualification:
    """Measure false alarms and power of a suite's runs.

    Series that are not in every launch are left out: their pairs are of other launches than those of the others.

    Args:
      pairs: of launches whose sides are the same code.

    Raises:
      ValueError: there are fewer launches than a run has.
    """
    count, most = max(map(len, pairs.values()), default=0), max(suite.looks)
    left_out = [name for name, each in pairs.items() if len(each) < count]
    pairs = {name: each for name, each in pairs.items() if len(each) == count}
    timed = {name: each for name, each in pairs.items() if metrics.metric_of(name).kind in ("timed", "memory")}
    if count < most:
        raise ValueError(f"qualify: {count} launches of both sides; wanted {most} at least, as a run may have")
    random = np.random.default_rng(0)
    real = [_said(_run(_chosen(pairs, range(i, i + most)), suite)) for i in range(0, count - most + 1, most)]
    drawn = [_said(_run(_drawn(timed, suite, random), suite)) for _ in range(num_drawn)]
    power = {}
    for ratio in SLOWER:
        found = [_run(_slower(_drawn(timed, suite, random), ratio), suite) for _ in range(num_drawn)]
        hits = [each.verdict == "regression" for run in found for each in run if each.series in suite.primaries()]
        power[ratio] = Share(sum(hits), len(hits))
    shares, smallest = [Share(sum(said), len(said)) for said in (real, drawn)], _smallest(timed, suite)
    return Qualification(*shares, power, smallest, left_out)


def _run(pairs: Mapping[str, Sequence[Pair]], suite: Suite) -> list[Finding]:
    """Return the findings at the look at which a run of these launches would end."""
    found: list[Finding] = []
    for look in suite.looks:
        found = judge.judge(_chosen(pairs, range(look)), suite, num_looks=len(suite.looks))
        if not any(each.verdict == "undecided" for each in found if each.series in suite.primaries()):
            break
    return found


def _chosen(pairs: Mapping[str, Sequence[Pair]], places: Sequence[int]) -> dict[str, list[Pair]]:
    return {name: [each[i] for i in places] for name, each in pairs.items()}


def _drawn(pairs: Mapping[str, Sequence[Pair]], suite: Suite, random: np.random.Generator) -> dict[str, list[Pair]]:
    """Draw a run's launches, each with its sides swapped or not, in the same way for all series."""
    count = min(map(len, pairs.values()))
    places = random.choice(count, max(suite.looks), replace=False)
    turned = random.random(len(places)) < 0.5
    return {
        name: [Pair(*each[i][::-1]) if turn else each[i] for i, turn in zip(places, turned)]
        for name, each in pairs.items()
    }


def _slower(pairs: Mapping[str, Sequence[Pair]], ratio: float) -> dict[str, list[Pair]]:
    """Return the same pairs with a head that takes `ratio` times as long."""

    def worse(series: str, pair: Pair) -> Pair:
        metric = metrics.metric_of(series)
        if metric.kind != "timed":
            return pair
        return Pair(pair.base, pair.head / ratio if metric.higher_is_better else pair.head * ratio)

    return {name: [worse(name, pair) for pair in each] for name, each in pairs.items()}


def _said(findings: Sequence[Finding]) -> bool:
    return any(each.verdict in SAID for each in findings)


def _smallest(pairs: Mapping[str, Sequence[Pair]], suite: Suite) -> dict[str, float]:
    """Return the smallest worsening that a run with all its launches decides in nine of ten cases; median over runs."""
    most, alpha = max(suite.looks), suite.alpha / len(suite.looks)
    found: dict[str, list[float]] = {name: [] for name in pairs}
    for first in range(0, min(map(len, pairs.values())) - most + 1, most):
        logs = [[judge.log_ratio(name, pair) for pair in each[first : first + most]] for name, each in pairs.items()]
        intervals = moderation.intervals(logs, confidence=1 - alpha)
        for name, row in zip(pairs, verdicts.judge(intervals, confidence=1 - alpha), strict=True):
            found[name].append(max(suite.margin(name).warning, row.decidable - 1))
    return {name: float(np.median(each)) for name, each in found.items()}
