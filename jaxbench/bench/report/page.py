"""The report as one HTML page that opens offline: text, tables, and charts with plotly's script inside (S file)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from jaxbench.bench import labels, summary
from jaxbench.bench.report import contents, figures
from jaxbench.bench.report.contents import View
from jaxbench.bench.summary import Row

TABLE_METRICS = (
    "prefill_tokens_per_s", "decode_tokens_per_s", "train_tokens_per_s", "train_mfu", "train_mfu_causal",
    "first_token_s", "load_s", "compile_cold_s", "compile_warm_s", "peak_memory_bytes", "temp_bytes", "flops",
)  # fmt: skip
CSS = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f6f8fa; --line: #d8dee4; --text: #1f2328; --soft: #59636e;
  --grid: #e4e8ec; --good: #1a7f45; --bad: #c93a3a; --link: #0a58ca; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --card: #151b23; --line: #30363d; --text: #e6edf3;
  --soft: #9198a1; --grid: #262c36; --good: #4ac27b; --bad: #ff7b72; --link: #7ab7ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); line-height: 1.55;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 21px; margin: 52px 0 6px; padding-top: 18px; border-top: 1px solid var(--line); }
p { margin: 6px 0 14px; max-width: 76ch; } p.soft, .soft { color: var(--soft); }
nav { margin: 18px 0 0; display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 14px; }
a { color: var(--link); text-decoration: none; } a:hover { text-decoration: underline; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(215px, 1fr)); gap: 14px; margin: 26px 0 10px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; }
.card b { display: block; font-size: 25px; line-height: 1.2; letter-spacing: -0.01em; }
.card span { display: block; font-weight: 600; margin-top: 4px; } .card small { color: var(--soft); font-size: 13px; }
.wide { overflow-x: auto; margin: 10px 0 18px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 7px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--soft); white-space: nowrap; } td { white-space: nowrap; }
th:first-child, td:first-child, .left { text-align: left; } td.wrap { white-space: normal; }
tr.head td { font-weight: 600; background: var(--card); text-align: left; }
td small { display: block; color: var(--soft); font-size: 12px; } .faster { color: var(--good) !important; }
.slower { color: var(--bad) !important; } ul { padding-left: 20px; max-width: 84ch; } li { margin: 3px 0; }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, monospace; background: var(--card); padding: 2px 5px;
  border-radius: 5px; }
.chart { margin: 8px 0 4px; min-height: 120px; }
"""
SCRIPT = """
const shade = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function themed(figure) {
  const layout = structuredClone(figure.layout), text = shade('--text'), grid = shade('--grid');
  Object.assign(layout, {paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: {family: 'system-ui, -apple-system, Segoe UI, sans-serif', size: 13, color: text},
    hoverlabel: {font: {size: 13}}});
  for (const axis of ['xaxis', 'yaxis'])
    Object.assign(layout[axis], {gridcolor: grid, linecolor: grid, zerolinecolor: grid, fixedrange: true});
  if (figure.line) layout.shapes = [{type: 'line', xref: 'x', yref: 'paper', x0: figure.line, x1: figure.line, y0: 0,
    y1: 1, layer: 'below', line: {color: shade('--soft'), width: 1.5, dash: 'dot'}}];
  return layout;
}
function draw() {
  for (const [name, figure] of Object.entries(FIGURES))
    Plotly.react(name, figure.data, themed(figure), {displayModeBar: false, responsive: true});
}
draw();
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
"""


def render(view: View) -> str:
    """Return the page's text."""
    from plotly import offline

    charts: dict[str, figures.Figure] = {}
    parts = [part for section in _SECTIONS if (part := section(view, charts))]
    contents = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title in _contents(parts))
    data = json.dumps(charts, allow_nan=False).replace("</", "<\\/")
    bodies = "\n".join(body for _, _, body in parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(_title(view))}</title>\n<style>{CSS}</style></head>\n<body><main>\n"
        f"{_header(view)}<nav>{contents}</nav>\n{bodies}\n</main>\n"
        f"<script>{offline.get_plotlyjs()}</script>\n"
        f"<script>const FIGURES = {data};\n{SCRIPT}</script>\n</body></html>\n"
    )


