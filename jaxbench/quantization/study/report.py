"""The quality table: terminal, CSV, JSON, page and picture (S file)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxbench import outputs
from jaxbench.measure import environment, line_picture, page
from jaxbench.measure.line_picture import Axis, Line, Panel, Point
from jaxbench.quantization.study import quality
from jaxbench.quantization.study.quality import Estimate, Quality

# One for each way of rounding (_family).
COLORS = (
    "#8b8f98", "#3b82f6", "#e5722a", "#0d9f8c", "#9061d6", "#c2568f", "#b08d1a", "#5b8c2a", "#d84c4c",
)  # fmt: skip
FIGURES = {  # titles of the columns, and their number formats
    "kl": ("KL to float32, nats/token", "{:.3g}"),
    "bits_added": ("bits per byte more", "{:+.4f}"),
    "agreement": ("same top token", "{:.2%}"),
    "recall": ("recall of a repeat", "{:.2%}"),
}


def write(
    settings: Quality, found: Mapping[str, Any], reference: Mapping[str, Any], workdir: Path, about: Mapping[str, Any]
) -> list[Any]:
    """Write summary.json, results.csv, report.html and report.svg, and return tables for the terminal."""
    rows = {name: quality.row(found[name], reference) for name in settings.methods if name in found}
    pairs = [
        {"better": first, "worse": second, "text": text, **estimate._asdict()}
        for first, second in settings.pairs
        if first in found and second in found
        for text, estimate in quality.difference(found[second], found[first]).items()
    ]
    whole = quality.row(reference, reference)
    floats = {text: values["bits_per_byte"]._asdict() for text, values in whole["texts"].items()}
    named = {
        name: row | {"texts": {t: {k: v._asdict() for k, v in values.items()} for t, values in row["texts"].items()}}
        for name, row in rows.items()
    }
    machine = environment.describe(threads=environment.usable_cores())
    summary = {"about": machine | dict(about), "settings": settings.model_dump(mode="json")}
    outputs.write_json(workdir / "summary.json", summary | {"float32": floats, "methods": named, "pairs": pairs})
    outputs.write_csv(workdir / "results.csv", flat(rows))
    outputs.write_text(workdir / "report.svg", picture(settings, rows))
    outputs.write_text(workdir / "report.html", _page(settings, rows))
    return [*(table(rows, text, floats[text]) for text in settings.texts), *([pair_table(pairs)] if pairs else [])]


def flat(rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per method and text."""
    return [
        {"method": name, "text": text, "bits_per_weight": row["bits_per_weight"], "bytes": row["bytes"]}
        | {f"{figure}{end}": getattr(value, part) for figure, value in values.items()
           for part, end in (("mean", ""), ("low", "_low"), ("high", "_high"))}
        for name, row in rows.items() for text, values in row["texts"].items()
    ]  # fmt: skip


def shown(value: Estimate, form: str) -> str:
    """Format a mean with its interval, or alone if there is none."""
    middle = form.format(value.mean)
    return middle if value.low == value.high else f"{middle} [{form.format(value.low)}, {form.format(value.high)}]"


def table(rows: Mapping[str, Any], text: str, whole: Mapping[str, float]) -> Any:
    """Rich table of a text."""
    from rich import table as rich_table

    made = rich_table.Table(
        title=f"{text}: float32 has {whole['mean']:.4f} bits per byte; means over windows with 95 % intervals"
    )
    made.add_column("method")
    for head in ("bits a weight", "MB", *(title for title, _ in FIGURES.values())):
        made.add_column(head, justify="right")
    for name, row in rows.items():
        values = (shown(row["texts"][text][figure], form) for figure, (_, form) in FIGURES.items())
        made.add_row(name, f"{row['bits_per_weight']:.2f}", f"{row['bytes'] / 1e6:.2f}", *values)
    return made


def pair_table(pairs: list[dict[str, Any]]) -> Any:
    """Rich table of differences on the same windows."""
    from rich import table as rich_table

    made = rich_table.Table(title="KL that the second method has more than the first, on the same windows, 95 %")
    for head in ("first", "second", "text", "nats/token", "verdict"):
        made.add_column(head)
    for each in pairs:
        value = Estimate(each["mean"], each["low"], each["high"])
        verdict = "first is better" if value.low > 0 else "second is better" if value.high < 0 else "undecided"
        if value.low == value.high:  # equal windows, of a text that repeats itself: they say no more than one
            verdict = "undecided"
        made.add_row(each["better"], each["worse"], each["text"], shown(value, "{:+.3g}"), verdict)
    return made


def picture(settings: Quality, rows: Mapping[str, Any]) -> str:
    """Plot KL versus bits per weight, with a line for each way of rounding and a panel for each text.

    Weight-only methods, run by XLA, with scales that span the whole range; other methods are only in the table.
    """
    panels = []
    for text in settings.texts:
        lines: dict[str, list[Point]] = {}
        for name, row in rows.items():
            value = row["texts"][text]["kl"]
            method = settings.methods[name]
            is_plain = method.recipe is None or (method.recipe.activations, method.recipe.scales) == ("float", "minmax")
            if method.native is None and is_plain and value.mean > 0:
                point = Point(row["bits_per_weight"], value.mean, max(value.low, value.mean / 10), value.high)
                lines.setdefault(_family(settings, name), []).append(point)
        if not lines:
            continue
        kls = [point.y for points in lines.values() for point in points]
        bits = sorted({point.x for points in lines.values() for point in points})
        x = Axis(
            "bits a weight, scales counted", {float(b): f"{b:g}" for b in range(int(bits[0]), int(bits[-1]) + 2, 2)}
        )
        y = Axis("KL", {tick: f"{tick:g}" for tick in line_picture.powers(kls, 10)}, is_log=True)
        drawn = [
            Line(name, color, sorted(points)) for (name, points), color in zip(lines.items(), COLORS, strict=False)
        ]
        panels.append(Panel(f"{text}: KL to float32, nats a token", x, y, drawn))
    return line_picture.draw("What quantisation costs", "means over windows, 95 % intervals", panels)


def _family(settings: Quality, name: str) -> str:
    """The way of rounding that a method belongs to."""
    method = settings.methods[name]
    if method.recipe is None:
        return "as ggml rounds" if method.rounded else "torchao" if method.torchao else "qwix"
    ways = [method.recipe.equalize] * (method.recipe.equalize != "none")
    ways += ["gptq"] * (method.recipe.rounding == "gptq")
    return " and ".join(ways) or "to nearest"


def _page(settings: Quality, rows: Mapping[str, Any]) -> str:
    """The page: a chart for each text."""
    sections, figures = [], {}
    for i, text in enumerate(settings.texts):
        traces = [
            {
                "type": "scatter", "mode": "markers", "name": name, "x": [row["bits_per_weight"]],
                "y": [max(row["texts"][text]["kl"].mean, 1e-9)],
            }
            for name, row in rows.items()
        ]  # fmt: skip
        layout = {"yaxis": {"type": "log", "title": "KL to float32, nats/token"}, "xaxis": {"title": "bits a weight"}}
        figures[f"text{i}"] = {"data": traces, "layout": layout, "height": 460}
        sections.append(page.Section(f"text{i}", text))
    return page.render("What quantisation costs", sections, figures, lead="Means over windows of held-out text.")
