"""Absolute limits of a suite's series, independent of any base: least and most, held or broken (S file).

A margin bounds how far a series may move from a base; a limit bounds its median over head's launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import pydantic

from jaxbench.config import Base


class Limit(Base):
    """Inclusive bounds of a series' median, in its metric's unit; at least one is set."""

    least: float | None = None
    most: float | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Limit:
        if self.least is None and self.most is None:
            raise ValueError(f"least={self.least} and most={self.most} are no bound; wanted one of them or both")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ValueError(f"least={self.least} is above most={self.most}; wanted the other way round")
        return self


class Judged(NamedTuple):
    """A limit and its verdict after a run."""

    series: str
    value: float | None  # median over the launches of head; None = not measured
    least: float | None
    most: float | None
    verdict: Literal["held", "broken"]


def judge(limits: Mapping[str, Limit], series: Mapping[str, Mapping[str, Any]]) -> list[Judged]:
    """Judge every limit against the measured median, in the suite's order; an unmeasured series breaks its limit.

    Args:
      series: as in a run's record: by name and side, with the median.
    """
    found = []
    for name, limit in limits.items():
        value = series.get(name, {}).get("head", {}).get("median")
        is_held = value is not None and (limit.least is None or value >= limit.least)
        is_held = is_held and (limit.most is None or value <= limit.most)  # NaN breaks either bound
        found.append(Judged(name, value, limit.least, limit.most, "held" if is_held else "broken"))
    return found


def of_run(record: Mapping[str, Any]) -> list[Judged]:
    """Return the judged limits of a run's record; none if its suite has none."""
    return [Judged(**each) for each in record.get("limits", ())]


def broken(record: Mapping[str, Any]) -> list[Judged]:
    """Return the limits that a run broke."""
    return [each for each in of_run(record) if each.verdict == "broken"]
