"""The operation table: the slowest operations, their share, FLOPs, bytes and share of the roofline (S file).

Seconds are summed over threads, so they may add up to more than wall time where several threads run at once. An
operation's share of the roofline is the least time for its FLOPs and bytes, at the rates measured in the same process,
over its seconds. It is above one where operands are in a cache, and it is not given where FLOPs are unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxbench.profiling.events import Event, Key
from jaxbench.profiling.program_cost import Costed


class Rates(NamedTuple):
    """The machine's best measured rates."""

    flops_per_s: Mapping[str, float]  # by HLO's name of a type; "f32" is used for missing types
    bytes_per_s: float  # read bandwidth


class Row(NamedTuple):
    """All runs of one operation."""

    name: str  # program: primitive in functions of jaxbench
    calls: int
    seconds: float  # on all threads
    share: float  # of all operations' seconds
    flops: int | None  # of all runs; None: unknown
    bytes: int | None
    roofline: float | None  # least seconds over seconds
    bound: str | None  # compute or memory, whichever takes longer at the rates


def rows(events: Iterable[Event], programs: Mapping[Key, Costed], rates: Rates | None) -> list[Row]:
    """Return the rows of all operations, the slowest first."""
    grouped: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        grouped[name_of(event, programs)].append(event)
    total = sum(event.duration_ns for each in grouped.values() for event in each)
    found = [_row(name, each, programs, rates, total) for name, each in grouped.items()]
    return sorted(found, key=lambda row: -row.seconds)


def name_of(event: Event, programs: Mapping[Key, Costed]) -> str:
    """Return the name of an event's operation."""
    costed, module = programs.get(event.key), event.key[0]
    named = costed.program.names.get(event.instruction) if costed else None
    return f"{module}: {named or event.instruction.rstrip('.0123456789') or event.instruction}"


def _row(
    name: str, runs: list[Event], programs: Mapping[Key, Costed], rates: Rates | None, total_ns: float
) -> Row:  # fmt: skip
    seconds = sum(event.duration_ns for event in runs) / 1e9
    costs = [programs[event.key].costs.get(event.instruction) if event.key in programs else None for event in runs]
    row = Row(name, len(runs), seconds, 1e9 * seconds / total_ns if total_ns else 0.0, None, None, None, None)
    if None in costs:
        return row
    row = row._replace(bytes=sum(cost.bytes for cost in costs))
    if any(cost.flops is None for cost in costs):
        return row
    row = row._replace(flops=sum(cost.flops for cost in costs))
    if rates is None or not seconds:
        return row
    peaks = rates.flops_per_s
    compute = sum(cost.flops / peaks.get(cost.dtype, peaks["f32"]) for cost in costs)
    memory = row.bytes / rates.bytes_per_s
    return row._replace(roofline=max(compute, memory) / seconds, bound="compute" if compute > memory else "memory")


def picture(found: Iterable[Mapping[str, Any]], *, top: int) -> Any:
    """Return the first `top` rows as a table for the terminal."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column("operation", overflow="fold")
    for column in ("calls", "ms", "share", "GFLOP", "MB", "FLOP/byte", "of roofline", "bound by"):
        table.add_column(column, justify="right")
    for row in list(found)[:top]:
        flops, moved = row["flops"], row["bytes"]
        table.add_row(
            escape(row["name"]), str(row["calls"]), f"{1e3 * row['seconds']:.3f}", f"{100 * row['share']:.1f} %",
            _figure(flops, 1e9), _figure(moved, 1e6),
            f"{flops / moved:.2f}" if flops is not None and moved else "-",
            f"{100 * row['roofline']:.0f} %" if row["roofline"] is not None else "-", row["bound"] or "-",
        )  # fmt: skip
    return table


def _figure(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.4g}"
