"""A run's file: its required content, and what its series measure (S file)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic

from jaxbench import outputs

SCHEMA = 1  # of a run's file
# Fields that a kind of case got later, with the values that mean what was done before: its series go on.
LATER = {"compression": {"batch": 1, "read": 0, "read_tokens": 192}}


class _Side(pydantic.BaseModel):
    """A series on one side."""

    median: float | None  # null: not finite
    launches: list[float | None] = []


class _Tree(pydantic.BaseModel):
    commit: str


class _Finding(pydantic.BaseModel):
    series: str
    verdict: Literal["regression", "improvement", "no change", "undecided"]
    level: Literal["", "warning", "critical"]
    worse: float | None
    low: float | None
    high: float | None
    base: float | None
    head: float | None


class _Gate(pydantic.BaseModel):
    id: str
    what: str
    error: float | None
    limit: float | None
    where: str
    passed: bool


class _Parity(pydantic.BaseModel):
    """A parity case of an imported comparison."""

    case: str
    backend: str
    passed: bool
    gates: list[_Gate]


class _Run(pydantic.BaseModel):
    """The fields that every run has; further ones are kept unchecked."""

    time_utc: pydantic.AwareDatetime
    host: str
    device: str
    suite: dict[str, Any]
    machine: dict[str, Any]
    launches: int
    sides: dict[Literal["head", "base"], _Tree]
    series: dict[str, dict[Literal["head", "base"], _Side]]
    findings: list[_Finding]
    notes: list[Any]
    parity: list[_Parity] = []

    @pydantic.field_validator("sides")
    @classmethod
    def _check_head(cls, sides: dict[str, _Tree]) -> dict[str, _Tree]:
        if "head" not in sides:
            raise ValueError(f"there is no head, only {', '.join(sides) or 'nothing'}")
        return sides


def read(path: Path) -> dict[str, Any]:
    """Read a run's file; a side of a series whose median is not finite is left out.

    A launch that is null was infinite, since the median of launches with a NaN is none, and is so again.

    Raises:
      ValueError: it is damaged, or of a newer schema.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        schema = record["schema"]
        if isinstance(schema, bool) or not isinstance(schema, int):
            raise TypeError(f"schema {schema!r} is no whole number")
        if schema <= SCHEMA:
            _Run.model_validate(record)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where, given = ".".join(map(str, first["loc"])), str(first["input"])[:40]
        raise _damaged(path, f"{where}: {first['msg']}, got {given!r}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, repr(error)) from error
    if schema > SCHEMA:
        raise ValueError(f"history: {path} has schema {schema}; this version reads up to {SCHEMA}")
    kept = {
        name: {side: _with_launches(each) for side, each in sides.items() if is_finite(each["median"])}
        for name, sides in record["series"].items()
    }
    return record | {"series": {name: sides for name, sides in kept.items() if sides}}


def _with_launches(side: dict[str, Any]) -> dict[str, Any]:
    if None not in side.get("launches", ()):
        return side
    return side | {"launches": [math.inf if value is None else value for value in side["launches"]]}


def text(record: Mapping[str, Any]) -> str:
    """Return the content of a run's file: strict JSON, the same for the same run."""
    return json.dumps(outputs.finite(record), ensure_ascii=False, sort_keys=True, allow_nan=False) + "\n"


def is_finite(median: float | None) -> bool:
    """True for a median that can be compared."""
    return median is not None and math.isfinite(median)


def check_finite(series: Mapping[str, Sequence[float]]) -> None:
    """Check that the launches of series can be compared.

    Raises:
      ValueError: a launch's value is not finite.
    """
    for name, launches in series.items():
        if not all(map(math.isfinite, launches)):
            raise ValueError(f"{name} has {list(launches)[:4]}; wanted finite numbers")


def work_of(record: Mapping[str, Any], series: str) -> str:
    """Hash what a series measures: the suite's entry for its case and the model, not the rest of the suite.

    A series of another tool's run is identified by its name.
    """
    cases = {case["name"]: case for case in record["suite"].get("cases", ())}
    case = cases.get(series.partition(".")[0])
    later = {} if case is None else LATER.get(case.get("workload", ""), {})
    if case is not None and all(case.get(field, value) == value for field, value in later.items()):
        case = {field: value for field, value in case.items() if field not in later}
    work = [record.get("model_sha256", ""), case]
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:8]


def without_raw(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run without the medians of its launches."""
    series = {
        name: {side: {key: value for key, value in each.items() if key != "launches"} for side, each in sides.items()}
        for name, sides in record["series"].items()
    }
    return dict(record) | {"series": series}


def has_raw(record: Mapping[str, Any]) -> bool:
    """True if a run has medians of its launches."""
    return any("launches" in side for sides in record["series"].values() for side in sides.values())


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"history: {path} is damaged or no run ({why}); remove it, or restore a backup")
