"""The report as one HTML page that opens offline: the text and tables of its sections (S file)."""

from __future__ import annotations

from markupsafe import Markup

from jaxbench.bench import labels, summary
from jaxbench.bench.report import contents, figures, page_proofs
from jaxbench.bench.report.contents import View
from jaxbench.bench.summary import Row
from jaxbench.measure import page
from jaxbench.measure.page import Section

TABLE_METRICS = (
    "prefill_tokens_per_s", "decode_tokens_per_s", "train_tokens_per_s", "train_mfu", "train_mfu_causal",
    "first_token_s", "load_s", "compile_cold_s", "compile_warm_s", "peak_memory_bytes", "temp_bytes", "flops",
)  # fmt: skip


def render(view: View) -> str:
    """The whole page."""
    charts: dict[str, page.Figure] = {}
    sections = [section for make in _SECTIONS if (section := make(view, charts))]
    model = "SmolLM2-135M-Instruct" if view.suite.model == "default" else view.suite.model
    title = f"{model} on {', '.join(labels.arm(name) for name in view.arms) or 'no arm'}"
    return page.render(title, _lead(view), sections, charts, name=f"jaxbench: {title}")


def _lead(view: View) -> Markup:
    facts = view.environment
    when = max((record.time_utc for record in view.records), default="")
    parts = [str(facts[key]) for key in ("cpu", "platform") if facts.get(key)]
    parts += [f"{facts['threads']} threads"] if facts.get("threads") else []
    parts += [f"measured {when.replace('T', ' ').removesuffix('+00:00')} UTC"] if when else []
    line = Markup('<p class="soft">{}. Configuration <code>{}</code></p>')
    return line.format(", ".join(parts), view.config_id or "-") + page.cards(contents.headline(view))


def _chart(charts: dict, name: str, figure: page.Figure | None) -> Markup:
    if figure is None:
        return Markup("")
    charts[name] = figure
    return page.chart(name, figure)


def _ratios(view: View, charts: dict) -> Section | None:
    chart = _chart(charts, "chart-ratios", figures.forest(view))
    if not chart:
        return None
    text = Markup(
        "<p>Each point is the geometric mean over launches of an arm's rate over that of {}; the bar is its {} "
        "interval over launches (fresh processes), left out where it is too wide to say anything. "
        "<b class='faster'>Faster</b> and <b class='slower'>slower</b> mean that the whole interval lies on one side; "
        "everything else is undecided.</p>"
    ).format(labels.arm(view.baseline), f"{100 * view.suite.verdicts.confidence:.0f} %")
    return Section("ratios", "Which backend is faster where", text + chart)


def _table(view: View, charts: dict) -> Section | None:
    groups: dict[tuple, dict[str, Row]] = {}
    for row in contents.find(view, TABLE_METRICS):
        groups.setdefault((row.metric, row.workload), {})[row.arm] = row
    if not groups:
        return None
    lines, last = [], None
    for (metric, load), cells in groups.items():
        if metric != last:
            better = "" if metric not in summary.COMPARED else ", more is better" * summary.COMPARED[metric]
            lines.append(page.Group(labels.METRICS.get(metric, metric) + better))
        last = metric
        shown = labels.workload(load, with_kind=not metric.startswith(load.kind)) or "whole process"
        lines.append((shown, *(_cell(cells.get(name)) for name in view.arms)))
    text = Markup(
        '<p class="soft">Medians over launches; below, the ratio to {} with its interval, above 1 is better. A star '
        "marks verdicts that hold after Holm's correction over the whole table.</p>"
    ).format(labels.arm(view.baseline))
    table = page.table(("", *(labels.arm(name) for name in view.arms)), lines)
    return Section("table", "All measurements", text + table + page.items(contents.program_notes(view)))


