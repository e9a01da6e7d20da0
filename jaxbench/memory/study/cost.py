"""Memory, FLOPs and time of one layer by context length: attention, memory bank, neural memory (S file).

Rows are (backend, layer, length). Bytes are exact: JAX's are the compiled program's temporary bytes, PyTorch's the peak
of live bytes in a run on its meta device, which computes only shapes. FLOPs are counted in that run too, two per
multiply-add; both backends compute the same products. Time is measured up to a limit of bytes and of FLOPs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydantic
from pydantic import Field

from jaxbench import outputs
from jaxbench.config import Base
from jaxbench.measure import environment, line_picture, page, verdicts
from jaxbench.measure.line_picture import Axis, Line, Panel, Point
from jaxbench.measure.page import Section
from jaxbench.measure.records import RESULTS_NAME, Record, RecordFile, Workload
from jaxbench.memory import block_config
from jaxbench.memory.bank_config import BankConfig
from jaxbench.memory.block_config import BlockConfig
from jaxbench.memory.config import NeuralMemoryConfig
from jaxbench.memory.study.fields import Length, Several

ATTENTION = {"naive": "dense", "blocked": "blocked"}  # layer -> implementation
TITLES = {
    "naive": "naive attention",
    "blocked": "blocked attention",
    "bank": "window and memory bank",
    "neural": "neural memory",
}
LAYERS = tuple(TITLES)
BACKENDS = ("flax", "torch")
COLORS = {"naive": "#d6336c", "blocked": "#e5722a", "bank": "#3b82f6", "neural": "#0d9f8c"}


class LayerShape(Base):
    """Shape of one layer of each kind."""

    d_model: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    key_block: int = Field(default=128, gt=0)  # keys per block in blocked attention
    bank: BankConfig
    window: int = Field(gt=0)  # of the attention in the bank's block
    neural: NeuralMemoryConfig

    @pydantic.model_validator(mode="after")
    def _check(self) -> LayerShape:
        for layer in ("bank", "neural"):
            self.block(layer)  # raises here, before anything is measured
        return self

    def block(self, layer: str) -> BlockConfig:
        """Shape of a memory's block: sliding-window attention with a bank, or the neural memory alone."""
        is_bank = layer == "bank"
        return BlockConfig(
            kind="bank" if is_bank else "lmm", bank=self.bank if is_bank else None,
            neural=None if is_bank else self.neural, d_model=self.d_model, num_heads=self.num_heads,
            num_kv_heads=self.num_heads, head_dim=self.head_dim, window=self.window,
        )  # fmt: skip

    def initial_params(self, layer: str) -> dict[str, np.ndarray]:
        """Initial values of a layer's parameters by name."""
        if layer not in ATTENTION:
            return block_config.initial_params(self.block(layer), seed=0)
        random, width = np.random.default_rng(0), self.num_heads * self.head_dim
        shapes = {f"{name}_proj.kernel": (self.d_model, width) for name in "qkv"}
        shapes |= {"o_proj.kernel": (width, self.d_model)}
        return {name: 0.02 * random.standard_normal(shape) for name, shape in shapes.items()}


class Cost(Base):
    """Settings of the measurement: configs/memory/cost.yaml."""

    layer: LayerShape
    lengths: Several[Length] = (2048, 8192, 32768, 131072)
    # tokens per call for the memories, whose state carries over; PyTorch's meta device cannot run a single token
    segment: int = Field(default=2048, ge=2)
    repeats: int = Field(default=3, ge=1)  # timed calls, after one warm-up call
    max_bytes: float = Field(default=4e9, gt=0)  # more temporary bytes: not timed
    max_flops: float = Field(default=3e12, gt=0)  # more FLOPs: not timed

    @pydantic.model_validator(mode="after")
    def _check(self) -> Cost:
        for length in self.lengths:
            if length < 2:
                raise ValueError(
                    f"cost: length {length} is one token, whose bytes cannot be counted; wanted at least 2"
                )
            if length > self.segment and length % self.segment:
                raise ValueError(f"cost: length {length} is not a multiple of segment={self.segment}")
        return self