def _contents(parts: Sequence[tuple[str, str, str]]) -> list[tuple[str, str]]:
    return [(name, title) for name, title, _ in parts]


def _title(view: View) -> str:
    model = "SmolLM2-135M-Instruct" if view.suite.model == "default" else view.suite.model
    return f"jaxbench: {model} on {', '.join(labels.arm(name) for name in view.arms) or 'no arm'}"


def _header(view: View) -> str:
    facts = view.environment
    when = max((record.time_utc for record in view.records), default="")
    parts = [str(facts[key]) for key in ("cpu", "platform") if facts.get(key)]
    parts += [f"{facts['threads']} threads"] if facts.get("threads") else []
    parts += [f"measured {when.replace('T', ' ').removesuffix('+00:00')} UTC"] if when else []
    cards = "".join(
        f'<div class="card"><b>{escape(figure)}</b><span>{escape(what)}</span><small>{escape(remark)}</small></div>'
        for figure, what, remark in contents.headline(view)
    )
    return (
        f'<h1>{escape(_title(view).removeprefix("jaxbench: "))}</h1><p class="soft">{escape(", ".join(parts))}. '
        f"Configuration <code>{escape(view.config_id or '-')}</code></p><div class='cards'>{cards}</div>\n"
    )


def _section(name: str, title: str, *bodies: str) -> tuple[str, str, str]:
    return name, title, f'<section id="{name}"><h2>{escape(title)}</h2>{"".join(bodies)}</section>'


def _chart(charts: dict, name: str, figure: figures.Figure | None) -> str:
    if figure is None:
        return ""
    charts[name] = figure
    return f'<div class="chart" id="{name}" style="min-height:{figure["layout"]["height"]}px"></div>'