def _cell(row: Row | None) -> Markup | str:
    if row is None:
        return "-"
    if row.value is None:
        short = row.reason if len(row.reason) <= 24 else row.reason[:22] + "…"
        return page.cell("-" + page.note(short), hint=row.reason)
    below = page.note(labels.ratio(row.ratio) + "*" * row.holm, row.verdict) if row.ratio else Markup("")
    return labels.value(row.value, row.unit) + below


def _roofline(view: View, charts: dict) -> Section | None:
    chart = _chart(charts, "chart-roofline", figures.roofline(view))
    if not chart:
        return None
    rates = [
        f"{'read bandwidth' if record.workload.kind == 'read' else 'matrix products, ' + record.workload.dtype}: "
        f"{labels.value(record.value, record.unit)} (launch {record.launch})"
        for record in view.records
        if record.metric in ("read_bandwidth_bytes_per_s", "gemm_flops_per_s") and record.value
    ]
    text = Markup(
        "<p>Decode against the read bandwidth, prefill and training against the matrix-product rate, both measured in "
        "the same run with the faster of XLA and PyTorch. The work counted is the least the model needs.</p>"
    )
    return Section("roofline", "Share of what the machine can do", text + chart + page.items(rates))


def _startup(view: View, charts: dict) -> Section | None:
    metrics = ("load_s", "compile_cold_s", "compile_warm_s")
    chart = _chart(charts, "chart-startup", figures.seconds(view, metrics))
    return Section("startup", "Load and compile", chart) if chart else None


def _memory(view: View, charts: dict) -> Section | None:
    chart = _chart(charts, "chart-memory", figures.memory(view))
    text = Markup("<p>Peak resident set above the level after imports, a fresh process for each arm and launch.</p>")
    return Section("memory", "Memory", text + chart) if chart else None


def _tpu(view: View, charts: dict) -> Section | None:
    rows = contents.tpu_rows(view)
    if not rows:
        return None
    chart = _chart(charts, "chart-tpu", figures.tpu(view))
    return Section("tpu", "On a TPU slice", page_proofs.tpu(rows) + chart)


def _parity(view: View, charts: dict) -> Section | None:
    if not view.parity:
        return None
    body = Markup("")
    for name, detail in view.parity.items():
        body += page_proofs.parity(name, detail) + _chart(charts, f"chart-parity-{name}", figures.heat_map(detail))
    if view.agreement:
        body += Markup("<p>Output of every arm:</p>") + page.items(view.agreement)
    return Section("parity", "Proof of equality", body)


def _open(view: View, charts: dict) -> Section | None:
    needs = [
        f"{figures.heading(row.metric, row.workload)}, {labels.arm(row.arm)}: {labels.ratio(row.ratio)}"
        + (f", about {row.launches_needed} launches would decide" if row.launches_needed else "")
        + (", one launch has no interval" if len(row.log_ratios) == 1 else "")
        for row in contents.undecided(view)
    ]
    absent = [
        f"{figures.heading(row.metric, row.workload)}, {labels.arm(row.arm)}: {row.reason}"
        for row in contents.missing(view)
    ]
    absent += [
        f"{record.metric}, {labels.arm(record.arm)}: {record.reason}"
        for record in view.records
        if record.metric in ("parity", "profile") and record.status == "error"
    ]
    body = Markup("<p><b>Undecided.</b> The interval holds 1:</p>") + page.items(needs) if needs else Markup("")
    body += Markup("<p><b>Not measured.</b></p>") + page.items(absent) if absent else Markup("")
    return Section("open", "Undecided and not measured", body) if body else None


def _settings(view: View, charts: dict) -> Section:
    facts = view.environment
    versions = ", ".join(f"{name} {number}" for name, number in facts.get("versions", {}).items())
    about = {
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
    shared = Markup("<p>What every arm shares:</p>") + page.items(facts.get("settings", []))
    return Section("settings", "Settings and environment", shared + page.facts(about))


_SECTIONS = (_ratios, _table, _roofline, _startup, _memory, _tpu, _parity, _open, _settings)
