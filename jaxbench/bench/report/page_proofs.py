"""Parts of the report's page about proofs: the TPU table and the parity gates (S file)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from jaxbench.bench import labels
from jaxbench.bench.report.contents import TpuRow

HEADS = ("program", "bytes a chip", "FLOPs a chip", "compiler / ours", "traffic", "collectives sent", "least time")


def body(rows: Sequence[TpuRow]) -> list[str]:
    """Return the text and the table of programs compiled for slices."""
    sources = dict.fromkeys(
        f"{detail['chip']}: {detail['source']}" for row in rows if (detail := row.details.get("roofline_s"))
    )
    text = (
        "<p>The same programs, compiled ahead of time by the real TPU compiler for a slice that is not attached; every "
        "figure is per chip. FLOPs are counted analytically and checked against the compiler's own count. The least "
        "time is what the chip's published peak rates allow, a bound and not a forecast or a measurement.</p>"
    )
    lines = []
    topology = None
    for row in rows:
        if row.topology != topology:
            shape = row.details.get("flops", {})
            note = f", {shape['num_chips']} chips" if "num_chips" in shape else ""
            lines.append(f'<tr class="head"><td colspan="{len(HEADS)}">{escape(row.topology + note)}</td></tr>')
            topology = row.topology
        lines.append(_line(row))
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADS)
    table = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    note = f'<p class="soft">Published rates: {escape("; ".join(sources))}.</p>' if sources else ""
    return [text, table, note]


def _line(row: TpuRow) -> str:
    if "roofline_s" not in row.figures:
        problem = f'<td colspan="{len(HEADS) - 1}" class="left wrap">{escape(row.problem)}</td>'
        return f"<tr><td>{escape(row.label or 'every program')}</td>{problem}</tr>"
    fits, times = row.details["memory_bytes"], row.details["roofline_s"]
    kinds = row.details["collective_bytes"]["kinds"]
    counts = "".join(f"<small>{total['count']} {escape(kind)}</small>" for kind, total in kinds.items())
    count = row.details["flops"].get("compiled_over_analytic")
    style, word = ("faster", "fits in") if fits["fits"] else ("slower", "more than")
    cells = [
        f"{escape(row.label)}<small>{fits['num_layers']} layers</small>",
        labels.value(row.figures["memory_bytes"], "bytes")
        + f'<small class="{style}">{word} {fits["hbm_bytes"] / 2**30:.0f} GiB</small>',
        labels.value(row.figures["flops"], "FLOP"),
        f"{count:.3f}" if count else "-",
        labels.value(row.figures["traffic_bytes"], "bytes"),
        labels.value(row.figures["collective_bytes"], "bytes") + counts if kinds else "none",
        labels.value(row.figures["roofline_s"], "s")
        + f"<small>{escape(times['bound'])} bound</small><small>at most "
        + f"{labels.significant(times['tokens_per_s'])} tokens/s</small>"
        + (f"<small>MFU {100 * times['mfu']:.1f} %</small>" if "mfu" in times else ""),
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def parity(arm: str, detail: dict[str, Any]) -> str:
    """Return the sentence and the gates of a parity result; modules outside layers are listed."""
    worst = detail.get("worst")
    shown = f"{worst:.1e}" if isinstance(worst, int | float) else "-"
    passed = '<b class="faster">passed</b>' if detail.get("passed") else '<b class="slower">failed</b>'
    what = f"{detail.get('case', 'the model')} on {labels.arm(arm)} and PyTorch"
    text = f"<p>{escape(what)} in float64: {passed}, worst relative difference of a module {escape(shown)}.</p>"
    gates = "".join(_gate(gate) for gate in detail.get("gates", []))
    head = '<thead><tr><th>gate</th><th></th><th>worst</th><th>limit</th><th class="left">where</th></tr></thead>'
    table = f'<div class="wide"><table>{head}<tbody>{gates}</tbody></table></div>' if gates else ""
    outside = [
        f"{entry['module']} {_error(entry.get('float64'))}"
        for entry in detail.get("layers", [])
        if entry.get("module") and not str(entry["module"]).startswith("layers.")
    ]
    note = f'<p class="soft">Outside the layers: {escape(", ".join(outside))}.</p>' if outside else ""
    return text + table + note


def _gate(gate: dict[str, Any]) -> str:
    style, word = ("faster", "passed") if gate.get("passed") else ("slower", "failed")
    what = escape(f"{gate.get('id', '')} {gate.get('what', '')}")
    return (
        f'<tr><td class="wrap">{what}</td><td><span class="{style}">{word}</span></td>'
        f"<td>{_error(gate.get('error'))}</td><td>{_error(gate.get('limit'))}</td>"
        f'<td class="left wrap">{escape(str(gate.get("where", "")))}</td></tr>'
    )


def _error(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, int | float) and value else "0" if value == 0 else "-"