def _items(sentences: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>" if sentences else ""


def _ratios(view: View, charts: dict) -> tuple[str, str, str] | None:
    chart = _chart(charts, "chart-ratios", figures.forest(view))
    if not chart:
        return None
    confidence = f"{100 * view.suite.verdicts.confidence:.0f} %"
    text = (
        "<p>Each point is the geometric mean over launches of an arm's rate over that of "
        f"{escape(labels.arm(view.baseline))}; the bar is its {confidence} interval over launches "
        "(fresh processes), left out where it is too wide to say anything. <b class='faster'>Faster</b> and "
        "<b class='slower'>slower</b> mean that the whole "
        "interval lies on one side; everything else is undecided.</p>"
    )
    return _section("ratios", "Which backend is faster where", text, chart)


def _table(view: View, charts: dict) -> tuple[str, str, str] | None:
    groups: dict[tuple, dict[str, Row]] = {}
    for row in contents.find(view, TABLE_METRICS):
        groups.setdefault((row.metric, row.workload), {})[row.arm] = row
    if not groups:
        return None
    lines, last = [], None
    for (metric, load), cells in groups.items():
        if metric != last:
            note = "" if metric not in summary.COMPARED else ", more is better" * summary.COMPARED[metric]
            title = escape(labels.METRICS.get(metric, metric) + note)
            lines.append(f'<tr class="head"><td colspan="{len(view.arms) + 1}">{title}</td></tr>')
        last = metric
        shown = labels.workload(load, with_kind=not metric.startswith(load.kind)) or "whole process"
        lines.append(f"<tr><td>{escape(shown)}</td>" + "".join(_cell(cells.get(name)) for name in view.arms) + "</tr>")
    head = "".join(f"<th>{escape(labels.arm(name))}</th>" for name in view.arms)
    table = (
        f'<div class="wide"><table><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )
    text = (
        f'<p class="soft">Medians over launches; below, the ratio to {escape(labels.arm(view.baseline))} with its '
        "interval, above 1 is better. A star marks verdicts that hold after Holm's correction over the whole table.</p>"
    )
    return _section("table", "All measurements", text, table, _items(contents.program_notes(view)))


def _cell(row: Row | None) -> str:
    if row is None:
        return "<td>-</td>"
    if row.value is None:
        return f'<td title="{escape(row.reason, quote=True)}">-<small>{escape(_short(row.reason))}</small></td>'
    note = ""
    if row.ratio:
        star = "*" if row.holm else ""
        note = f'<small class="{escape(row.verdict)}">{escape(labels.ratio(row.ratio))}{star}</small>'
    return f"<td>{escape(labels.value(row.value, row.unit))}{note}</td>"


def _short(reason: str) -> str:
    return reason if len(reason) <= 24 else reason[:22] + "…"


def _roofline(view: View, charts: dict) -> tuple[str, str, str] | None:
    chart = _chart(charts, "chart-roofline", figures.roofline(view))
    if not chart:
        return None
    rates = [
        f"{'read bandwidth' if record.workload.kind == 'read' else 'matrix products, ' + record.workload.dtype}: "
        f"{labels.value(record.value, record.unit)} (launch {record.launch})"
        for record in view.records
        if record.metric in ("read_bandwidth_bytes_per_s", "gemm_flops_per_s") and record.value
    ]
    text = (
        "<p>Decode against the read bandwidth, prefill and training against the matrix-product rate, both measured in "
        "the same run with the faster of XLA and PyTorch. The work counted is the least the model needs.</p>"
    )
    return _section("roofline", "Share of what the machine can do", text, chart, _items(rates))


def _startup(view: View, charts: dict) -> tuple[str, str, str] | None:
    metrics = ("load_s", "compile_cold_s", "compile_warm_s")
    chart = _chart(charts, "chart-startup", figures.seconds(view, metrics))
    return _section("startup", "Load and compile", chart) if chart else None


def _memory(view: View, charts: dict) -> tuple[str, str, str] | None:
    chart = _chart(charts, "chart-memory", figures.memory(view))
    text = "<p>Peak resident set above the level after imports, a fresh process for each arm and launch.</p>"
    return _section("memory", "Memory", text, chart) if chart else None


def _tpu(view: View, charts: dict) -> tuple[str, str, str] | None:
    rows = contents.tpu_rows(view)
    if not rows:
        return None
    from jaxbench.bench.report import page_proofs

    return _section("tpu", "On a TPU slice", *page_proofs.body(rows), _chart(charts, "chart-tpu", figures.tpu(view)))


def _parity(view: View, charts: dict) -> tuple[str, str, str] | None:
    if not view.parity:
        return None
    from jaxbench.bench.report import page_proofs

    parts = [
        page_proofs.parity(name, detail) + _chart(charts, f"chart-parity-{name}", figures.heat_map(detail))
        for name, detail in view.parity.items()
    ]
    agreed = "<p>Output of every arm:</p>" + _items(view.agreement) if view.agreement else ""
    return _section("parity", "Proof of equality", *parts, agreed)


def _open(view: View, charts: dict) -> tuple[str, str, str] | None:
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
    parts = ["<p><b>Undecided.</b> The interval holds 1:</p>" + _items(needs)] if needs else []
    parts += ["<p><b>Not measured.</b></p>" + _items(absent)] if absent else []
    return _section("open", "Undecided and not measured", *parts) if parts else None


def _settings(view: View, charts: dict) -> tuple[str, str, str]:
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
    lines = "".join(
        f'<tr><td>{escape(key)}</td><td class="left wrap">{escape(str(value))}</td></tr>'
        for key, value in about.items()
    )
    return _section(
        "settings", "Settings and environment", "<p>What every arm shares:</p>", _items(facts.get("settings", [])),
        f'<div class="wide"><table><tbody>{lines}</tbody></table></div>',
    )  # fmt: skip


_SECTIONS = (_ratios, _table, _roofline, _startup, _memory, _tpu, _parity, _open, _settings)
