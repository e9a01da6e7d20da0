"""Draw lines over a length or a distance as SVG, for pages that show no HTML (S file).

The SVG is written by hand on the card of svg_card.py, which says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxbench.measure.svg_card import GAP, MARGIN, WIDTH, card, element

HEIGHT = 300  # of a panel, with HEAD above for its title and FOOT below for its axis
HEAD, FOOT = 30, 46
LABEL = 52  # width left of a panel's lines, for the numbers of the y axis
LEGEND = 22  # height of a row of the legend
GREY, BLUE, PINK, GREEN, BROWN = "#6e7781", "#0969da", "#bf3989", "#1a7f37", "#9a6700"  # lines' colours
GRID = "  .grid { stroke: #8b949e; stroke-opacity: 0.3; }\n"


class Point(NamedTuple):
    """A value and, if known, its interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


class Line(NamedTuple):
    """One line of a chart; lines of the same name share one legend entry, in the style of the first."""

    name: str
    color: str
    points: Sequence[Point]
    is_dashed: bool = False


class Axis(NamedTuple):
    """An axis from its first tick to its last; ticks: value -> label."""

    title: str
    ticks: Mapping[float, str]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return a value's position from 0 to 1 between the outer ticks; a value outside is clamped to the edge.

        Raises:
          ValueError: there is no tick, the value is NaN, or a tick of a logarithmic axis is not positive.
        """
        if not self.ticks or math.isnan(value) or (self.is_log and min(self.ticks) <= 0):
            raise ValueError(f"picture: {value} has no place on axis {self.title!r} with ticks {list(self.ticks)}")
        if len(self.ticks) == 1:
            return 0.5
        if self.is_log and value <= 0:
            return 0.0
        scale = math.log if self.is_log else float
        low, high = scale(min(self.ticks)), scale(max(self.ticks))
        return min(max((scale(value) - low) / (high - low), 0.0), 1.0)


class Panel(NamedTuple):
    """One chart."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]


def powers(values: Sequence[float], base: int) -> list[float]:
    """Return powers of `base`, from at or below the smallest positive value to at or above the largest.

    Raises:
      ValueError: no value is positive, or one is not finite.
    """
    positive = [value for value in values if value > 0]
    if not positive or not all(map(math.isfinite, values)):
        raise ValueError(f"picture: a logarithmic axis needs finite values, a positive one too, got {list(values)[:5]}")
    low = math.floor(math.log(min(positive), base) + 1e-9)
    high = math.ceil(math.log(max(positive), base) - 1e-9)
    return [float(base) ** power for power in range(low, max(high, low + 1) + 1)]


def draw(title: str, note: str, panels: Sequence[Panel]) -> str:
    """Return the SVG text: panels two to a row, and a legend of all lines below."""
    width = (WIDTH - 2 * MARGIN - GAP) / 2
    body, top = [], 84
    for start in range(0, len(panels), 2):
        for column, panel in enumerate(panels[start : start + 2]):
            body += _panel(panel, MARGIN + column * (width + GAP), top, width)
        top += HEIGHT + GAP
    names: dict[str, Line] = {}
    for line in (line for panel in panels for line in panel.lines):
        names.setdefault(line.name, line)
    body += _legend(list(names.values()), top)
    top += LEGEND * -(-len(names) // 4) + MARGIN
    return card(title, note, body, height=top, style=GRID)


def _panel(panel: Panel, left: float, top: float, width: float) -> list[str]:
    """Draw one chart: grid, tick labels, lines with their intervals."""
    start, end, above, below = left + LABEL, left + width - 8, top + HEAD, top + HEIGHT - FOOT

    def at_x(value: float) -> float:
        return start + panel.x.share(value) * (end - start)

    def at_y(value: float) -> float:
        return below - panel.y.share(value) * (below - above)

    elements = [element("text", panel.title, class_="head", x=round(left), y=top + 14)]
    for value, label in panel.y.ticks.items():
        y = at_y(value)
        elements.append(element("line", class_="grid", x1=start, x2=end, y1=y, y2=y))
        elements.append(element("text", label, class_="note", x=start - 8, y=y + 4, text_anchor="end"))
    for value, label in panel.x.ticks.items():
        elements.append(element("text", label, class_="note", x=at_x(value), y=below + 18, text_anchor="middle"))
    middle = (start + end) / 2
    elements.append(element("text", panel.x.title, class_="note", x=middle, y=below + 38, text_anchor="middle"))
    for line in panel.lines:
        places = [(at_x(point.x), at_y(point.y)) for point in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        elements.append(element("polyline", points=path, fill="none", **_stroke(line)))
        for point, (x, y) in zip(line.points, places, strict=True):
            if point.low is not None and point.high is not None:
                low, high = at_y(point.low), at_y(point.high)
                elements.append(element("line", x1=x, x2=x, y1=low, y2=high, stroke=line.color, stroke_opacity=0.5))
            elements.append(element("circle", cx=x, cy=y, r=3, fill=line.color))
    return elements


def _legend(lines: Sequence[Line], top: float) -> list[str]:
    """Draw the legend, four lines to a row."""
    column, elements = (WIDTH - 2 * MARGIN) / 4, []
    for index, line in enumerate(lines):
        x, y = MARGIN + index % 4 * column, top + LEGEND * (index // 4)
        elements.append(element("line", x1=x, x2=x + 24, y1=y, y2=y, **_stroke(line)))
        elements.append(element("text", line.name, class_="arm", x=x + 32, y=y + 4))
    return elements


def _stroke(line: Line) -> dict[str, float | str]:
    return {"stroke": line.color, "stroke_width": 2} | ({"stroke_dasharray": "5 4"} if line.is_dashed else {})
