"""Parts of the report's page about proofs: the TPU table and the parity gates (S file)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from jaxbench.bench import labels
from jaxbench.bench.report.contents import TpuRow
from jaxbench.measure import page

HEAD = ("program", "bytes a chip", "FLOPs a chip", "compiler / ours", "traffic", "collectives sent", "least time")
VERDICTS = {True: Markup('<b class="faster">passed</b>'), False: Markup('<b class="slower">failed</b>')}


def tpu(rows: Sequence[TpuRow]) -> Markup:
    """Text and table of the programs compiled for slices."""
    sources = dict.fromkeys(
        f"{detail['chip']}: {detail['source']}" for row in rows if (detail := row.details.get("roofline_s"))
    )
    text = Markup(
        "<p>The same programs, compiled ahead of time by the real TPU compiler for a slice that is not attached; every "
        "figure is per chip. FLOPs are counted analytically and checked against the compiler's own count. The least "
        "time is what the chip's published peak rates allow, a bound and not a forecast or a measurement.</p>"
    )
    lines, topology = [], None
    for row in rows:
        if row.topology != topology:
            shape = row.details.get("flops", {})
            lines.append(page.Group(row.topology + (f", {shape['num_chips']} chips" if "num_chips" in shape else "")))
            topology = row.topology
        lines.append(_line(row))
    note = Markup('<p class="soft">Published rates: {}.</p>').format("; ".join(sources)) if sources else Markup("")
    return text + page.table(HEAD, lines) + note


def _line(row: TpuRow) -> list[Any]:
    if "roofline_s" not in row.figures:
        return [row.label or "every program", page.cell(row.problem, "left wrap", span=len(HEAD) - 1)]
    fits, times = row.details["memory_bytes"], row.details["roofline_s"]
    kinds = row.details["collective_bytes"]["kinds"]
    counts = Markup("").join(page.note(f"{total['count']} {kind}") for kind, total in kinds.items())
    count = row.details["flops"].get("compiled_over_analytic")
    style, word = ("faster", "fits in") if fits["fits"] else ("slower", "more than")
    bound = [f"{times['bound']} bound", f"at most {labels.significant(times['tokens_per_s'])} tokens/s"]
    bound += [f"MFU {100 * times['mfu']:.1f} %"] if "mfu" in times else []
    return [
        row.label + page.note(f"{fits['num_layers']} layers"),
        labels.value(row.figures["memory_bytes"], "bytes")
        + page.note(f"{word} {fits['hbm_bytes'] / 2**30:.0f} GiB", style),
        labels.value(row.figures["flops"], "FLOP"),
        f"{count:.3f}" if count else "-",
        labels.value(row.figures["traffic_bytes"], "bytes"),
        labels.value(row.figures["collective_bytes"], "bytes") + counts if kinds else "none",
        labels.value(row.figures["roofline_s"], "s") + Markup("").join(map(page.note, bound)),
    ]


def parity(arm: str, detail: dict[str, Any]) -> Markup:
    """Sentence and gates of a parity result; modules outside layers are listed."""
    worst = detail.get("worst")
    shown = f"{worst:.1e}" if isinstance(worst, int | float) else "-"
    what = f"{detail.get('case', 'the model')} on {labels.arm(arm)} and PyTorch"
    text = Markup("<p>{} in float64: {}, worst relative difference of a module {}.</p>")
    text = text.format(what, VERDICTS[bool(detail.get("passed"))], shown)
    gates = [_gate(gate) for gate in detail.get("gates", [])]
    head = ("gate", "", "worst", "limit", page.Cell('<th class="left">where</th>'))
    outside = [
        f"{entry['module']} {_error(entry.get('float64'))}"
        for entry in detail.get("layers", [])
        if entry.get("module") and not str(entry["module"]).startswith("layers.")
    ]
    note = Markup('<p class="soft">Outside the layers: {}.</p>').format(", ".join(outside)) if outside else ""
    return text + (page.table(head, gates) if gates else "") + note


def _gate(gate: dict[str, Any]) -> list[Any]:
    return [
        page.cell(f"{gate.get('id', '')} {gate.get('what', '')}", "wrap"),
        VERDICTS[bool(gate.get("passed"))],
        _error(gate.get("error")),
        _error(gate.get("limit")),
        page.cell(str(gate.get("where", "")), "left wrap"),
    ]


def _error(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, int | float) and value else "0" if value == 0 else "-"
