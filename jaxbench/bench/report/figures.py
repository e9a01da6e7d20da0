"""The report's charts as plotly figures: plain dictionaries, coloured by the page's own theme (S file).

Bars and intervals share one layout: rows under a bold heading for each workload. Labels stay horizontal and short, and
the height grows with the number of rows.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxbench.bench import labels
from jaxbench.bench.report import contents
from jaxbench.bench.report.contents import View
from jaxbench.bench.summary import SPEED, Row
from jaxbench.measure import verdicts

Figure = dict[str, Any]
ROW_HEIGHT = 25  # pixels of one row or heading
FOREST = ("decode_tokens_per_s", "prefill_tokens_per_s", "train_tokens_per_s", "first_token_s")
FARTHEST = (1e-9, 1e9)  # ratios at which the axis ends at the latest: one of damaged records may underflow to 0
heading = labels.heading  # of a section
ZERO_ERROR = 1e-17  # exactly equal tensors are drawn as this, below float64's 1.1e-16


class Layout(NamedTuple):
    """Placement of rows: y of each row, tick positions and labels with headings, and the height."""

    y: list[float]  # of the rows of all sections
    ticks: list[float]
    labels: list[str]
    height: int


def sections(groups: Sequence[tuple[str, Sequence[str]]]) -> Layout:
    """Lay out sections (heading, row labels), top down."""
    y, ticks, labels, place = [], [], [], 0.0
    for heading, names in groups:
        ticks.append(place)
        labels.append(f"<b>{heading}</b>")
        own = [place - 1 - index for index in range(len(names))]
        y += own
        ticks += own
        labels += names
        place -= len(names) + 1.4
    return Layout(y, ticks, labels, int(ROW_HEIGHT * (1 - place)) + 90)


def forest(view: View) -> Figure | None:
    """Draw ratios to the baseline with intervals, coloured by verdict; right of 1 is better."""
    rows = [row for row in contents.find(view, FOREST) if row.ratio]
    if not rows:
        return None
    placed, layout = _place(rows)
    traces: dict[str, Figure] = {}
    for row, y in placed:
        trace = traces.setdefault(row.verdict, _verdict_trace(row.verdict))
        point, low, high = row.ratio
        bounded = verdicts.is_informative(low, high)
        trace["x"].append(point)
        trace["y"].append(y)
        trace["error_x"]["array"].append(high - point if bounded else 0)
        trace["error_x"]["arrayminus"].append(point - low if bounded else 0)
        trace["customdata"].append(f"{labels.arm(row.arm)}: {labels.ratio(row.ratio)}, {labels.VERDICTS[row.verdict]}")
    data = [traces[name] for name in ("faster", "undecided", "slower", "same") if name in traces]
    points = [row.ratio[0] for row in rows] + [1.0]
    ends = [end for row in rows for end in row.ratio[1:]]
    # Two launches can give intervals of any width: ends beyond twice the points' own range do not widen the axis.
    axis = _log_axis(points + [end for end in ends if min(points) / 2 <= end <= max(points) * 2])
    axis["title"] = {"text": f"ratio to {labels.arm(view.baseline)} (right is better)"}
    return _rows_figure(data, layout, axis) | {"line": 1.0}


def roofline(view: View) -> Figure | None:
    """Draw bars of each arm's share of the machine's measured rate."""
    rows = [row for row in contents.find(view, SPEED) if row.share_of_roofline is not None]
    share = lambda row: 100 * row.share_of_roofline
    figure = _bars(rows, share, lambda row: f"{share(row):.0f} %", "% of the rate measured on this machine")
    return figure and figure | {"line": 100.0}


def seconds(view: View, metrics: Sequence[str]) -> Figure | None:
    """Draw bars of times: load, compile, first token."""
    rows = [row for row in contents.find(view, metrics) if row.value is not None]
    return _bars(rows, lambda row: row.value, lambda row: labels.value(row.value, "s"), "seconds (less is better)")


def memory(view: View) -> Figure | None:
    """Draw bars of peak host memory above the level after imports."""
    rows = [row for row in contents.find(view, ("peak_memory_bytes",)) if row.value is not None]
    shown = lambda row: labels.value(row.value, "bytes")
    return _bars(rows, lambda row: row.value / 2**20, shown, "MiB (less is better)")


def tpu(view: View) -> Figure | None:
    """Draw the three lower bounds on time of every program compiled for a slice."""
    rows = [row for row in contents.tpu_rows(view) if "roofline" in row.details or "roofline_s" in row.details]
    if not rows:
        return None
    parts = (("compute_s", "compute", "#3b82f6"), ("memory_s", "memory", "#0d9f8c"),
             ("interconnect_s", "interconnect", "#e5722a"))  # fmt: skip
    layout = sections([(f"{row.topology}: {row.label}", [name for _, name, _ in parts]) for row in rows])
    data = []
    for index, (key, name, color) in enumerate(parts):
        times = [row.details["roofline_s"][key] * 1e3 for row in rows]
        data.append(_bar_trace(name, color, times, layout.y[index :: len(parts)], [f"{t:.3g} ms" for t in times]))
    axis = {"title": {"text": "least milliseconds a step at the chip's published rate"}, "rangemode": "tozero"}
    return _rows_figure(data, layout, axis)


def heat_map(parity: dict[str, Any] | None) -> Figure | None:
    """Draw relative errors of modules in float64: layers down, modules across, colour by power of ten."""
    cells: dict[tuple[int, str], float] = {}
    for entry in (parity or {}).get("layers", []):
        inside = re.fullmatch(r"layers\.(\d+)(?:\.(.+))?", str(entry.get("module", "")))
        if inside and isinstance(entry.get("float64"), int | float):
            cells[int(inside.group(1)), inside.group(2) or "block"] = float(entry["float64"])
    if not cells:
        return None
    modules = list(dict.fromkeys(module for _, module in cells))
    layers = sorted({layer for layer, _ in cells})
    errors = [[cells.get((layer, module)) for module in modules] for layer in layers]
    logs = [[None if e is None else math.log10(max(e, ZERO_ERROR)) for e in line] for line in errors]
    texts = [["" if e is None else f"layer {layer}, {module}: {e:.1e}" for module, e in zip(modules, line, strict=True)]
             for layer, line in zip(layers, errors, strict=True)]  # fmt: skip
    top = max(max(value for line in logs for value in line if value is not None), -9.0)
    ticks = list(range(-17, math.ceil(top) + 1, 2))
    trace = {
        "type": "heatmap", "x": modules, "y": [f"layer {layer}" for layer in layers], "z": logs, "customdata": texts,
        "hovertemplate": "%{customdata}<extra></extra>", "colorscale": "Viridis", "zmin": -17, "zmax": top,
        "xgap": 1, "ygap": 1,
        "colorbar": {"title": {"text": "relative error"}, "tickvals": ticks,
                     "ticktext": ["0" if t == -17 else f"1e{t}" for t in ticks], "thickness": 14},
    }  # fmt: skip
    layout = {
        "height": 150 + max(14 * len(layers), 60),
        "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "xaxis": {"automargin": True, "tickangle": -40},
    }
    return {"data": [trace], "layout": layout}


def _place(rows: Sequence[Row]) -> tuple[list[tuple[Row, float]], Layout]:
    """Return the rows with their y, and the layout: a section for each metric and workload."""
    groups = contents.by_workload(rows)
    layout = sections([(heading(*group), [labels.arm(row.arm) for row in own]) for group, own in groups.items()])
    return list(zip(itertools.chain(*groups.values()), layout.y, strict=True)), layout


def _bars(rows: Sequence[Row], value: Callable[[Row], float], text: Callable[[Row], str], axis: str) -> Figure | None:
    """Draw rows as horizontal bars in their arm's colour, one trace per arm; None without rows."""
    if not rows:
        return None
    placed, layout = _place(rows)
    cells: dict[str, list[tuple[float, float, str]]] = {}
    for row, y in placed:
        cells.setdefault(row.arm, []).append((value(row), y, text(row)))
    data = [_bar_trace(labels.arm(name), labels.color(name), *map(list, zip(*own))) for name, own in cells.items()]
    return _rows_figure(data, layout, {"title": {"text": axis}, "rangemode": "tozero"})


