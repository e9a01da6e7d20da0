"""What the hallucination lab's commands show on a terminal (S file)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxbench import terminal
from jaxbench.hallucination.copy_heads import Head


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
    """A function that advances a progress bar on standard error."""
    from rich import progress as bars

    columns = (bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn(), bars.TimeRemainingColumn())
    console = terminal.console(stderr=True)
    with bars.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


def of_heads(heads: Sequence[Head]) -> Any:
    """Table of copying heads, the first ranks first."""
    return _table(
        ("layer", "head", "trace", "outliers", "sum of ranks"),
        [(each.layer, each.head, f"{each.trace:,.1f}", each.outliers, f"{each.rank:g}") for each in heads],
    )


def of_regression(rows: Sequence[tuple[str, float, float, str]]) -> Any:
    """Table of a regression's figures: name, AUC, correlation, and what chose the columns and weights."""
    shown = [(name, f"{auc:.6f}", f"{correlation:.6f}", chosen) for name, auc, correlation, chosen in rows]
    return _table(("", "AUC", "PCC", "chosen on"), shown)


def _table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
    from rich import table

    made = table.Table(*names, box=None, pad_edge=False)
    for row in rows:
        made.add_row(*map(str, row))
    return made
