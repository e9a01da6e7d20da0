"""Turn records of the watermark benchmark into tables: terminal, JSON, CSV, HTML (S file)."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench import outputs, terminal
from jaxbench.measure import verdicts

ANY = None
# (part, schemes or ANY, texts per second to reach on one core)
RATE_BARS = (
    ("ids", ("kgw", "gumbel", "unigram"), 50_000.0),
    ("text", ("kgw", "gumbel", "unigram"), 3_000.0),
    ("identify", ANY, 5_000.0),
    ("neural", ANY, 2_000.0),
)


class Pair(NamedTuple):
    """A comparison with a peer in the same launches: jaxbench's scheme and the peer's, and the ratio to reach."""

    scheme: str
    peer: str
    peer_scheme: str
    part: str
    bar: float | None


PAIRS = (
    Pair("kgw", "markllm", "KGW", "text", 80.0),
    Pair("kgw", "markllm", "KGW", "ids", 1000.0),
    Pair("kgw_markllm", "markllm", "KGW", "text", 80.0),
    Pair("kgw_markllm", "markllm", "KGW", "ids", 1000.0),
    Pair("unigram", "markllm", "Unigram", "text", 1.8),
    Pair("unigram", "markllm", "Unigram", "ids", None),
    Pair("kgw", "transformers", "transformers", "text", None),
    Pair("kgw_transformers", "transformers", "transformers", "ids", None),
)


class Shown(NamedTuple):
    """Layout of a table: the cells of a summary row, and the figure that is compared with a bar."""

    title: str
    cells: dict[str, str]  # heading -> format of the cell; `between` is the interval
    figure: str = ""
    bar: str = ""  # format of the bar
    is_limit: bool = False  # True: the bar is an upper limit


SHOWN = {
    "rates": Shown(
        "Detection, texts a second on one core",
        {
            "engine": "{arm}", "scheme": "{scheme}", "part": "{part}", "texts a call": "{batch_size:,}",
            "texts/s": "{texts_per_s:,.0f}{between}", "texts/cpu-s": "{texts_per_cpu_s:,.0f}", "wanted": "{wanted}",
            "peak memory": "{peak}",
        },
        "texts_per_s", ",.0f",
    ),
    "memory": Shown(
        "Detection, memory of a process that does this and nothing else",
        {
            "engine": "{arm}", "scheme": "{scheme}", "part": "{part}", "texts a call": "{batch_size:,}",
            "peak memory": "{peak}", "before the detector": "{held_mb:,.0f} MB", "a later call": "{steady_mb:,.0f} MB",
        },
    ),
    "ratios": Shown(
        "Against peers in the same run",
        {
            "engine": "{arm}", "scheme": "{scheme}", "peer": "{peer}", "part": "{part}",
            "ratio": "{ratio:,.3g}{between}", "wanted": "{wanted}",
        },
        "ratio", "g",
    ),
    "overhead": Shown(
        "What a watermark adds to a decode step",
        {
            "scheme": "{scheme}", "batch": "{batch_size}", "plain step": "{plain_step_ms:.2f} ms",
            "added": "{added_ms:.3f} ms", "share": "{overhead:.2%}", "wanted": "{wanted}",
            "end to end": "{end_to_end:+.1%} [{end_to_end_low:+.1%}, {end_to_end_high:+.1%}]",
        },
        "overhead", ".0%", is_limit=True,
    ),
    "throughput": Shown(
        "Whole calls of generation, the prompt included",
        {
            "scheme": "{scheme}", "batch": "{batch_size}", "new tokens": "{new_tokens}",
            "tokens/s": "{tokens_per_s:,.1f}{between}", "peak memory of all": "{peak_mb:,.0f} MB",
            "of unmarked": "{ratio:.3f} [{ratio_low:.3f}, {ratio_high:.3f}]",
        },
    ),
    "verdicts": Shown("Texts marked with the same lists: what both detectors say", {}),
}  # fmt: skip


def label(scheme: dict) -> str:
    """Return a short name of a scheme's configuration, e.g. `kgw-min4` or `gumbel-vllm-left4`."""
    if "scheme" not in scheme:
        return scheme.get("algorithm_name", "transformers")
    parts = [scheme["scheme"]]
    if scheme.get("prf") == "vllm":
        parts.append("vllm")
    if scheme.get("dual_key_alpha"):
        parts.append("dual")
    if context := scheme.get("context"):
        parts.append(f"{context['kind']}{context['width']}")
    if scheme.get("payload_bits"):
        parts.append(f"payload{scheme['payload_bits']}")
    if scheme["scheme"] == "kgw_markllm":
        parts.append(f"{scheme['f_scheme']}{scheme['prefix_length']}")
    return "-".join(parts)


def overhead_bar(scheme: dict) -> float | None:
    """Return the share of a plain step that a watermark may add, None if no bar is set."""
    kind = (scheme.get("context") or {}).get("kind")
    if scheme["scheme"] == "synthid":
        return 0.05
    if scheme["scheme"] == "kgw" and kind == "self":
        return 0.10
    return 0.02 if scheme["scheme"] in ("kgw", "gumbel", "unigram") and kind in (None, "left", "min") else None


