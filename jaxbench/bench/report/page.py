"""The report as one HTML page that opens offline: values for the jinja2 template page.html next to it (S file)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxbench.bench import labels, summary
from jaxbench.bench.report import contents, figures
from jaxbench.bench.report.contents import View
from jaxbench.bench.summary import Row
from jaxbench.measure import page
from jaxbench.measure.page import Section

TABLE_METRICS = tuple(name for name in labels.METRICS if name != "argument_bytes")


def render(view: View) -> str:
    """Render the whole page."""
    drawn = {
        "chart-ratios": figures.forest(view),
        "chart-roofline": figures.roofline(view),
        "chart-startup": figures.seconds(view, ("load_s", "compile_cold_s", "compile_warm_s")),
        "chart-memory": figures.memory(view),
        "chart-tpu": figures.tpu(view),
    } | {f"chart-parity-{arm}": figures.heat_map(detail) for arm, detail in view.parity.items()}
    drawn = {name: figure for name, figure in drawn.items() if figure}
    undecided, missing, table, slices = contents.undecided(view), contents.missing(view), _table(view), _slices(view)
    lost = contents.lost_launches(view)
    broken = [r for r in view.records if r.metric in ("parity", "profile") and r.status == "error"]
    rates = [r for r in view.records if r.metric in ("read_bandwidth_bytes_per_s", "gemm_flops_per_s") and r.value]
    sections = (
        Section("ratios", "Which backend is faster where", "chart-ratios" in drawn),
        Section("table", "All measurements", bool(table)),
        Section("roofline", "Share of what the machine can do", "chart-roofline" in drawn),
        Section("startup", "Load and compile", "chart-startup" in drawn),
        Section("memory", "Memory", "chart-memory" in drawn),
        Section("tpu", "On a TPU slice", bool(slices)),
        Section("parity", "Proof of equality", bool(view.parity)),
        Section("open", "Undecided and not measured", bool(undecided or missing or broken or lost)),
        Section("settings", "Settings and environment"),
    )
    title = f"{view.model} on {', '.join(map(labels.arm, view.arms)) or 'no arm'}"
    filters = {
        "arm": labels.arm, "value": labels.value, "ratio": labels.ratio, "significant": labels.significant,
        "percentiles": labels.percentiles, "error": _error, "outside": _outside, "row": row_name,
        "judged": lambda row: labels.judged(row.verdict, row.ratio, row.decidable),
        "short": lambda reason: reason if len(reason) <= 24 else reason[:22] + "…",
    }  # fmt: skip
    return page.render(
        title, sections, drawn, name=f"jaxbench: {title}", template=Path(__file__).with_suffix(".html"),
        filters=filters, view=view, where=_where(view), cards=contents.headline(view), table=table,
        notes=contents.program_notes(view) + contents.product_notes(view),
        rates=rates, slices=slices, sources=_sources(slices),
        undecided=undecided, missing=missing, broken=broken, lost=lost, looks=contents.look_notes(view),
        behind=contents.behind_notes(view),
        about=_about(view),
    )  # fmt: skip


def _where(view: View) -> str:
    facts = view.environment
    when = max((record.time_utc for record in view.records), default="")
    parts = [str(facts[key]) for key in ("cpu", "platform") if facts.get(key)]
    parts += [f"{facts['threads']} threads"] if facts.get("threads") else []
    parts += [f"measured {when.replace('T', ' ').removesuffix('+00:00')} UTC"] if when else []
    return ", ".join(parts)


def _table(view: View) -> dict[str, dict[str, dict[str, Row]]]:
    """Group rows by title of the metric, name of the workload and arm."""
    table: dict[str, dict[str, dict[str, Row]]] = {}
    for row in contents.find(view, TABLE_METRICS):
        better = ", more is better" * summary.COMPARED.get(row.metric, False)
        name = labels.full(row.workload, with_kind=not row.metric.startswith(row.workload.kind))
        lines = table.setdefault(labels.METRICS.get(row.metric, row.metric) + better, {})
        lines.setdefault(name or "whole process", {})[row.arm] = row
    return table


def _slices(view: View) -> dict[str, list[contents.TpuRow]]:
    slices: dict[str, list[contents.TpuRow]] = {}
    for row in contents.tpu_rows(view):
        slices.setdefault(row.topology, []).append(row)
    return slices


def _sources(slices: dict[str, list[contents.TpuRow]]) -> list[str]:
    details = [row.details["roofline_s"] for rows in slices.values() for row in rows if "roofline_s" in row.details]
    return list(dict.fromkeys(f"{detail['chip']}: {detail['source']}" for detail in details if detail))


def row_name(row: Row) -> str:
    """Display name of a row: metric, workload, arm."""
    return f"{figures.heading(row.metric, row.workload)}, {labels.arm(row.arm)}"


def _about(view: View) -> dict[str, Any]:
    facts = view.environment
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    return {
        "processor": f"{facts.get('cpu', '-')}, {facts.get('cores', '-')} cores",
        "memory": labels.value(facts.get("memory_bytes"), "bytes"),
        "system": facts.get("platform", "-"),
        "versions": versions or "-",
        "commit": facts.get("commit", "-"),
        "host": facts.get("host", "-"),
        "load average at start": ", ".join(f"{load:.2f}" for load in facts.get("load_average", [])) or "-",
        "control loop": f"moved by {100 * view.drift:.0f} % between launches"
        + (": judge with care" if view.drift > view.suite.verdicts.control_drift else ""),
        "model sha256": next((r.model_sha256 for r in view.records if r.model_sha256), "-"),
        "text sha256": next((r.text_sha256 for r in view.records if r.text_sha256), "-"),
    }


def _outside(detail: dict[str, Any]) -> Sequence[str]:
    """Return the errors of modules outside the layers, as text."""
    return [
        f"{entry['module']} {_error(entry.get('float64'))}"
        for entry in detail.get("layers", [])
        if entry.get("module") and not str(entry["module"]).startswith("layers.")
    ]


def _error(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, int | float) and value else "0" if value == 0 else "-"
