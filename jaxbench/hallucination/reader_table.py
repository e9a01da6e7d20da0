"""Tables and status lines of the hallucination lab's commands on a terminal (S file)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxbench import terminal
from jaxbench.hallucination.copy_heads import Head

GAINS = ("pooled_gain", "stratified_gain")  # over the lexical regression; a vote's over its best member


@contextlib.contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current step on standard error, if that is a terminal."""
    console = terminal.console(stderr=True)
    if not console.is_terminal:
        yield lambda name: None
        return
    with console.status("") as shown:
        yield shown.update


def of_rows(rows: Mapping[str, Mapping[str, Any]]) -> Any:
    """Table of an evaluation: AUC three ways, gains over the lexical regression, average precision, F1, span F1."""
    shown = []
    for name, row in rows.items():
        gains = [f"{row[key][0]:+.3f} [{row[key][1]:+.3f}, {row[key][2]:+.3f}]" if key in row else "" for key in GAINS]
        measured = [f"{row[key][0]:.3f}" for key in ("pooled", "macro", "stratified")]
        spans = f"{row['spans']['f1'][0]:.3f}" if "spans" in row else ""
        shown.append((name, *measured, *gains, f"{row['average_precision']:.3f}", f"{row['f1']:.3f}", spans))
    names = ("", "pooled", "macro", "stratified", "pooled gain", "stratified gain", "AP", "F1", "span F1")
    return plain(names, shown)


def votes(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line on each vote among an evaluation's rows: the member that its gains are over, and F1 over it."""
    return [
        f"{name}: gains are over member {versus['member']}, the best by AUC on {versus['chosen_on']}; F1 "
        f"{versus['f1_gain'][0]:+.3f} [{versus['f1_gain'][1]:+.3f}, {versus['f1_gain'][2]:+.3f}]"
        for name, row in rows.items()
        if (versus := row.get("versus"))
    ]


def of_heads(heads: Sequence[Head]) -> Any:
    """Table of copying heads, in the order given."""
    return plain(
        ("layer", "head", "trace", "outliers", "sum of ranks"),
        [(each.layer, each.head, f"{each.trace:,.1f}", each.outliers, f"{each.rank:g}") for each in heads],
    )


def of_regression(rows: Sequence[tuple[str, float, float, str]]) -> Any:
    """Table of a regression's figures: name, AUC, correlation, and what chose the columns and weights."""
    shown = [(name, f"{auc:.6f}", f"{correlation:.6f}", chosen) for name, auc, correlation, chosen in rows]
    return plain(("", "AUC", "PCC", "chosen on"), shown)


def plain(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
    """Table without borders."""
    from rich import table

    made = table.Table(*names, box=None, pad_edge=False)
    for row in rows:
        made.add_row(*map(str, row))
    return made
