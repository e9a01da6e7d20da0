"""Compute a compressor's figures on texts, and write them as a table, JSON and a picture.

Ratios are computed one by one, each saved as a part of --workdir: a killed run resumes with the next.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxbench import store, terminal
from jaxbench.compress import answer_run, document, evaluate
from jaxbench.compress.auto import AutoCompressor
from jaxbench.measure import line_picture
from jaxbench.measure.line_picture import BLUE, BROWN, GREEN, GREY, PINK, Axis, Line, Panel, Point

ARMS = ("keep", "tag", "others", "vectors", "aligned")
COLORS = {
    "keep": GREY, "tag": GREEN, "others": BROWN, "vectors": BLUE, "aligned": PINK, "zeros": BROWN, "nothing": GREY,
}  # fmt: skip
SAID = {
    "keep": "the last tokens kept", "tag": "the tag alone", "others": "another text's vectors",
    "vectors": "vectors side by side", "aligned": "vectors at their tokens' places", "zeros": "zeros",
    "nothing": "the tag alone",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings of the evaluation."""

    ratios: tuple[int, ...]
    chunks: int  # read back, of the first windows
    start: int  # token before the text
    store: document.Dtype = "float32"  # format that vectors are rounded to before they are read


def run(
    compressor: AutoCompressor, side: answer_run.Side, drawn: Sequence[evaluate.Window], plan: Plan, workdir: Path,
    *, say: Callable[[str], Any] = print,
) -> list[dict[str, Any]]:  # fmt: skip
    """Compute figures of each ratio: recovery of a continuation and tokens read back, with intervals over documents."""
    documents, reader, found = [window.document for window in drawn], side.reader, []

    def ends() -> dict[str, Any]:
        with terminal.progress(3 * len(drawn)) as advance:
            losses = evaluate.bounds(reader, compressor, drawn, start=plan.start, progress=advance)
        return {name: value.tolist() for name, value in losses.items()}

    def known() -> list[float]:
        with terminal.progress(plan.chunks) as advance:
            return evaluate.known(reader, compressor, drawn[: plan.chunks], progress=advance).tolist()

    bounds = {name: np.array(value) for name, value in store.kept(workdir / "bounds.json", ends)[0].items()}
    floor = np.array(store.kept(workdir / "known.json", known)[0])
    floor = evaluate.mean_interval(floor, documents[: len(floor)])
    for ratio in plan.ratios:
        own = compressor.with_ratio(ratio)
        # once, if one of the two parts is missing; for all windows, as vectors are rounded as in one file
        compressed = functools.cache(functools.partial(evaluate.compressed, own, drawn, plan.store))

        def compute(own: AutoCompressor = own, compressed: Callable[[], Any] = compressed) -> dict[str, Any]:
            made = compressed()
            with terminal.progress(4 * len(drawn) + 3 * plan.chunks) as advance:
                losses = evaluate.continuation(reader, own, drawn, made, start=plan.start, progress=advance)
                hits = evaluate.read_back(reader, own, drawn[: plan.chunks], made[: plan.chunks], progress=advance)
            return _figures(own.ratio, bounds | losses, hits, documents)

        def freely(own: AutoCompressor = own, compressed: Callable[[], Any] = compressed) -> dict[str, Any]:
            made = compressed()[: plan.chunks]
            with terminal.progress(plan.chunks) as advance:
                values = evaluate.said_freely(side.generate, own, drawn[: plan.chunks], made, progress=advance)
            return {name: evaluate.mean_interval(each, documents[: len(each)]) for name, each in values.items()}

        # Stores other than float32 are named: for them, an earlier version saved figures of unrounded vectors without
        # the store's name. For all stores, it saved nats as means over windows, in `ratio-N.json`, and shares of gaps
        # below 0 in `figures-N.json`.
        part = f"{ratio}.json" if plan.store == "float32" else f"{ratio}-{plan.store}.json"
        row, was_there = store.kept(workdir / f"shares-{part}", compute)
        row["freely"], _ = store.kept(workdir / f"freely-{part}", freely)
        row["read_back"] = {"nothing": floor, **row["read_back"]}
        say(_line(row) + (" (finished before)" if was_there else ""))
        found.append(row)
    return found


def _figures(
    ratio: int, losses: Mapping[str, np.ndarray], hits: Mapping[str, np.ndarray], documents: Sequence[int]
) -> dict[str, Any]:
    row: dict[str, Any] = {"ratio": ratio}
    for protocol, name in enumerate(("direct", "far")):
        row[name] = {arm: evaluate.recovery(losses, arm, documents, protocol) for arm in ARMS if arm in losses}
        row[f"{name}_gap_nats"] = evaluate.gap(losses, documents, protocol)
        means = {each: evaluate.by_document(value[:, protocol], documents) for each, value in losses.items()}
        row[f"{name}_nats"] = {each: float(mean.mean()) for each, mean in means.items()}  # from which recovery follows
    row["read_back"] = {arm: evaluate.mean_interval(values, documents[: len(values)]) for arm, values in hits.items()}
    return row


def _line(row: Mapping[str, Any]) -> str:
    parts = [f"{row['ratio']:2d}x"]
    for name in ("direct", "far"):
        mean, low, high = row[f"{name}_gap_nats"]
        gap = f"{mean:.3f}" if math.isnan(low) else f"{mean:.3f} [{low:.3f}, {high:.3f}]"
        parts.append(f"{name}, of {gap} nats: " + _shares(row[name], "{:.0f} %"))
    parts.append("read back " + _shares(row["read_back"], "{:.1f} %"))
    parts.append("freely " + _shares(row["freely"], "{:.1f} %"))
    return "  ".join(parts)


def _shares(of: Mapping[str, Any], form: str) -> str:
    """Shares by name, in percent; "none" where there is none."""
    return " ".join(f"{name} {'none' if math.isnan(x) else form.format(100 * x)}" for name, (x, *_) in of.items())


def picture(rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    """Recovery and tokens read back over the ratio, as SVG."""
    across = Axis("tokens a vector", {float(row["ratio"]): str(row["ratio"]) for row in rows}, is_log=len(rows) > 1)
    panels = []
    for title, name in (
        ("continuation recovered, direct", "direct"), ("behind 64 tokens in clear", "far"), ("read back", "read_back"),
    ):  # fmt: skip
        lines = [Line(SAID[arm], COLORS[arm], _points(rows, name, arm)) for arm in rows[0][name]]
        panels.append(Panel(f"{title}, %", across, Axis("%", {float(i): str(i) for i in range(0, 101, 20)}), lines))
    note = f"{about['compressor']}, {about['windows']} windows of {about['documents']} documents, 95 % over documents"
    return line_picture.draw("A decoder behind vectors", note, panels)


def _points(rows: Sequence[Mapping[str, Any]], name: str, arm: str) -> list[Point]:
    """An arm's points in percent: none where its value is NaN, and no interval where that is NaN (one document)."""
    found = []
    for row in rows:
        mean, *ends = (100 * x for x in row[name][arm])
        if not math.isnan(mean):
            found.append(Point(row["ratio"], mean, *(end for end in ends if not math.isnan(end))))
    return found
