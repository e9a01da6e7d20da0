"""Write one run as a self-contained page, report.html (S file).

By default it shows what became worse, better or is undecided; detailed, every series, with every section open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import markupsafe

from jaxbench import outputs
from jaxbench.measure import page
from jaxbench.measure.page import Section
from jaxbench.regress import advice, limits, metrics, report
from jaxbench.regress.judge import Finding
from jaxbench.regress.metrics import Margin

NAME = "report.html"
COLOURS = {"regression": "#c93a3a", "improvement": "#1a7f45", "undecided": "#8b949e", "no change": "#3b82f6"}
CLASSES = {"regression": "slower", "improvement": "faster"}
LIMITS = {"held": "faster", "broken": "slower"}
FOLDED = {  # sections that are folded at first, and what they contain
    "measured": "medians of both sides, and the launches of head", "worth": "false alarms and power",
    "system": "machine, packages and load",
}  # fmt: skip
# Ratios of head to base at which the axis has ticks, labelled by how much worse head is
TICKS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100)
SHOWN_RATIOS = (0.05, 200)  # range of the chart; values beyond it are clipped to its ends


def write(record: Mapping[str, Any], folder: Path, *, detailed: bool = False) -> list[str]:
    """Write the page into a folder atomically; return its name."""
    outputs.write_text(folder / NAME, render(record, detailed=detailed))
    return [NAME]


def render(record: Mapping[str, Any], *, detailed: bool = False) -> str:
    """Render the page.

    Args:
      detailed: every series, and every section open.
    """
    found = report.findings_of(record)
    shown = [each for each in found if detailed or each.verdict != "no change"]
    figure = forest(record, shown)
    margins = _margins(record, shown)
    rows = [_row(record, each, margins[each.series]) for each in shown]
    bounds = [(*report.limit_cells(each), LIMITS[each.verdict]) for each in limits.of_run(record)]
    why, measured = report.explanation(record), series_rows(record)
    sections = [
        Section("limits", "Limits", bool(bounds)),
        Section("findings", "Findings", bool(found)),
        Section("ratios", "By how much head is worse", figure is not None),
        Section("why", "Why", bool(why)),
        Section("recommendations", "What to do next"),
        Section("checklist", "Before a release"),
        Section("measured", "Every series", detailed or not found),
        Section("worth", "What these verdicts are worth here", bool(found)),
        Section("notes", "Notes", bool(record["notes"])),
        Section("system", "System"),
    ]
    return page.render(
        f"Performance: {report.summary(record)}", sections, {"chart-ratios": figure} if figure else {},
        name=f"Performance of {record['sides']['head']['commit']}", template=Path(__file__).with_suffix(".html"),
        record=record, cards=cards(record, found), rows=rows, limits=bounds, suite=advice.suite_name(record),
        left_out=len(found) - len(shown), measured=measured, why=why, detailed=detailed, system=system(record),
        recommendations=advice.recommendations(record), checklist=advice.checklist(record),
        worth=report.worth(record) if found else [], folded=FOLDED, level=report.level(record), filters={"code": code},
    )  # fmt: skip


def cards(record: Mapping[str, Any], found: Sequence[Finding]) -> list[tuple[str, str, str]]:
    """Return the key figures on top of the page: figure, label, remark."""
    count, broken = len(limits.of_run(record)), len(limits.broken(record))
    bounds = [(f"{count - broken} of {count}", "limits held", "of head alone")] if count else []
    if not found:
        return [(str(len(record["series"])), "series measured", "no base to compare with"), *bounds]
    words = {word: sum(each.verdict == word for each in found) for word in report.ORDER}
    critical = sum(each.level == "critical" for each in found)
    items = advice.checklist(record)
    done = sum(item.is_done for item in items)
    return [
        (str(words["regression"]), "regressions", f"{critical} critical"),
        (str(words["improvement"]), "improvements", "beyond chance and the margin"),
        (str(words["no change"]), "no change", "the interval lies within the margin"),
        (str(words["undecided"]), "undecided", "more launches would tell"),
        *bounds,
        (f"{done} of {len(items)}", "points of a release", "done, by this run"),
    ]


def forest(record: Mapping[str, Any], found: Sequence[Finding]) -> page.Figure | None:
    """Plot log ratios of head to base with intervals and margins, coloured by verdict; right of the line is worse."""
    rows = [each for each in found if math.isfinite(each.worse) and each.worse > -1]
    if not rows:
        return None
    traces: dict[str, dict[str, Any]] = {}
    for each in rows:
        trace = traces.setdefault(each.verdict, _trace(each.verdict))
        point, low, high = (_cut(1 + share) for share in (each.worse, each.low, each.high))
        trace["x"].append(point)
        trace["y"].append(each.series)
        trace["error_x"]["array"].append(high - point)
        trace["error_x"]["arrayminus"].append(point - low)
        trace["text"].append(f"{report.interval(each)}, {report.verdict(each)}")
        trace["marker"]["symbol"].append("diamond" if each.low == each.high else "circle")
    margins = _margins(record, rows)
    data = [_ticks("warning", margins, 1.0), _ticks("critical", margins, 2.5)]
    data += [traces[word] for word in report.ORDER if word in traces]
    points = [_cut(1 + each.worse) for each in rows] + [_cut(1 + each.critical) for each in margins.values()] + [1.0]
    ends = [_cut(1 + share) for each in rows for share in (each.low, each.high)]
    # Few launches give arbitrarily wide intervals: ends beyond twice the range of the points are clipped.
    inside = points + [end for end in ends if min(points) / 2 <= end <= max(points) * 2]
    low, high = min(inside) * 0.95, max(inside) * 1.05
    ticks = [tick for tick in TICKS if low <= tick <= high]
    axis = {
        "type": "log", "range": [math.log10(low), math.log10(high)], "tickvals": ticks,
        "ticktext": ["0" if tick == 1 else f"{100 * (tick - 1):+.0f} %" for tick in ticks],
        "title": {"text": "worse by (log ratio of head to base)"},
    }  # fmt: skip
    names = [each.series for each in rows]
    layout = {
        "height": 140 + 24 * len(rows), "margin": {"l": 10, "r": 20, "t": 40, "b": 50}, "xaxis": axis,
        "yaxis": {"categoryorder": "array", "categoryarray": names[::-1], "automargin": True, "dtick": 1},
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom"},
    }  # fmt: skip
    return {"data": data, "layout": layout, "line": 1.0}


def series_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row per series: medians of base and head, least and most of head's launches, number of launches."""
    rows = []
    for name, sides in record["series"].items():
        unit, head = metrics.of_run(record, name).unit, sides.get("head", {})
        medians = [report.number(sides[side]["median"], unit) if side in sides else "" for side in ("base", "head")]
        values = head.get("launches", ())
        spread = f"{report.number(min(values), unit)} to {report.number(max(values), unit)}" if len(values) > 1 else ""
        rows.append((name, *medians, spread, str(len(values) or "")))
    return rows


