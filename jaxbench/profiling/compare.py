"""Compare two profiles: operations, compile times and memory of base and head (S file).

Each side is one run, so a difference may be chance: `benchmarks.py run --compare_with` tells which are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench import outputs
from jaxbench.profiling.trace import COMPILE, MEMORY, OPERATIONS

# Types of the values in a file's rows; NoneType where a value may be unknown
NUMBER, TEXT, UNKNOWN = (int, float), (str,), (type(None),)
SCOPES = "scopes"  # part of OPERATIONS
KEYS = {
    OPERATIONS: {
        "name": TEXT, "calls": NUMBER, "seconds": NUMBER, "share": NUMBER, "flops": NUMBER + UNKNOWN,
        "bytes": NUMBER + UNKNOWN, "roofline": NUMBER + UNKNOWN, "bound": TEXT + UNKNOWN,
    },
    SCOPES: {"name": TEXT, "kind": TEXT, "count": NUMBER, "seconds": NUMBER, "share": NUMBER},
    COMPILE: {"function": TEXT, "trace_s": NUMBER, "lower_s": NUMBER, "compile_s": NUMBER, "programs": NUMBER},
}  # fmt: skip


class Pair(NamedTuple):
    """One operation or function on both sides."""

    name: str
    base_s: float  # 0 if base lacks it
    head_s: float
    calls: tuple[int, int]


def read(folder: str, name: str, *, flag: str) -> Any:
    """Read one file of a profile's folder.

    Raises:
      ValueError: it does not exist, is not JSON, or is not what --profile=FOLDER writes.
    """
    path = Path(folder) / name
    if not path.is_file():
        raise ValueError(f"{flag}={folder}: {path} is no file; wanted a folder that --profile=FOLDER wrote")
    try:
        found = outputs.read_json(path)
    except ValueError as error:
        raise ValueError(f"{flag}={folder}: {path} is no JSON ({error.__cause__})") from error
    rows = found.get("rows") if isinstance(found, dict) else found if name == COMPILE else None
    if name == MEMORY:
        is_ours = isinstance(found, dict) and _is_a(found.get("peak_resident_bytes"), NUMBER)
    else:
        is_ours = isinstance(rows, list) and all(_is_row(row, KEYS[name]) for row in rows)
        scopes = found.get(SCOPES, []) if is_ours and name == OPERATIONS else []  # an earlier version's has none
        is_ours = is_ours and isinstance(scopes, list) and all(_is_row(row, KEYS[SCOPES]) for row in scopes)
    if not is_ours:
        raise ValueError(f"{flag}={folder}: {path} is not what --profile=FOLDER writes")
    return found


def _is_row(row: Any, keys: Mapping[str, tuple[type, ...]]) -> bool:
    return isinstance(row, dict) and all(name in row and _is_a(row[name], types) for name, types in keys.items())


def _is_a(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def operations(base: Sequence[dict], head: Sequence[dict]) -> list[Pair]:
    """Pair the operations of both sides, the largest difference first."""
    sides = [{row["name"]: row for row in rows} for rows in (base, head)]
    none = {"seconds": 0.0, "calls": 0}
    pairs = []
    for name in {**sides[0], **sides[1]}:
        before, after = (side.get(name, none) for side in sides)
        pairs.append(Pair(name, before["seconds"], after["seconds"], (before["calls"], after["calls"])))
    return sorted(pairs, key=lambda pair: -abs(pair.head_s - pair.base_s))


def compiled(base: Sequence[dict], head: Sequence[dict]) -> list[Pair]:
    """Pair the seconds of tracing, lowering and compiling each function, the largest difference first."""

    def rows(side: Sequence[dict]) -> list[dict]:
        return [{"name": row["function"], "seconds": row["trace_s"] + row["lower_s"] + row["compile_s"],
                 "calls": row["programs"]} for row in side]  # fmt: skip

    return operations(rows(base), rows(head))


def picture(pairs: Sequence[Pair], *, top: int, what: str) -> Any:
    """Return the first `top` pairs as a table for the terminal."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column(what, overflow="fold")
    for column in ("base ms", "head ms", "head - base", "ratio", "calls"):
        table.add_column(column, justify="right")
    for pair in pairs[:top]:
        ratio = f"{pair.head_s / pair.base_s:.2f}" if pair.base_s and pair.head_s else "-"
        table.add_row(
            escape(pair.name), f"{1e3 * pair.base_s:.3f}", f"{1e3 * pair.head_s:.3f}",
            f"{1e3 * (pair.head_s - pair.base_s):+.3f}", ratio, f"{pair.calls[0]} / {pair.calls[1]}",
        )  # fmt: skip
    return table