class Measured(NamedTuple):
    """Costs of one layer at one length in one backend; None = not measured."""

    temp_bytes: int
    state_bytes: int  # of a sequence, after its last token
    flops: int | None  # of the whole sequence, forward


def run(settings: Cost, workdir: str | Path, parts: Mapping[str, Any], *, device: str = "cpu") -> dict[str, Any]:
    """Measure layers by length, write summary.json, cost.csv, cost.html and cost.svg, and return the summary.

    Times are also written to results.jsonl as records, each as soon as it is measured.

    parts: the module cost_layer of each of BACKENDS.
    device: cpu or gpu, for times; bytes and FLOPs of PyTorch need no device.
    """
    workdir, rows = Path(workdir), []
    workdir.mkdir(parents=True, exist_ok=True)
    file = RecordFile(workdir / RESULTS_NAME)
    file.set_aside()
    for length in settings.lengths:
        for layer in LAYERS:
            shape = (layer, settings.layer, length, settings.segment)
            measured = {name: part.measure(*shape) for name, part in parts.items()}
            flops = measured["torch"].flops
            for name, costs in measured.items():
                fits = costs.temp_bytes <= settings.max_bytes and flops <= settings.max_flops
                times = parts[name].seconds(*shape, settings.repeats, device) if fits else ()
                seconds = verdicts.median(times) if fits else None
                file.append(_record(name, layer, length, device, times))
                row = {"backend": name, "layer": layer, "length": length, "temp_bytes": costs.temp_bytes}
                row |= {"state_bytes": costs.state_bytes, "flops_per_token": flops / length, "seconds": seconds}
                rows.append(row)
            print(f"    {length:,} tokens, {TITLES[layer]}", file=sys.stderr, flush=True)
    about = environment.describe(threads=environment.usable_cores())
    summary = {"about": about, "settings": settings.model_dump(mode="json"), "rows": rows}
    outputs.set_aside(workdir / "summary.json")  # of which the other files are drawn
    outputs.write_json(workdir / "summary.json", summary)
    outputs.write_csv(workdir / "cost.csv", rows)
    outputs.write_text(workdir / "cost.html", charts(rows))
    outputs.write_text(workdir / "cost.svg", picture(summary))
    return summary


def _record(backend: str, layer: str, length: int, device: str, times: Sequence[float]) -> Record:
    """Record of one layer's times; a layer that was not timed has no value."""
    return Record(
        metric="layer_s", value=verdicts.median(times) if times else None, unit="s", samples=tuple(times),
        arm=f"{backend} {layer}", device=device, status="ok" if times else "skipped",
        reason="" if times else "over max_bytes or max_flops",
        workload=Workload(kind="inference", dtype="float32", batch=1, prompt_tokens=length),
    )  # fmt: skip


def saving(rows: list[dict], length: int) -> dict[str, float]:
    """Ratio of temporary bytes of naive attention to those of the bank, at a length, by backend."""
    size = {(row["backend"], row["layer"]): row["temp_bytes"] for row in rows if row["length"] == length}
    return {name: size[name, "naive"] / size[name, "bank"] for name in BACKENDS if (name, "bank") in size}


def table(summary: dict[str, Any]) -> Any:
    """Rich table of a summary."""
    from rich.table import Table

    names = ("backend", "layer", "context", "temporary MiB", "state KiB", "MFLOP/token", "tokens/s")
    shown = Table(*names, title="One layer, forward, batch 1, float32", title_justify="left")
    for row in summary["rows"]:
        speed = "" if row["seconds"] is None else f"{row['length'] / row['seconds']:,.0f}"
        sizes = (row["temp_bytes"] / 2**20, row["state_bytes"] / 2**10, row["flops_per_token"] / 1e6)
        cells = (row["backend"], TITLES[row["layer"]], f"{row['length']:,}")
        shown.add_row(*cells, *(f"{size:,.1f}" for size in sizes), speed)
    return shown