def summarise(records: Sequence[dict], settings: dict, about: dict) -> dict[str, Any]:
    """Compute rates, ratios to peers, overheads, throughputs and verdicts as plain JSON."""
    detection = [row for row in records if row["kind"] == "detection"]
    table = _launch_rates(detection, "seconds")
    main = ((settings.get("detection") or {}).get("engines") or ["jax"])[0]  # the engine that the bars apply to
    memory = [_memory(row) for row in records if row["kind"] == "memory"]
    tokenizers = sorted({row["tokenizer"] for row in detection if "tokenizer" in row})
    return {
        "about": about | {"tokenizers": tokenizers},
        "settings": settings,
        "rates": _with_memory(_rates(table, _launch_rates(detection, "cpu_seconds"), main), memory),
        "memory": memory,
        "ratios": _ratios(table, main),
        "overhead": [_overhead(row) for row in records if row["kind"] == "generation"],
        "throughput": [_throughput(row) for row in records if row["kind"] == "throughput"],
        "verdicts": _verdicts([row for row in records if row["kind"] == "verdict"]),
    }


def write(summary: dict[str, Any], workdir: Path) -> None:
    """Write summary.json, benchmark.csv and report.html, each atomically, and print the tables."""
    from rich.console import Console

    outputs.write_json(workdir / "summary.json", summary)
    rows = [{"table": name, **row} for name in SHOWN for row in summary[name]]
    outputs.write_csv(workdir / "benchmark.csv", rows, () if rows else ("table",))
    page = Console(record=True, width=140, file=io.StringIO())
    screen = terminal.console()
    for table in tables(summary):
        screen.print(table)
        page.print(table)
    outputs.write_text(workdir / "report.html", page.export_html())


def tables(summary: dict[str, Any]) -> list[Any]:
    """Return the tables of the report as rich renderables."""
    named = [(of.title, [_cells(row, of) for row in summary[name]]) for name, of in SHOWN.items()]
    shown = [_table(title, rows) for title, rows in named if rows]
    if summary["about"].get("tokenizers"):
        shown.append(f"jaxbench splits text with {', '.join(summary['about']['tokenizers'])}, peers with tokenizers")
    return shown + [f"{peer} was left out: {why}" for peer, why in summary["about"].get("missing", {}).items()]


# Numbers


def _launch_rates(records: Sequence[dict], field: str) -> dict[tuple, dict[int, float]]:
    """Return texts per second of each (arm, scheme, kind of scheme, part, batch size) and launch."""
    samples: dict[tuple, dict[int, list[float]]] = {}
    for row in records:
        case = row["case"]
        batch_size = case.get("batch_size", 1)
        name = (row["arm"], label(case["scheme"]), case["scheme"].get("scheme", ""), case["part"], batch_size)
        rates = [row["texts"] / seconds for seconds in row[field] if seconds > 0]
        samples.setdefault(name, {}).setdefault(row["launch"], []).extend(rates)
    return {
        name: {number: verdicts.median(rates) for number, rates in launches.items() if rates}
        for name, launches in samples.items()
    }


def _rates(table: dict[tuple, dict[int, float]], cpu: dict[tuple, dict[int, float]], main: str) -> list[dict]:
    rows = []
    for name, launches in table.items():
        arm, scheme, kind, part, batch_size = name
        point, low, high = _interval(launches.values())
        is_judged = arm == main and batch_size >= 64
        bar = next((b for p, kinds, b in RATE_BARS if p == part and (kinds is ANY or kind in kinds)), None)
        rows.append({
            "arm": arm, "scheme": scheme, "part": part, "batch_size": batch_size, "texts_per_s": point, "low": low,
            "high": high, "texts_per_cpu_s": _interval(cpu[name].values())[0], "bar": bar if is_judged else None,
        })  # fmt: skip
    return sorted(rows, key=lambda row: (row["arm"], row["part"], row["scheme"], row["batch_size"]))


def _memory(record: dict) -> dict:
    """Return a case's memory in MB: the process's peak, what it held before the detector, a later call's peak."""
    case = record["case"]
    sizes = {f"{name}_mb": record[f"{name}_bytes"] / 1e6 for name in ("peak", "held", "steady")}
    about = {"part": case["part"], "batch_size": case["batch_size"]}
    return {"arm": record["arm"], "scheme": label(case["scheme"]), **about, **sizes}


def _with_memory(rates: list[dict], memory: list[dict]) -> list[dict]:
    """Add the peak memory of the same case to each rate, None where that was not measured."""
    names = ("arm", "scheme", "part", "batch_size")
    found = {tuple(row[name] for name in names): row["peak_mb"] for row in memory}
    return [row | {"peak_mb": found.get(tuple(row[name] for name in names))} for row in rates]


