"""What the pages show of a run's primary series: a tile each, and how far its launches differ (S file)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxbench.regress import advice, metrics, report
from jaxbench.regress.judge import Finding

CLASSES = {"regression": "slower", "improvement": "faster"}


class Tile(NamedTuple):
    """A primary series of a run, as text."""

    series: str
    value: str  # median of head's launches
    said: str  # how much worse it is, with interval; without a base, the range of its launches
    verdict: str  # "" = no base
    shade: str  # CSS class; "" = plain


class Spread(NamedTuple):
    """How far the launches of a series differ, as standard deviations of their logarithms."""

    series: str
    num_launches: int  # of head
    head: float | None  # None = fewer than two launches are stored
    base: float | None


def primaries(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the series that a run's looks wait for; for a suite with keys unknown here, those that were measured.

    A run of another tool has none.
    """
    if found := advice.primaries(record):
        return found
    suite = record["suite"]
    named = suite.get("primary") or [f"{case['name']}.tokens_per_s" for case in suite.get("cases", ())]
    return tuple(name for name in named if name in record["series"])


def tiles(record: Mapping[str, Any]) -> list[Tile]:
    """Return a tile for each primary series, regressions first."""
    found = {each.series: each for each in report.findings_of(record)}
    made = [_tile(record, name, found.get(name)) for name in primaries(record)]
    return sorted(made, key=lambda each: each.shade != CLASSES["regression"])


def spreads(record: Mapping[str, Any]) -> list[Spread]:
    """Return how far the launches of each primary series differ, the widest spread first."""
    made = []
    for name in primaries(record):
        sides = record["series"].get(name, {})
        if "head" in sides:
            count = len(sides["head"].get("launches", ()))
            made.append(Spread(name, count, *(_spread(sides.get(side, {})) for side in ("head", "base"))))
    return sorted(made, key=lambda each: -1.0 if each.head is None else each.head, reverse=True)


def _tile(record: Mapping[str, Any], name: str, finding: Finding | None) -> Tile:
    head = record["series"].get(name, {}).get("head")
    if head is None:
        return Tile(name, "not measured", "the run's notes say why", "", "")
    unit = metrics.of_run(record, name).unit
    if finding is None:
        return Tile(name, report.number(head["median"], unit), _range(head, unit), "", "")
    said = report.interval(finding) if math.isinf(finding.worse) else f"worse by {report.interval(finding)}"
    shade = CLASSES.get(finding.verdict, "")
    return Tile(name, report.number(finding.head, unit), said, report.verdict(finding), shade)


def _range(side: Mapping[str, Any], unit: str) -> str:
    """Format the least and the most of a side's launches."""
    launches = side.get("launches", ())
    if len(launches) < 2:
        return "one launch" if launches else "its launches are no longer kept"
    least, most = (report.number(value, unit) for value in (min(launches), max(launches)))
    return f"{least} to {most} in {len(launches)} launches"


def _spread(side: Mapping[str, Any]) -> float | None:
    launches = side.get("launches", ())
    if len(launches) < 2 or min(launches) <= 0 or max(launches) == math.inf:
        return None
    return statistics.stdev(math.log(value) for value in launches)