def system(record: Mapping[str, Any]) -> dict[str, str]:
    """Describe the system that the run ran on."""
    found = {"machine": record["host"], "device": record["device"]}
    for name, value in record["machine"].items():
        if name not in ("host", "commit") and value not in ({}, [], ""):
            found[name.replace("_", " ")] = _words(name, value)
    return found


def code(sentence: str) -> markupsafe.Markup:
    """Return a sentence as escaped HTML; text between backticks becomes code."""
    parts = [markupsafe.escape(part) for part in sentence.split("`")]
    return markupsafe.Markup("").join(
        markupsafe.Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts)
    )


def _words(name: str, value: Any) -> str:
    if name == "memory_bytes":
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each:.3g}" if isinstance(each, float) else f"{key} {each}"
                         for key, each in value.items())  # fmt: skip
    return ", ".join(f"{each:.2f}" for each in value) if isinstance(value, list | tuple) else str(value)


def _margins(record: Mapping[str, Any], found: Sequence[Finding]) -> dict[str, Margin]:
    """Return the margin of each series: from the run's suite, else from the metric's kind."""
    suite = advice.suite_of(record)
    kinds = {each.series: metrics.metric_of(each.series).kind for each in found}
    return {name: metrics.MARGINS[kind] if suite is None else suite.margin(name) for name, kind in kinds.items()}


def _row(record: Mapping[str, Any], each: Finding, allowed: Margin) -> dict[str, Any]:
    unit = metrics.of_run(record, each.series).unit
    remark = f"about {each.wanted_pairs} launches" if each.verdict == "undecided" else each.level
    return {
        "series": each.series, "base": report.number(each.base, unit), "head": report.number(each.head, unit),
        "interval": report.interval(each), "verdict": each.verdict, "remark": remark,
        "class": CLASSES.get(each.verdict, ""), "margins": f"{100 * allowed.warning:g}, {100 * allowed.critical:g} %",
    }  # fmt: skip


def _trace(word: str) -> dict[str, Any]:
    """Return an empty trace for the points of one verdict."""
    return {
        "type": "scatter", "mode": "markers", "name": word, "x": [], "y": [], "text": [],
        "marker": {"color": COLOURS[word], "size": 9, "symbol": []}, "hovertemplate": "%{y}<br>%{text}<extra></extra>",
        "error_x": {"type": "data", "symmetric": False, "thickness": 1.5, "array": [], "arrayminus": []},
    }  # fmt: skip


def _ticks(name: str, margins: Mapping[str, Margin], width: float) -> dict[str, Any]:
    """Return a trace of the margins of one level."""
    return {
        "type": "scatter", "mode": "markers", "name": f"{name} above", "y": list(margins),
        "x": [_cut(1 + getattr(each, name)) for each in margins.values()],
        "hovertemplate": f"{name} above<extra></extra>",
        "marker": {"symbol": "line-ns-open", "size": 12, "color": "#8b949e", "line": {"width": width}},
    }  # fmt: skip


def _cut(ratio: float) -> float:
    least, most = SHOWN_RATIOS
    return min(max(ratio, least), most)
