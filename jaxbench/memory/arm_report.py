"""The report of arms.py: accuracy by distance as tables, CSV, JSON and a page (S file)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxbench.bench import environment, records
from jaxbench.memory import arms
from jaxbench.memory.arms import Arms, Run


def write(settings: Arms, finished: Mapping[Run, dict[str, Any]], workdir: Path) -> list[Any]:
    """Write summary.json, results.csv and report.html of the finished runs, and return the tables for a reader."""
    rows, lengths = arms.summarise(settings, dict(finished)), arms.by_length(settings, dict(finished))
    costs = [
        {"task": run.task, "arm": run.arm, "learning_rate": run.learning_rate, "seed": run.seed}
        | {name: record[name] for name in ("seconds", "cpu_seconds", "held_out", "parameters", "skipped")}
        for run, record in finished.items()
    ]
    summary = {
        "about": environment.describe(threads=environment.usable_cores()),
        "settings": settings.model_dump(mode="json"),
        "rows": rows,
        "lengths": lengths,
    }
    records.write_json(workdir / "summary.json", summary | {"runs": costs})
    records.write_csv(workdir / "results.csv", rows)
    records.write_text(workdir / "report.html", figure(settings, rows))
    asked = [task for task in settings.tasks if any(row["task"] == task for row in rows)]
    return [found for task in asked for found in (table(settings, rows, task), length_table(settings, lengths, task))]


def table(settings: Arms, rows: Sequence[dict[str, Any]], task: str) -> Any:
    """Return a task's accuracy at the training length by distance, as a rich table."""
    own = [row for row in rows if row["task"] == task and row["factor"] == settings.factors[0]]
    classes = sorted({(row["over"], row["to"]) for row in own})
    heads = {each: f"{each[0] // settings.window} to {each[1] // settings.window}" for each in classes}
    title = f"{task}: {_what(settings, task)} by distance in windows of {settings.window} tokens"
    return _table(settings, title, heads, {(row["arm"], (row["over"], row["to"])): row for row in own})


def length_table(settings: Arms, lengths: Sequence[dict[str, Any]], task: str) -> Any:
    """Return a task's accuracy by length of the rows, as a rich table."""
    size = settings.tasks[task].length
    title = f"{task}: {_what(settings, task)} in rows of so many tokens, trained at {size}"
    heads = {factor: f"{factor * size:,}" for factor in settings.factors}
    return _table(settings, title, heads, {(row["arm"], row["factor"]): row for row in lengths if row["task"] == task})


def _what(settings: Arms, task: str) -> str:
    """Return what a task's tables show, with the level of guessing."""
    chance = arms.chance(settings.tasks[task])
    return "bits per byte" if chance is None else f"right answers in % (chance {100 * chance:.1f})"


def _table(settings: Arms, title: str, heads: dict[Any, str], cells: dict[tuple[str, Any], dict[str, Any]]) -> Any:
    """Return a rich table of arms by columns; heads: column -> its title, cells: (arm, column) -> row."""
    from rich.table import Table

    found = Table("arm", "rate", "seeds", *heads.values(), title=title, title_justify="left")
    for arm in settings.arms:
        own = [row for (name, _), row in cells.items() if name == arm]
        if own:
            shown = [_shown(cells.get((arm, column))) for column in heads]
            found.add_row(arm, f"{own[0]['learning_rate']:g}", str(own[0]["seeds"]), *shown)
    return found


def _shown(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    scale, digits = (1, 3) if row["chance"] is None else (100, 1)
    mean, low, high = (f"{scale * row[name]:.{digits}f}" for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]" if row["seeds"] > 1 else mean


def figure(settings: Arms, rows: Sequence[dict[str, Any]]) -> str:
    """Return an HTML page: accuracy against distance, a panel for each task, a line for each arm and row length."""
    from plotly import graph_objects
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    tasks = [task for task in settings.tasks if any(row["task"] == task for row in rows)]
    page = make_subplots(rows=len(tasks), cols=1, subplot_titles=tasks, vertical_spacing=0.1)
    for index, task in enumerate(tasks, 1):
        for color, arm in zip(itertools.cycle(qualitative.D3), settings.arms):
            own = [row for row in rows if (row["task"], row["arm"]) == (task, arm)]
            # One point for each distance: from the shortest rows that have it.
            points = {row["to"]: row for row in sorted(own, key=lambda row: -row["factor"])}
            x = sorted(points)
            scale = 1 if arms.chance(settings.tasks[task]) is None else 100
            y = [scale * points[to]["mean"] for to in x]
            high = [scale * (points[to]["high"] - points[to]["mean"]) for to in x]
            low = [scale * (points[to]["mean"] - points[to]["low"]) for to in x]
            page.add_trace(
                graph_objects.Scatter(
                    x=x, y=y, name=arm, mode="lines+markers", line={"color": color}, showlegend=index == 1,
                    legendgroup=arm, error_y={"type": "data", "array": high, "arrayminus": low},
                ),
                row=index, col=1,
            )  # fmt: skip
        for at in (settings.window, settings.tasks[task].length):
            page.add_vline(x=at, line={"dash": "dot", "color": "#8b949e"}, row=index, col=1)
        page.update_xaxes(type="log", title="distance of the fact, tokens (dotted: window, training length)", row=index)
        is_text = arms.chance(settings.tasks[task]) is None
        page.update_yaxes(range=None if is_text else [-2, 102], row=index, col=1)
        page.update_yaxes(title="bits per byte" if is_text else "right answers, %", row=index, col=1)
    page.update_layout(height=430 * max(1, len(tasks)), title="What memory buys: accuracy by distance, 95 % over seeds")
    return page.to_html(include_plotlyjs=True, full_html=True)
