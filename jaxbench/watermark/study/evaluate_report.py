"""Progress of an evaluation, and its results as JSON, CSV, a page and a table on the terminal (S file).

The page is the jinja2 template of the same name, inside the shell shared by all pages.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxbench import outputs, terminal
from jaxbench.measure import environment, page
from jaxbench.measure.page import Section
from jaxbench.watermark.study import evaluate_figures, evaluate_summary, evaluate_times
from jaxbench.watermark.study.evaluate_config import CLEAN, Evaluate

SECTIONS = {
    "tradeoff": "Detectability against quality", "power": "Detection", "robustness": "Robustness",
    "quality": "Quality", "spoofing": "Guessed keys and forged text", "tokens": "Token by token",
    "times": "From end to end", "settings": "Settings and environment",
}  # fmt: skip


@contextlib.contextmanager
def progress(total: int, console: Any = None) -> Iterator[Callable[[str, bool], None]]:
    """Draw a progress bar of stages on a rich console (unset: standard error); yield the callback (name, is_new)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console or terminal.console(stderr=True)) as bar:
        task = bar.add_task("evaluation", total=total)

        def count(name: str, is_new: bool) -> None:
            state = "" if is_new else " (kept)"
            bar.update(task, advance=1, description=f"{name}{state}"[:60].ljust(44))

        yield count


def write(
    settings: Evaluate, material: Any, results: dict[str, Any], workdir: Path, *, console: Any = None
) -> dict[str, Any]:
    """Write results.json, results.csv and report.html, print the table, and return what results.json holds."""
    stored = outputs.read_json(workdir / "evaluate.json")
    content = {
        "config_id": stored["config_id"],
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "models": stored["models"],
        "kernels": stored["kernels"],
        "data": {"source": material.source, "sha256": material.sha256, "human_texts": len(material.human)},
        "environment": environment.describe(threads=environment.usable_cores()),
        "settings": settings.model_dump(mode="json"),
        "summary": evaluate_summary.summarize(settings, results),
        "times": evaluate_times.table(workdir),
    }
    shown = {name: results["arms"][name]["show"] for name in settings.schemes}
    outputs.write_json(workdir / "results.json", content)
    rows = evaluate_summary.rows(content["summary"], content["config_id"])
    outputs.write_csv(workdir / "results.csv", rows, evaluate_summary.CSV_COLUMNS)
    outputs.write_text(workdir / "report.html", render(content, shown))
    show(content, workdir, console=console)
    return content


def show(content: dict[str, Any], workdir: Path, *, console: Any = None) -> None:
    """Print power, robustness and quality of each scheme."""
    from rich.table import Table

    console = console or terminal.console()
    levels = [str(fpr) for fpr in content["settings"]["detect"]["fprs"]]
    schemes = content["summary"]["schemes"]
    table = Table(title=f"Found at a false positive rate of {', '.join(levels)} (percent)")
    table.add_column("")
    for name in schemes:
        table.add_column(name, justify="right")
    for slug in next(iter(schemes.values()))["attacks"]:
        cells = [_cell(own["attacks"][slug]["tpr"], levels) for own in schemes.values()]
        label = next(iter(schemes.values()))["attacks"][slug]["label"]
        table.add_row(label, *cells, end_section=slug == CLEAN)
    table.add_section()
    unmarked = content["summary"]["unmarked"]["quality"]["perplexity"]
    note = "" if unmarked is None else f" (unmarked {unmarked:.2f})"
    perplexities = [own["quality"]["perplexity"] for own in schemes.values()]
    table.add_row("median perplexity" + note, *("-" if value is None else f"{value:.2f}" for value in perplexities))
    console.print(table)
    wanted, num_prompts = content["settings"]["generate"]["prompts"], content["summary"]["num_prompts"]
    if num_prompts < wanted:
        console.print(f"{wanted} texts continue {num_prompts} different prompts: intervals are those of as many texts")
    console.print(_times(content["times"]))
    console.print(f"{workdir / 'report.html'} (results.json, results.csv beside it)", markup=False, soft_wrap=True)


def _times(rows: list[dict[str, Any]]) -> Any:
    """Build the table of the time per kind of stage."""
    from rich.table import Table

    table = Table("stage", "seconds", "texts", "texts/s", title="From end to end")
    for row in rows:
        rate = "-" if row["texts_per_s"] is None else f"{row['texts_per_s']:,.3g}"
        table.add_row(row["stage"], f"{row['seconds']:,.1f}", f"{row['texts']:,}" if row["texts"] else "-", rate)
    return table


def _cell(rates: dict[str, dict], levels: list[str]) -> str:
    values = [rates[level]["value"] for level in levels]
    return " / ".join("-" if value is None else f"{100 * value:.0f}" for value in values)


# The page


def render(content: dict[str, Any], shown: dict[str, list[dict]]) -> str:
    """Render the page from the content of results.json, and from texts of each scheme with tokens and shades."""
    settings, summary = content["settings"], content["summary"]
    fprs = [str(fpr) for fpr in settings["detect"]["fprs"]]
    middle = fprs[len(fprs) // 2]  # of headline and heat map
    levels = [evaluate_figures.level_text(fpr) for fpr in fprs]
    charts = {
        "chart-pareto": evaluate_figures.pareto(summary), "chart-length": evaluate_figures.by_length(summary),
        "chart-roc": evaluate_figures.roc(summary), "chart-robustness": evaluate_figures.robustness(summary, middle),
    }  # fmt: skip
    spoofed = {name: own["spoof"] for name, own in summary["schemes"].items() if own["spoof"]}
    shown = {name: texts for name, texts in shown.items() if texts}
    is_there = {"spoofing": spoofed, "tokens": shown, "times": content.get("times")}
    filters = {
        "colour": _colour, "level": evaluate_figures.level_text, "number": _number, "percent": _percent,
        "short": lambda fpr: f"{float(fpr):g}",
    }  # fmt: skip
    title = f"Watermarks: {', '.join(summary['schemes'])}"
    return page.render(
        title, [Section(name, heading, bool(is_there.get(name, True))) for name, heading in SECTIONS.items()], charts,
        name=f"jaxbench: {title}", template=Path(__file__).with_suffix(".html"), filters=filters,
        content=content, shown=shown, spoofed=spoofed, middle=middle, levels=levels, zip=zip,
        settings=settings, summary=summary,
        found_at=[f"found at {level}" for level in levels],
        accepted_at=[f"forgeries accepted at {level}" for level in levels],
        arms=[("human", summary["human"]), ("unmarked", summary["unmarked"]), *summary["schemes"].items()],
        about=_about(content), whole=json.dumps(settings, indent=1),
    )  # fmt: skip


def _about(content: dict[str, Any]) -> dict[str, str]:
    facts = content["environment"]
    return {
        "command": content["command"],
        "configuration": content["config_id"],
        "commit": facts.get("commit") or "-",
        "processor": f"{facts.get('cpu', '-')}, {facts.get('cores', '-')} cores",
        "versions": ", ".join(f"{name} {number}" for name, number in facts.get("versions", {}).items()) or "-",
        "data": f"{content['data']['source']}, sha256 {content['data']['sha256']}",
        "models": ", ".join(f"{name}: sha256 {digest}" for name, digest in content["models"].items()),
    }


def _colour(shade: float) -> str:
    hue, strength = (140, 2 * shade - 1) if shade >= 0.5 else (0, 1 - 2 * shade)
    return f"hsla({hue},60%,45%,{0.45 * strength:.2f})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g} %"


def _number(value: float | None, digits: int, missing: str = "-") -> str:
    return missing if value is None else f"{value:.{digits}f}"
