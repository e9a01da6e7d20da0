"""The main picture as SVG: rates of every arm on every prefill and decode workload, or of the train step (S file).

The SVG is written by hand on the card of measure/svg_card.py, which says why.
"""

from __future__ import annotations

from jaxbench.bench import labels
from jaxbench.bench.report import contents
from jaxbench.bench.report.contents import View
from jaxbench.bench.summary import Row
from jaxbench.measure.records import Workload
from jaxbench.measure.svg_card import GAP, MARGIN, card, element

METRICS = ("prefill_tokens_per_s", "decode_tokens_per_s")
PANEL_WIDTH = 288
BAR, STEP, TITLE = 16, 24, 62  # heights: bar, row, panel title


def draw(view: View) -> str:
    """Return the SVG text."""
    panels = _panels(view)
    columns = max(1, min(3, len(panels)))
    lines, top = [], 88
    for start in range(0, len(panels), columns):
        row = panels[start : start + columns]
        for index, (workload, rows) in enumerate(row):
            lines += _panel(workload, rows, MARGIN + index * (PANEL_WIDTH + GAP), top)
        top += TITLE + STEP * max(len(rows) for _, rows in row) + GAP
    if not panels:
        lines.append(element("text", "no rates were measured", class_="note", x=MARGIN, y=top + 20))
        top += 40
    return card(f"{view.model}: tokens per second, more is better", _note(view), lines, height=top)


def _panels(view: View) -> list[tuple[Workload, list[Row]]]:
    rows = contents.find(view, METRICS) or contents.find(view, ("train_tokens_per_s",))
    groups = contents.by_workload([row for row in rows if row.value])
    panels = [(workload, own) for (_, workload), own in groups.items()]
    return sorted(panels, key=lambda panel: panel[0].dtype != "float32")


def _panel(workload: Workload, rows: list[Row], left: int, top: int) -> list[str]:
    """Draw one workload: one bar per arm, with its rate at the bar's end."""
    label, room = 112, 62
    largest = max(row.value for row in rows)
    tokens = f"{workload.prompt_tokens} + {workload.new_tokens}" if workload.new_tokens else f"{workload.prompt_tokens}"
    lines = [
        element("text", f"{workload.kind.capitalize()}, batch {workload.batch}", class_="head", x=left, y=top + 22),
        element("text", f"{workload.dtype}, {tokens} tokens", class_="note", x=left, y=top + 40),
    ]
    for index, row in enumerate(rows):
        y = top + TITLE - 8 + index * STEP
        width = max(2.0, (PANEL_WIDTH - label - room) * row.value / largest)
        middle = y + BAR / 2 + 4
        color, rate = labels.color(row.arm), labels.significant(row.value)
        lines.append(element("text", labels.arm(row.arm), class_="arm", x=left, y=middle))
        lines.append(element("rect", x=left + label, y=y, width=width, height=BAR, rx=3, fill=color))
        lines.append(element("text", rate, class_="number", x=left + label + width + 6, y=middle))
    return lines


def _note(view: View) -> str:
    facts = view.environment
    parts = [str(facts["cpu"])] if facts.get("cpu") else []
    parts += [f"{facts['threads']} threads"] if facts.get("threads") else []
    launches = max((len(row.launches) for row in view.rows), default=0)
    parts += [f"median of {launches} launches"] if launches else []
    return ", ".join(parts)