def _series(rows: list[dict], field: str) -> Iterator[tuple[str, str, list[dict]]]:
    """Yield backend, layer and rows of each line of a chart; where backends are equal, only those of Flax."""
    backends = ["flax"] if field in ("state_bytes", "flops_per_token") else list(BACKENDS)
    for backend in backends:
        for layer in LAYERS:
            own = [row for row in rows if (row["backend"], row["layer"]) == (backend, layer) and row[field]]
            if own:
                yield backend, layer, own


def charts(rows: list[dict]) -> str:
    """HTML page of charts versus length, which opens offline."""
    fields = {"temp_bytes": "temporary bytes", "state_bytes": "state bytes of a sequence"}
    fields |= {"flops_per_token": "FLOPs a token", "seconds": "seconds"}
    lengths, figures = sorted({row["length"] for row in rows}), {}
    for field, title in fields.items():
        traces = []
        for backend, layer, own in _series(rows, field):
            line = {"color": COLORS[layer], "dash": "solid" if backend == "flax" else "dot"}
            traces.append({
                "type": "scatter", "mode": "lines+markers", "line": line, "name": f"{TITLES[layer]}, {backend}",
                "x": [row["length"] for row in own], "y": [row[field] for row in own],
            })  # fmt: skip
        x = {"type": "log", "tickvals": lengths, "title": {"text": "tokens of context"}}
        y = {"type": "log", "exponentformat": "power", "title": {"text": title}}
        figures[f"chart-{field}"] = {"data": traces, "layout": {"height": 420, "xaxis": x, "yaxis": y}}
    sections = [Section(field, title) for field, title in fields.items()]
    return page.render("What context costs: one layer", sections, figures, name="What context costs")


def picture(summary: dict[str, Any]) -> str:
    """SVG of a summary's charts for pages that cannot show HTML; where backends are equal, only Flax."""
    rows = [row | {"rate": row["length"] / row["seconds"] if row["seconds"] else None} for row in summary["rows"]]
    lengths = sorted({row["length"] for row in rows})
    across = Axis("tokens of context", {length: f"{length:,}" for length in lengths}, is_log=True)
    charts = (("temp_bytes", "Temporary memory", "B"), ("state_bytes", "State of a sequence", "B"))
    charts += (("flops_per_token", "FLOPs a token", ""), ("rate", "Tokens per second", ""))
    panels = []
    for field, title, unit in charts:
        lines = []
        for backend, layer, own in _series(rows, field):
            points = [Point(row["length"], row[field]) for row in own]
            lines.append(Line(TITLES[layer], COLORS[layer], points, backend == "torch"))
        values = [point.y for line in lines for point in line.points]
        if not values:
            continue  # nothing fitted, so the rate is unknown
        base = 10 if not unit else 4 if max(values) < 1000 * min(values) else 16
        ticks = {value: _short(value, unit) for value in line_picture.powers(values, base)}
        panels.append(Panel(title, across, Axis(title, ticks, is_log=True), lines))
    about = summary["about"]
    note = f"one layer, forward, batch 1, float32; {about['cpu']}, {about['threads']} threads; dashed: PyTorch"
    return line_picture.draw("What context costs", note, panels)


def _short(value: float, unit: str = "") -> str:
    """Format a number with a prefix: 16,384 bytes -> 16 KiB, and without a unit 10,000 -> 10 K."""
    step = 1024 if unit else 1000
    for prefix in ("", "K", "M", "G", "T"):
        if value < step or prefix == "T":
            break
        value /= step
    return f"{value:g} {prefix}{'i' if prefix and unit else ''}{unit}".strip()
