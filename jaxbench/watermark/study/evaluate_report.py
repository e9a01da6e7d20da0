"""Progress of an evaluation, and its results as JSON, CSV, HTML and a table on the terminal (S file)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jaxbench import outputs, terminal
from jaxbench.measure import environment
from jaxbench.watermark.study import evaluate_page, evaluate_summary
from jaxbench.watermark.study.evaluate_config import CLEAN, Evaluate


class Progress:
    """A bar over the stages; use it as a context."""

    def __init__(self, console: Any = None):
        """Make the bar on a rich console (unset: standard error)."""
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
        )
        self._bar = progress.Progress(*columns, console=console or terminal.console(stderr=True), transient=False)
        self._task: Any = None

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, total: int) -> None:
        """Say how many stages there are."""
        self._task = self._bar.add_task("evaluation", total=total)

    def stage(self, name: str, is_new: bool) -> None:
        """Count a stage; those found finished count too."""
        state = "" if is_new else " (kept)"
        self._bar.update(self._task, advance=1, description=f"{name}{state}"[:60].ljust(44))


def write(
    settings: Evaluate, material: Any, results: dict[str, Any], workdir: Path, *, console: Any = None
) -> dict[str, Any]:
    """Write results.json, results.csv and report.html, print the table, and return what results.json holds."""
    stored = outputs.read_json(workdir / "evaluate.json")
    content = {
        "config_id": stored["config_id"],
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "models": stored["models"],
        "data": {"source": material.source, "sha256": material.sha256, "human_texts": len(material.human)},
        "environment": environment.describe(threads=environment.usable_cores()),
        "settings": settings.model_dump(mode="json"),
        "summary": evaluate_summary.summarize(settings, results),
    }
    shown = {name: results["arms"][name]["show"] for name in settings.schemes}
    outputs.write_text(workdir / "results.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    rows = evaluate_summary.rows(content["summary"], content["config_id"])
    outputs.write_csv(workdir / "results.csv", rows, evaluate_summary.CSV_COLUMNS)
    outputs.write_text(workdir / "report.html", evaluate_page.render(content, shown))
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
    table.add_row("perplexity" + note, *("-" if value is None else f"{value:.2f}" for value in perplexities))
    console.print(table)
    console.print(f"{workdir / 'report.html'} (results.json, results.csv beside it)", markup=False, soft_wrap=True)


def _cell(rates: dict[str, dict], levels: list[str]) -> str:
    values = [rates[level]["value"] for level in levels]
    return " / ".join("-" if value is None else f"{100 * value:.0f}" for value in values)
