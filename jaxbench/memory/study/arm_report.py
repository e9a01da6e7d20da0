"""Write the report of arms.py: accuracy by distance as tables, CSV, JSON, HTML and SVG (S file)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxbench import outputs
from jaxbench.measure import environment, line_picture
from jaxbench.measure.line_picture import Axis, Line, Panel, Point
from jaxbench.memory.study import arms
from jaxbench.memory.study.arms import Arms, Run

# One colour per arm, readable on both white and near-black.
COLORS = ("#8b8f98", "#3b82f6", "#9061d6", "#e5722a", "#0d9f8c", "#c2568f", "#b08d1a", "#5b8c2a", "#d84c4c", "#6d7ec9")
DIFFERENCE = ("difference", "difference_low", "difference_high")


def write(settings: Arms, finished: Mapping[Run, dict[str, Any]], workdir: Path) -> list[Any]:
    """Write summary.json, results.csv, report.html and report.svg of finished runs, and return tables to show."""
    rows, lengths = arms.summarise(settings, dict(finished)), arms.by_length(settings, dict(finished))
    costs = [
        {"task": run.task, "arm": run.arm, "learning_rate": run.learning_rate, "seed": run.seed}
        | {name: record[name] for name in ("seconds", "cpu_seconds", "held_out", "parameters", "skipped", "factors")}
        for run, record in finished.items()
    ]
    summary = {
        "about": environment.describe(threads=environment.usable_cores()),
        "settings": settings.model_dump(mode="json"),
        "rows": rows,
        "lengths": lengths,
    }
    outputs.write_json(workdir / "summary.json", summary | {"runs": costs})
    outputs.write_csv(workdir / "results.csv", rows)
    outputs.write_text(workdir / "report.html", figure(settings, rows))
    outputs.write_text(workdir / "report.svg", picture(settings, rows))
    shown = [task for task in settings.tasks if any(row["task"] == task for row in rows)]
    tables = []
    for task in shown:
        tables += [table(settings, rows, task), length_table(settings, lengths, task)]
        if any(row["pairs"] and row["arm"] != row["rival"] for row in rows if row["task"] == task):
            tables.append(difference_table(settings, rows, lengths, task))
    return tables


def table(settings: Arms, rows: Sequence[dict[str, Any]], task: str) -> Any:
    """Rich table of a task's accuracy by distance, at the training length."""
    own, heads = _by_class(settings, rows, task)
    title = f"{task}: {_what(settings, task)} by distance in windows of {settings.window} tokens"
    return _table(settings, title, heads, own)


def difference_table(
    settings: Arms, rows: Sequence[dict[str, Any]], lengths: Sequence[dict[str, Any]], task: str
) -> Any:
    """Rich table of each arm's difference from its rival, by distance and by length of the rows."""
    own, heads = _by_class(settings, rows, task)
    own |= {(row["arm"], row["factor"]): row for row in lengths if row["task"] == task}
    heads = heads | {factor: f"rows of {factor * settings.tasks[task].length:,}" for factor in settings.factors}
    names = dict(zip(("mean", "low", "high", "seeds"), (*DIFFERENCE, "pairs"), strict=True))
    own = {
        key: row | {name: row[other] for name, other in names.items()}
        for key, row in own.items()
        if row["arm"] != row["rival"] and row["pairs"]
    }
    what = "bits per byte" if arms.chance(settings.tasks[task]) is None else "right answers in %"
    title = f"{task}: difference in {what}, paired by seed, by distance in windows of {settings.window} tokens"
    labels = {arm: f"{arm} minus {settings.rival(arm)}" for arm in settings.arms}
    return _table(settings, title, heads, own, labels)


def _by_class(settings: Arms, rows: Sequence[dict[str, Any]], task: str) -> tuple[dict[tuple, dict], dict[tuple, str]]:
    """A task's rows at the training length by (arm, distance bin), and the bins' titles."""
    own = [row for row in rows if row["task"] == task and row["factor"] == settings.factors[0]]
    classes = sorted({(row["over"], row["to"]) for row in own})
    heads = {each: f"{each[0] // settings.window} to {each[1] // settings.window}" for each in classes}
    return {(row["arm"], (row["over"], row["to"])): row for row in own}, heads


def length_table(settings: Arms, lengths: Sequence[dict[str, Any]], task: str) -> Any:
    """Rich table of a task's accuracy by length of the rows."""
    size = settings.tasks[task].length
    title = f"{task}: {_what(settings, task)} in rows of so many tokens, trained at {size}"
    heads = {factor: f"{factor * size:,}" for factor in settings.factors}
    return _table(settings, title, heads, {(row["arm"], row["factor"]): row for row in lengths if row["task"] == task})


def _what(settings: Arms, task: str) -> str:
    """Name of a task's metric, with its chance level."""
    chance = arms.chance(settings.tasks[task])
    return "bits per byte" if chance is None else f"right answers in % (chance {100 * chance:.1f})"


def _table(
    settings: Arms,
    title: str,
    heads: dict[Any, str],
    cells: dict[tuple[str, Any], dict[str, Any]],
    labels: Mapping[str, str] | None = None,
) -> Any:
    """Rich table of arms by columns; heads: column -> its title, cells: (arm, column) -> row."""
    from rich.table import Table

    table = Table("arm", "rate", "seeds", *heads.values(), title=title, title_justify="left")
    for arm in settings.arms:
        own = [row for (name, _), row in cells.items() if name == arm]
        if own:
            shown = [_shown(cells.get((arm, column))) for column in heads]
            name = arm if labels is None else labels[arm]
            table.add_row(name, f"{own[0]['learning_rate']:g}", str(own[0]["seeds"]), *shown)
    return table