def _ratios(table: dict[tuple, dict[int, float]], main: str) -> list[dict]:
    """Return every engine's ratio to a peer: the t-interval over launches of the log ratio of their rates."""
    rows = []
    for pair in PAIRS:
        peer = next((row for name, row in table.items() if name[:2] + name[3:4] == pair[1:4]), None)
        versus = f"{pair.peer} {pair.peer_scheme}" if pair.peer == "markllm" else "transformers WatermarkDetector"
        for name, launches in table.items():
            arm, scheme, kind, part, batch_size = name
            is_whole = batch_size == max(other[4] for other in table if other[:4] == name[:4])
            is_ours = arm not in ("markllm", "transformers") and (kind, part) == (pair.scheme, pair.part)
            if peer is None or not is_ours or not is_whole:
                continue
            point, low, high = _interval([launches[n] / peer[n] for n in sorted(set(launches) & set(peer))])
            rows.append({
                "arm": arm, "scheme": scheme, "peer": versus, "part": part, "ratio": point, "low": low, "high": high,
                "bar": pair.bar if arm == main else None,
            })  # fmt: skip
    return rows


def _interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Return point, low and high of a rate or a ratio over its replications (launches, pairs or rounds)."""
    return verdicts.t_interval([math.log(value) for value in values]).ratio()


def _overhead(record: dict) -> dict:
    """Compute the time that a watermark adds to a step, isolated and end to end.

    End to end, the unit of replication is a pair of consecutive decode calls, plain and marked.
    """
    plain, pairs = verdicts.median(record["plain_step"]), zip(record["marked_loop"], record["plain_loop"])
    added = verdicts.median([marked - alone for marked, alone in pairs])
    point, low, high = _interval(marked / alone for marked, alone in zip(record["marked_step"], record["plain_step"]))
    return {
        "scheme": label(record["scheme"]),
        "batch_size": record["batch_size"],
        "plain_step_ms": 1e3 * plain,
        "added_ms": 1e3 * added,
        "overhead": added / plain,
        "bar": overhead_bar(record["scheme"]),
        "end_to_end": point - 1,
        "end_to_end_low": low - 1,
        "end_to_end_high": high - 1,
    }


def _throughput(record: dict) -> dict:
    """Compute tokens per second of whole calls; the ratio's unit of replication is a round, which calls each scheme."""
    tokens = record["batch_size"] * record["new_tokens"]
    point, low, high = _interval(tokens / seconds for seconds in record["seconds"])
    ratio, ratio_low, ratio_high = _interval(a / b for a, b in zip(record["plain"], record["seconds"], strict=True))
    return {
        "scheme": label(record["scheme"]),
        "batch_size": record["batch_size"], "new_tokens": record["new_tokens"], "tokens_per_s": point, "low": low,
        "high": high, "ratio": ratio, "ratio_low": ratio_low, "ratio_high": ratio_high, "peak_mb": record["rss"] / 1e6,
    }  # fmt: skip


def _verdicts(records: Sequence[dict]) -> list[dict]:
    """Return one row per author: texts, those with equal counts, and each side's verdicts."""
    found = [row for row in records if "missing" not in row]
    summary = []
    for author in dict.fromkeys(row["author"] for row in found):
        rows = [row for row in found if row["author"] == author]
        equal = [all(row["ours"][name] == row["theirs"][name] for name in ("green", "scored")) for row in rows]
        summary.append(
            {
                "written by": author,
                "texts": len(rows),
                "equal counts": sum(equal),
                "MarkLLM: z > 4": sum(row["theirs"]["is_marked"] for row in rows),
                "jaxbench: z > 4": sum(row["ours"]["z"] > 4.0 for row in rows),
                "jaxbench: p < 1e-3": sum(row["ours"]["p_value"] < 1e-3 for row in rows),
            }
        )
    return summary


# Text


def _cells(row: dict[str, Any], shown: Shown) -> dict[str, Any]:
    if not shown.cells:
        return row
    bar, is_bounded = row.get("bar"), math.isfinite(row.get("high", math.inf))
    between = f" [{row['low']:,.3g}, {row['high']:,.3g}]" if is_bounded else ""
    peak = "" if row.get("peak_mb") is None else f"{row['peak_mb']:,.0f} MB"
    wanted = ""
    if bar is not None:
        is_reached = row[shown.figure] <= bar if shown.is_limit else row[shown.figure] >= bar
        is_open = not shown.is_limit and row["low"] < bar <= row["high"]  # the share of a step has no interval
        wanted = f"{bar:{shown.bar}} {'reached' if is_reached else 'MISSED'}{', not by the interval' * is_open}"
    return {name: form.format(**row, between=between, wanted=wanted, peak=peak) for name, form in shown.cells.items()}


def _table(title: str, rows: list[dict]) -> Any:
    """Build a rich table from dictionaries with equal keys."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    names = [name for name in rows[0] if any(row[name] != "" for row in rows)]  # a column without a figure is left out
    for name in names:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(str(row[name]) for name in names))
    return table
