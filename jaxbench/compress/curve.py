"""Draw the held-out figures of a run, or of several consecutive ones, over steps as SVG (S file)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxbench.measure import line_picture
from jaxbench.measure.line_picture import BLUE, BROWN, GREEN, PINK, Axis, Line, Panel, Point

COLORS = {"local": BLUE, "reconstruct": PINK, "continue": GREEN, "answer": BROWN}
PANELS = {
    "accuracy": "tokens that are right, %",
    "own": "nats a token fewer behind a text's own vectors",
}
SAID = {"local": "the local head", "reconstruct": "read back", "continue": "continued", "answer": "answers"}


def picture(records: Sequence[Mapping[str, Any]], note: str) -> str:
    """Draw lines over steps from the records of a training.

    Raises:
      ValueError: none of the records has held-out figures.
    """
    judged = [(each["step"], each["held_out"]) for each in records if "held_out" in each]
    if not judged:
        raise ValueError(f"picture: none of {len(records)} records has held-out figures")
    last, panels = max(step for step, _ in judged), []
    across = Axis("steps", {0.0: "0", last / 2: f"{last / 2:g}", float(last): str(last)})
    for figure, title in PANELS.items():
        factor = 100 if figure == "accuracy" else 1
        lines = []
        for kind, color in COLORS.items():
            points = [
                Point(step, factor * row[f"{kind}_{figure}"]) for step, row in judged if f"{kind}_{figure}" in row
            ]
            if points:
                lines.append(Line(SAID[kind], color, points))
        if lines:
            ticks = (0, 25, 50, 75, 100) if figure == "accuracy" else (0, 0.5, 1, 1.5, 2, 2.5)
            panels.append(Panel(title, across, Axis("", {float(tick): f"{tick:g}" for tick in ticks}), lines))
    return line_picture.draw("Held-out figures in training", note, panels)