def _shown(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    scale, digits = (1, 3) if row["chance"] is None else (100, 1)
    values = [row[name] for name in ("mean", "low", "high") if row[name] is not None]
    mean, *interval = (f"{scale * value:.{digits}f}" for value in values)
    return f"{mean} [{', '.join(interval)}]" if interval else mean


def figure(settings: Arms, rows: Sequence[dict[str, Any]]) -> str:
    """HTML page of accuracy, or for a text bits per byte, versus distance: a panel per task, a line per arm."""
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    tasks = [task for task in settings.tasks if any(row["task"] == task for row in rows)]
    page = make_subplots(rows=max(1, len(tasks)), cols=1, subplot_titles=tasks, vertical_spacing=0.1)
    for index, task in enumerate(tasks, 1):
        for color, arm in zip(itertools.cycle(COLORS), settings.arms):
            points = _points(rows, task, arm)
            scale = 1 if arms.chance(settings.tasks[task]) is None else 100
            x, y = [row["to"] for row in points], [scale * row["mean"] for row in points]
            has_interval = [row["low"] is not None for row in points]
            high = [scale * (row["high"] - row["mean"]) if has else 0 for row, has in zip(points, has_interval)]
            low = [scale * (row["mean"] - row["low"]) if has else 0 for row, has in zip(points, has_interval)]
            page.add_trace(
                graph_objects.Scatter(
                    x=x, y=y, name=arm, mode="lines+markers", line={"color": color}, showlegend=index == 1,
                    legendgroup=arm, error_y={"type": "data", "array": high, "arrayminus": low},
                ),
                row=index, col=1,
            )  # fmt: skip
        for at in (settings.window, settings.tasks[task].length):
            page.add_vline(x=at, line={"dash": "dot", "color": "#8b949e"}, row=index, col=1)
        is_text = arms.chance(settings.tasks[task]) is None
        what = "bytes of the row before" if is_text else "distance of the fact, tokens"
        page.update_xaxes(type="log", title=f"{what} (dotted: window, training length)", row=index)
        page.update_yaxes(range=None if is_text else [-2, 102], row=index, col=1)
        page.update_yaxes(title="bits per byte" if is_text else "right answers, %", row=index, col=1)
    page.update_layout(height=430 * max(1, len(tasks)), title="What memory buys, by distance: 95 % over seeds")
    return page.to_html(include_plotlyjs=True, full_html=True)


def _points(rows: Sequence[dict[str, Any]], task: str, arm: str) -> list[dict[str, Any]]:
    """An arm's row for each distance bin, nearest first; each comes from the shortest rows that have the bin."""
    own = [row for row in rows if (row["task"], row["arm"]) == (task, arm)]
    return sorted(
        {row["to"]: row for row in sorted(own, key=lambda row: -row["factor"])}.values(), key=lambda r: r["to"]
    )


def picture(settings: Arms, rows: Sequence[dict[str, Any]]) -> str:
    """SVG for pages that show no HTML: accuracy by distance, and for a text the difference in bits from each rival."""
    panels = []
    for task in settings.tasks:
        if arms.chance(settings.tasks[task]) is not None:
            panels.append(_panel(settings, rows, task, None))
        else:
            rivals = dict.fromkeys(settings.rival(arm) for arm in settings.arms)
            panels += [_panel(settings, rows, task, rival) for rival in rivals]
    counts = [row["seeds"] for row in rows]
    about = "no runs"
    if counts:
        num_seeds = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{max(counts)}"
        about = f"means over {num_seeds} seeds with 95 % intervals" if max(counts) > 1 else "one seed"
    own = "".join(f", in {name} {arm.window}" for name, arm in settings.arms.items() if arm.window is not None)
    sees = f"attention sees {settings.window} tokens{own}"
    note = f"{about}; each point from the shortest rows that reach so far; {sees}"
    return line_picture.draw("What memory buys", note, [panel for panel in panels if panel.lines])


def _panel(settings: Arms, rows: Sequence[dict[str, Any]], task: str, rival: str | None) -> Panel:
    """Chart of a task: accuracy in %, or with a rival the difference from its bits per byte."""
    lines, length = [], settings.tasks[task].length
    names, scale = (("mean", "low", "high"), 100) if rival is None else (DIFFERENCE, 1)
    for color, arm in zip(itertools.cycle(COLORS), settings.arms):
        if rival is None or (settings.rival(arm) == rival and arm != rival):
            known = ((row, row[names[0]]) for row in _points(rows, task, arm))
            own = [row for row, mean in known if mean is not None and math.isfinite(mean)]
            shown = [[None if row[name] is None else scale * row[name] for name in names] for row in own]
            if own:
                lines.append(Line(arm, color, [Point(row["to"], *each) for row, each in zip(own, shown)]))
    places = sorted({point.x for line in lines for point in line.points})
    across = Axis("tokens back, up to", {place: f"{place:,}" for place in places}, is_log=True)
    if rival is None:
        percent = {value: f"{value} %" for value in (0, 25, 50, 75, 100)}
        return Panel(f"{task}: right answers, trained in rows of {length}", across, Axis("answers", percent), lines)
    across = across._replace(title=f"bytes of the row before, up to; trained in rows of {length}")
    return Panel(f"{task}: bits per byte minus those of {rival}", across, _around_zero(lines), lines)


def _around_zero(lines: Sequence[Line]) -> Axis:
    """Axis of about six ticks at whole hundredths, including 0."""
    values = [0.0, *(value for line in lines for point in line.points for value in point[1:] if value is not None)]
    step = 0.01 * max(1, round((max(values) - min(values)) / 0.05))
    ticks = range(math.floor(min(values) / step), max(math.ceil(max(values) / step), 1) + 1)
    return Axis("bits per byte", {step * tick: f"{step * tick:+.2f}" if tick else "0" for tick in ticks})
