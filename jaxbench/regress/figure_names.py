"""The figures in a value of a result's file: each number with a name, its path of keys, and its unit (S file)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

DATE = re.compile(r"\d{4}-\d\d-\d\d")
ENVIRONMENT = ("about", "environment", "machine")  # keys under which a result says where it comes from
# Keys of settings, of raw values that figures next to them summarise, and of curves: at most they name rows.
NO_FIGURES = {
    *ENVIRONMENT, "versions", "settings", "config", "configuration", "suite", "training", "trained", "tuning", "reader",
    "shape", "heads", "pattern", "kernels", "mesh", "workload", "seed", "seeds", "learning_rate", "rounds", "repeats",
    "bar", "samples", "launches", "runs", "load_average", "pressure", "reliability", "percentiles", "step", "schema",
    "roc", "part", "batch", "batch_size", "clients", "running", "factor", "level", "fpr",
}  # fmt: skip
NO_NAMES = {"unit", "command", "reason", "note", "file", "id", "status"}  # texts that do not identify a row
REPEATS = {"line", "seed", "launch", "round"}  # rows that differ only in these are repeats of one figure
DIMENSIONS = (  # numbers that identify a row, in order of preference, before any other number
    "line", "length", "num_tokens", "tokens", "batch", "batch_size", "clients", "running", "factor", "over", "to",
    "depth", "strength", "level", "fpr", "share", "part", "ratio", "seed", "launch", "round",
)  # fmt: skip
LONGEST_NAME = 60  # characters, at most, of a text that names a row
UNITS = (
    (r"([a-z]+)_(?:per|a)_(?:cpu_|core_)?(?:s|second)$", r"\1/s"), (r"(?:^|_)(?:s|seconds|s_a_[a-z]+)$", "s"),
    (r"([a-z]+)_(?:per|a)_(?:cpu_|core_)?minute$", r"\1/min"), (r"(?:^|_)(ms|us|ns)$", r"\1"),
    (r"(?:^|_)bytes$", "bytes"), (r"(?:^|_)mb$", "MB"), (r"(?:^|_)flops(?:_per_[a-z]+)?$", "FLOP"),
    (r"(?:^|(?<!\d)_)bits(?:_per_[a-z]+)?$", "bits"), (r"(?:^|_)ratios?$", "ratio"), (r"(?:^|_)count$", "count"),
    (r"^share(?=[ _]|$)|_share$", "share"),
)  # fmt: skip
Figure = tuple[tuple[str, ...], list[float], str]  # (path of keys, values, unit if the file states one)


def leaves(content: Any, keys: tuple[str, ...], unit: str = "") -> Iterator[Figure]:
    """Yield the figures under a value of a file."""
    if _is_number(content):
        yield keys, [float(content)], unit
    elif isinstance(content, dict):
        said = content.get("unit")
        for key, value in content.items():
            if key not in NO_FIGURES:
                yield from leaves(value, (*keys, key), said if key == "value" and isinstance(said, str) else "")
    elif isinstance(content, list) and content:
        if all(map(_is_number, content)):
            yield from _of_numbers([float(each) for each in content], keys)
        elif all(isinstance(each, dict) for each in content):
            yield from _of_rows(content, keys)
        else:
            for index, each in enumerate(content):
                yield from leaves(each, (*keys, str(index)))


def _of_numbers(values: list[float], keys: tuple[str, ...]) -> Iterator[Figure]:
    """Yield the figures of a list: an estimate with its interval, the end of a curve, or repeats of one figure."""
    if len(values) == 3 and values[1] <= values[0] <= values[2]:
        for name, value in zip(((), ("low",), ("high",)), values):
            yield (*keys, *name), [value], ""
    else:
        yield keys, values[-1:] if "_every_" in keys[-1] else values, ""


def _of_rows(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> Iterator[Figure]:
    """Yield the figures of a table; of steps only the last."""
    if all("step" in row for row in rows):
        yield from leaves(rows[-1], keys)
        return
    naming, is_unique = _naming(rows)
    for index, row in enumerate(rows):
        said = {key: row[key] for key in naming if key not in REPEATS and row.get(key) not in (None, "")}
        words = [value if isinstance(value, str) else f"{key}={value}" for key, value in said.items()]
        name = ",".join(words if is_unique else [*words, str(index)])
        left = {key: value for key, value in row.items() if key not in (*naming, *REPEATS)}
        yield from leaves(left, (*keys, name) if name else keys)


def _naming(rows: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return keys that identify a row, short texts and as few numbers as distinguish all rows, and whether they do."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in NO_NAMES and row[key] is not None))
    held = {key: [row[key] for row in rows if row.get(key) is not None] for key in keys}
    naming = [key for key in keys if all(map(_is_name, held[key]))]
    known = [key for key in DIMENSIONS if key in keys and all(map(_is_number, held[key]))]
    counted = [key for key in keys if all(isinstance(each, int) for each in held[key]) and not unit_of([key])]
    distinct = lambda keys: len({tuple(map(row.get, keys)) for row in rows})
    count = distinct(naming)
    for key in dict.fromkeys((*known, *counted)):
        if (more := distinct([*naming, key])) > count:
            naming, count = [*naming, key], more
    return naming, count == len(rows)


def _is_name(value: Any) -> bool:
    """True for a short text that is neither a date nor a hash."""
    is_short = isinstance(value, str) and len(value) <= LONGEST_NAME
    return is_short and not DATE.match(value) and not re.fullmatch(r"[0-9a-f]{8,}\+?", value)


def _is_number(value: Any) -> bool:
    """True for a number that fits a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def unit_of(keys: Sequence[str]) -> str:
    """Return the unit suffix of the last key that has one; "" if none has."""
    for key in reversed(keys):
        for pattern, unit in UNITS:
            if found := re.search(pattern, re.sub(r"_(low|high|mean|p\d+)$", "", key)):
                return found.expand(unit)
    return ""
