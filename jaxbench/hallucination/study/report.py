"""Write an evaluation as CSV, as an HTML page and as an SVG picture (S file)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxbench import outputs
from jaxbench.measure import page
from jaxbench.measure.svg_card import MARGIN, WIDTH, card, element

Rows = Mapping[str, Mapping[str, Any]]
MEASURES = {"pooled": "#3b82f6", "stratified": "#e5722a"}  # AUC, and the colour it is drawn in
LEFT, LINE, TOP = 330, 24, 118  # of the picture: room for names, height of a row, where rows begin
FIRST, LAST = 3, 9  # tenths of AUC at the picture's edges, at least: it is widened to what is drawn
STYLE = "  .grid { stroke: #8b949e; stroke-opacity: 0.3; }\n"


FITTED = "Every row is fitted to other sources than those it is judged on. docs/hallucination.md says what a row is."
SAVED = "A saved detector as it is, on responses to contexts that it was not fitted to; nothing was chosen here."


def write(found: Rows, workdir: Path, *, name: str = "evaluation", lead: str = FITTED) -> None:
    """Write NAME.csv, NAME.svg and NAME.html; lead: the first sentences of the page."""
    outputs.write_csv(workdir / f"{name}.csv", flat(found))
    outputs.write_text(workdir / f"{name}.svg", picture(found))
    outputs.write_text(workdir / f"{name}.html", _page(found, lead))


def flat(found: Rows) -> list[dict[str, Any]]:
    """Return one line per row, with the ends of intervals next to their values."""
    lines = []
    for name, row in found.items():
        line: dict[str, Any] = {"row": name, "kind": row["kind"]}
        for measure in ("pooled", "macro", "stratified"):
            line |= dict(zip((measure, f"{measure}_low", f"{measure}_high"), row[measure], strict=True))
        line |= {key: row[key] for key in ("average_precision", "correlation", "f1", "precision", "recall")}
        lines.append(line | {"brier": row.get("brier")})
    return lines


def ordered(found: Rows) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the rows, the lowest pooled AUC first."""
    return sorted(found.items(), key=lambda each: each[1]["pooled"][0])


def picture(found: Rows) -> str:
    """Draw the AUC of every row with its interval, pooled and within cells of task and generator."""
    rows, right = ordered(found), WIDTH - MARGIN
    end = TOP + LINE * len(rows)
    drawn = [x for _, row in rows for measure in MEASURES for x in row[measure] if math.isfinite(x)]
    first = math.floor(min(FIRST, *(10 * x for x in drawn))) if drawn else FIRST
    last = math.ceil(max(LAST, *(10 * x for x in drawn))) if drawn else LAST

    def at(value: float) -> float:
        return LEFT + (10 * value - first) / (last - first) * (right - LEFT)

    body = []
    for tenth in range(first, last + 1):
        x = at(tenth / 10)
        body.append(element("line", class_="grid", x1=x, x2=x, y1=TOP - 12.0, y2=float(end)))
        body.append(element("text", f"{tenth / 10:.1f}", class_="note", x=x, y=end + 18.0, text_anchor="middle"))
    for place, (name, color) in enumerate(MEASURES.items()):
        x = LEFT + 150.0 * place
        body.append(element("circle", cx=x, cy=TOP - 26.0, r=4, fill=color))
        body.append(element("text", name, class_="arm", x=x + 10, y=TOP - 22.0))
    for number, (name, row) in enumerate(rows):
        y = TOP + LINE * number + LINE / 2 - 4
        body.append(element("text", name, class_="arm", x=LEFT - 14.0, y=y + 4, text_anchor="end"))
        for offset, (measure, color) in zip((-4, 4), MEASURES.items()):
            value, low, high = row[measure]
            if math.isfinite(low):  # there is no figure where no cell has both classes
                body.append(element("line", x1=at(low), x2=at(high), y1=y + offset, y2=y + offset, stroke=color))
            if math.isfinite(value):
                body.append(element("circle", cx=at(value), cy=y + offset, r=3, fill=color))
    note = "AUC with 95 % intervals over sources; stratified: pairs of answers of one task and one generator"
    return card("Which answers are hallucinated", note, body, height=end + 40, style=STYLE)


def _page(found: Rows, lead: str) -> str:
    rows = ordered(found)
    figures: dict[str, page.Figure] = {"auc": _intervals(rows)}
    sections = [page.Section("auc", "AUC of every row, 95 % intervals over sources")]
    calibrated = [(name, row["reliability"]) for name, row in rows if row.get("reliability")]
    if calibrated:
        figures["reliability"] = _reliability(calibrated)
        sections.append(page.Section("reliability", "Probabilities and how often they come true, by tenths of answers"))
    return page.render("Which answers are hallucinated", sections, figures, lead=lead)


def _intervals(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> page.Figure:
    traces = []
    for measure, color in MEASURES.items():
        values = [row[measure] for _, row in rows]
        spread = {
            "type": "data", "symmetric": False, "color": color,
            "array": [high - value for value, _, high in values],
            "arrayminus": [value - low for value, low, _ in values],
        }  # fmt: skip
        traces.append({
            "type": "scatter", "mode": "markers", "name": measure, "marker": {"color": color},
            "x": [value for value, _, _ in values], "y": [name for name, _ in rows], "error_x": spread,
        })  # fmt: skip
    layout = {"xaxis": {"title": "AUC"}, "yaxis": {"automargin": True}}
    return {"data": traces, "layout": layout, "height": 120 + 26 * len(rows)}


def _reliability(rows: Sequence[tuple[str, Mapping[str, Sequence[float]]]]) -> page.Figure:
    traces: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "lines", "name": "calibrated", "x": [0, 1], "y": [0, 1], "line": {"dash": "dot"}}
    ]
    for name, bins in rows:
        line = {"type": "scatter", "mode": "lines+markers", "name": name}
        traces.append(line | {"x": list(bins["said"]), "y": list(bins["share"])})
    axes = {"xaxis": {"title": "mean probability"}, "yaxis": {"title": "share hallucinated"}}
    return {"data": traces, "layout": axes, "height": 460}
