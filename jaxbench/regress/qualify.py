"""What verdicts are worth on this machine: false alarms and power, from launches whose two sides are the same (S file).

Consecutive launches make real runs, each judged as a run is, look by look; every verdict of worse or better in one is
false. Further runs are drawn from all launches, the two sides exchanged at random in each. Power is the share of drawn
runs that find a slow-down which every time of head is multiplied by, as a constant one does to every sample.
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

SLOWER = (1.05, 1.1, 1.2)  # injected
SAID = ("regression", "improvement")


class Share(NamedTuple):
    """So many of so many."""

    count: int
    total: int

    @property
    def most(self) -> float:
        """Upper end of the one-sided 95 % interval of Clopper and Pearson; drawn runs are not independent."""
        if not self.total:
            return 1.0
        test = stats.binomtest(self.count, self.total, alternative="less")
        return float(test.proportion_ci(0.95, method="exact").high)

    def __str__(self) -> str:
        share = self.count / self.total if self.total else math.nan
        return f"{100 * share:.1f} % ({self.count} of {self.total}; 95 %: at most {100 * self.most:.1f})"


class Qualification(NamedTuple):
    """What came of it."""

    real: Share  # runs of consecutive launches that say anything, warnings counted
    drawn: Share  # the same of runs drawn from all launches
    power: dict[float, Share]  # injected ratio -> primary series that are found to be worse
    smallest: dict[str, float]  # series -> smallest share worse that is decided in nine of ten runs, of a usual run


def qualify(pairs: Mapping[str, Sequence[Pair]], suite: Suite, *, num_drawn: int = 300) -> Qualification:
    """False alarms and power of a suite's runs.

    Args:
      pairs: of launches whose sides are the same code.

    Raises:
      ValueError: there are fewer launches than a run has.
    """
    timed = {name: each for name, each in pairs.items() if metrics.metric_of(name).kind in ("timed", "memory")}
    count, most = min(map(len, timed.values()), default=0), max(suite.looks)
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
    return Qualification(Share(sum(real), len(real)), Share(sum(drawn), len(drawn)), power, _smallest(timed, suite))


def _run(pairs: Mapping[str, Sequence[Pair]], suite: Suite) -> list[Finding]:
    """Findings where a run of these launches ends."""
    found: list[Finding] = []
    for look in suite.looks:
        found = judge.judge(_chosen(pairs, range(look)), suite, num_looks=len(suite.looks))
        if not any(each.verdict == "undecided" for each in found if each.series in suite.primaries()):
            break
    return found


def _chosen(pairs: Mapping[str, Sequence[Pair]], places: Sequence[int]) -> dict[str, list[Pair]]:
    """Pairs of these launches; a series that was measured in few has what it has."""
    found = {name: [each[i] for i in places if i < len(each)] for name, each in pairs.items()}
    return {name: each for name, each in found.items() if each}


def _drawn(pairs: Mapping[str, Sequence[Pair]], suite: Suite, random: np.random.Generator) -> dict[str, list[Pair]]:
    """A run's launches, each with its sides exchanged or not, the same for all series."""
    count = min(map(len, pairs.values()))
    places = random.choice(count, max(suite.looks), replace=False)
    turned = random.random(len(places)) < 0.5
    return {
        name: [Pair(*each[i][::-1]) if turn else each[i] for i, turn in zip(places, turned)]
        for name, each in pairs.items()
    }


def _slower(pairs: Mapping[str, Sequence[Pair]], ratio: float) -> dict[str, list[Pair]]:
    """The same with a head that takes `ratio` times as long."""

    def worse(series: str, pair: Pair) -> Pair:
        metric = metrics.metric_of(series)
        if metric.kind != "timed":
            return pair
        return Pair(pair.base, pair.head / ratio if metric.higher_is_better else pair.head * ratio)

    return {name: [worse(name, pair) for pair in each] for name, each in pairs.items()}


def _said(findings: Sequence[Finding]) -> bool:
    return any(each.verdict in SAID for each in findings)


def _smallest(pairs: Mapping[str, Sequence[Pair]], suite: Suite) -> dict[str, float]:
    """Smallest share that a run with all its launches decides in nine of ten cases; median of all runs."""
    most, alpha = max(suite.looks), suite.alpha / len(suite.looks)
    found: dict[str, list[float]] = {name: [] for name in pairs}
    for first in range(0, min(map(len, pairs.values())) - most + 1, most):
        logs = [[judge.log_ratio(name, pair) for pair in each[first : first + most]] for name, each in pairs.items()]
        intervals = moderation.intervals(logs, confidence=1 - alpha)
        for name, row in zip(pairs, verdicts.judge(intervals, confidence=1 - alpha), strict=True):
            found[name].append(max(suite.margin(name).warning, row.decidable - 1))
    return {name: float(np.median(each)) for name, each in found.items()}