def _bar_trace(name: str, color: str, x: list[float], y: list[float], text: list[str]) -> Figure:
    return {
        "type": "bar", "orientation": "h", "name": name, "x": x, "y": y, "text": text, "width": 0.72,
        "textposition": "outside", "cliponaxis": False, "marker": {"color": color},
        "hovertemplate": f"{name}: %{{text}}<extra></extra>",
    }  # fmt: skip


def _verdict_trace(verdict: str) -> Figure:
    color = labels.VERDICT_COLORS[verdict]
    return {
        "type": "scatter", "mode": "markers", "name": labels.VERDICTS[verdict], "x": [], "y": [], "customdata": [],
        "error_x": {"type": "data", "symmetric": False, "array": [], "arrayminus": [], "thickness": 2, "width": 5},
        "marker": {"color": color, "size": 10}, "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip


def _rows_figure(data: list[Figure], layout: Layout, axis: Figure) -> Figure:
    return {
        "data": data,
        "layout": {
            "height": layout.height,
            "barmode": "overlay",
            "margin": {"l": 10, "r": 50, "t": 10, "b": 50},
            "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "traceorder": "normal"},
            "xaxis": axis | {"automargin": True, "zeroline": False},
            "yaxis": {
                "tickvals": layout.ticks, "ticktext": layout.labels, "automargin": True, "showgrid": False,
                "zeroline": False, "range": [min(layout.ticks) - 0.7, 0.7], "ticklabelposition": "outside",
            },
        },
    }  # fmt: skip


def _log_axis(values: Sequence[float]) -> Figure:
    """Make a logarithmic axis with round ticks around the values."""
    low, high = max(min(values) * 0.8, FARTHEST[0]), min(max(values) * 1.25, FARTHEST[1])
    round_numbers = (0.01, 0.02, 0.05, 0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 5, 8, 10, 20, 50, 100, 200)
    ticks = [tick for tick in round_numbers if low <= tick <= high]
    return {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [f"{tick:g}×" for tick in ticks],
    }
