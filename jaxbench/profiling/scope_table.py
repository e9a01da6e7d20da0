"""The scope table: time in the scopes that code names itself, beside the operation table (S file).

Two kinds of scopes. Operations of named scopes (jax.named_scope) are added up, inner scopes included, over all threads,
as in the operation table. Annotations (jax.profiler.TraceAnnotation, torch.profiler.record_function) are spans of the
clock on the thread that opened them; what a device still computes after they have ended is not in them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

from jaxbench.profiling.events import Event, Key, Span
from jaxbench.profiling.program_cost import Costed

OPERATIONS, CLOCK = "operations", "clock"  # what a row's seconds are
WRAPPED = re.compile(r"[\w.]+\((.*)\)$")  # a transformation of JAX around a scope: transpose(jvp(scope))
OF_JAX = frozenset(
    ("checkpoint", "remat", "rematted_computation", "custom_jvp_call", "custom_vjp_call", "shard_map", "pallas_call")
)


class ScopeRow(NamedTuple):
    """All time in one scope."""

    name: str  # outer scopes of operations before it, with /
    kind: str  # OPERATIONS or CLOCK
    count: int  # operations that ran in it, or times that it was entered
    seconds: float
    share: float  # of the seconds of all operations, or of the recorded time by the clock


def of_operations(events: Iterable[Event], programs: Mapping[Key, Costed]) -> list[ScopeRow]:
    """Return named scopes with the operations that ran in them, the slowest first; outer ones have those of inner."""
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    total = 0.0
    for event in events:
        total += event.duration_ns / 1e9
        costed = programs.get(event.key)
        path = named(costed.named.get(event.instruction, ())) if costed else []
        for depth in range(len(path)):
            name = "/".join(path[: depth + 1])
            counts[name] += 1
            seconds[name] += event.duration_ns / 1e9
    found = [ScopeRow(name, OPERATIONS, counts[name], spent, spent / total) for name, spent in seconds.items()]
    return sorted(found, key=lambda row: -row.seconds)


def of_spans(spans: Iterable[Span], names: Set[str], clock_s: float) -> list[ScopeRow]:
    """Return those spans that have one of the names, the slowest first; clock_s: seconds recorded."""
    found: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        if span.name in names:
            found[span.name].append(span.duration_ns / 1e9)
    rows = [ScopeRow(name, CLOCK, len(each), sum(each), sum(each) / clock_s) for name, each in found.items()]
    return sorted(rows, key=lambda row: -row.seconds)


def named(parts: Iterable[str]) -> list[str]:
    """Return the scopes that code has named, of the parts of an instruction's op_name: without what JAX adds.

    A scope keeps its name under transformations, so that forward and backward pass are one scope.
    """
    found = []
    for part in parts:
        while (inner := WRAPPED.match(part)) is not None and not part.startswith("jit("):
            part = inner[1]
        is_einsum = "->" in part  # jax.numpy.einsum names a scope by its formula
        if part and not part.startswith("jit(") and part not in OF_JAX and not is_einsum:
            found.append(part)
    return found


def picture(found: Iterable[Mapping[str, Any]], *, top: int) -> Any:
    """Return the first `top` rows as a table for the terminal."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column("scope", overflow="fold")
    for column in ("count", "ms", "share", "of"):
        table.add_column(column, justify="right")
    for row in list(found)[:top]:
        of = "operations" if row["kind"] == OPERATIONS else "the clock"
        cells = (str(row["count"]), f"{1e3 * row['seconds']:.3f}", f"{100 * row['share']:.1f} %", of)
        table.add_row(escape(row["name"]), *cells)
    return table
