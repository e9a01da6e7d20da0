"""Write and check a run's primary series as a Markdown table between two marks in a document (S file)."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxbench import outputs
from jaxbench.regress import advice, metrics, report

BEGIN, END = "<!-- performance: written by `benchmarks.py history table` -->", "<!-- performance: end -->"


def table(record: Mapping[str, Any], run: str) -> str:
    """Return a table of a run's primary series and what it ran on; of every series of head if it has no primary ones.

    Args:
      run: the run's name in the document.

    Raises:
      ValueError: the run measured none of its primary series.
    """
    series = record["series"]
    names = [name for name in advice.primaries(record) or series if "head" in series.get(name, {})]
    if not names:
        raise ValueError(f"history: run {run} has none of its primary series, {len(series)} series in all")
    found = {each.series: each for each in report.findings_of(record)}
    judged = [name for name in names if name in found]
    rows: list[Sequence[str]]
    if judged:
        rows = [("series", "base", "head", "worse by", "verdict"), ("---", "---:", "---:", "---:", "---")]
        for each in (found[name] for name in judged):
            unit = metrics.of_run(record, each.series).unit
            values = (report.number(each.base, unit), report.number(each.head, unit))
            rows.append((each.series, *values, report.interval(each), report.verdict(each)))
    else:
        rows = [("series", "median", "launches", "least to most of them"), ("---", "---:", "---:", "---:")]
        rows += [_measured(name, series[name]["head"], metrics.of_run(record, name).unit) for name in names]
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join([*lines, "", _caption(record, run)])


def placed(text: str, table: str, path: Path) -> str:
    """Return a document's text with a table between its marks.

    Raises:
      ValueError: the marks do not each occur once, in this order.
    """
    counts = (text.count(BEGIN), text.count(END))
    if counts != (1, 1) or text.index(BEGIN) > text.index(END):
        raise ValueError(
            f"--file={path} has {counts[0]} lines {BEGIN} and {counts[1]} lines {END}; wanted one each, in this order"
        )
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


def write(path: Path, table: str) -> bool:
    """Put a table between a document's marks; return True if that changed the document.

    Raises:
      ValueError: the document cannot be read, or its marks are not as wanted.
    """
    text = read(path)
    made = placed(text, table, path)
    if made != text:
        outputs.write_text(path, made)
    return made != text


def is_current(path: Path, table: str) -> bool:
    """True if a document has this table between its marks.

    Raises:
      ValueError: as `write` raises.
    """
    text = read(path)
    return placed(text, table, path) == text


def read(path: Path) -> str:
    """Read the text of a document.

    Raises:
      ValueError: it does not exist, or is not text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--file={path} cannot be read as text ({error}); wanted a Markdown file") from error


def _cell(text: str) -> str:
    """Escape a text for a table cell: series of other tools can have any name."""
    return html.escape(text, quote=False).replace("|", "\\|").replace("\n", " ")


def _measured(name: str, side: Mapping[str, Any], unit: str) -> tuple[str, ...]:
    values = side.get("launches", ())
    spread = f"{report.number(min(values), unit)} to {report.number(max(values), unit)}" if values else ""
    return name, report.number(side["median"], unit), str(len(values) or ""), spread


def _caption(record: Mapping[str, Any], run: str) -> str:
    """Return the table's caption: commits, launches, machine, and the command that shows more."""
    sides, machine = record["sides"], record["machine"]
    base = f" beside `{sides['base']['commit']}`" if "base" in sides else ""
    cores = f", {machine['threads']} threads" if "threads" in machine else ""
    jax = f", jax {machine['versions']['jax']}" if "jax" in machine.get("versions", {}) else ""
    suite = advice.suite_name(record) or "-"
    return (
        f"Run `{run}`: `{sides['head']['commit']}`{base}, suite {suite}, {report.launches(record)}, "
        f"{record['time_utc'][:10]}, {machine.get('cpu') or record['host']}{cores}, {record['device']}{jax}."
    )
