"""Write and print the outcome of a comparison: tables, report.html, results.csv, TensorBoard scalars, picture.svg.

S file. Every file is written under a temporary name and renamed, so that an interrupt or a full disk leaves the earlier
report intact. Run it again on finished results with

    python -m jaxbench.bench.report --workdir=out/default
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxbench import outputs, terminal
from jaxbench.bench import labels, summary
from jaxbench.bench.report import contents, figures, page, picture
from jaxbench.bench.report.contents import View
from jaxbench.bench.suite import Suite
from jaxbench.measure import event_files
from jaxbench.measure.records import RESULTS_NAME, Record, RecordFile

CSV_COLUMNS = (
    "metric", "arm", "kind", "dtype", "batch", "prompt_tokens", "new_tokens", "device", "value", "unit", "ratio",
    "ratio_low", "ratio_high", "verdict", "p_value", "decidable_ratio", "launches", "share_of_roofline",
    "reason", "config_id",
)  # fmt: skip
TERMINAL_METRICS = tuple(name for name in page.TABLE_METRICS if name not in ("temp_bytes", "flops"))


def write(records: Sequence[Record], suite: Suite, workdir: Path, *, console=None) -> View:
    """Write every file of the report into `workdir`, print the tables, and return the view that they show.

    Raises:
      OSError: a file cannot be written; what was there before is kept.
    """
    view = contents.gather(records, suite, workdir)
    outputs.write_csv(workdir / "results.csv", csv_rows(view), CSV_COLUMNS)
    outputs.write_text(workdir / "report.html", page.render(view))
    outputs.write_text(workdir / "picture.svg", picture.draw(view))
    write_scalars(view, workdir / "tensorboard")
    console = console or terminal.console()
    show(view, console=console)
    line = f"{workdir / 'report.html'} (results.csv, picture.svg, tensorboard/ beside it)"
    console.print(line, markup=False, soft_wrap=True)
    return view


def csv_rows(view: View) -> list[dict[str, Any]]:
    """Return result rows and TPU figures for the CSV file, with numbers at full precision.

    Intervals that the tables show as a dash are written in full here, infinite ends included.
    """
    device = next((record.device for record in view.records if record.arm in view.arms), "")
    same = ("metric", "arm", "value", "unit", "verdict", "share_of_roofline", "reason")
    rows = []
    for row in view.rows:
        point, low, high = row.ratio or (None, None, None)
        about = {"device": device, "launches": len(row.launches), "config_id": view.config_id}
        about |= {"p_value": row.p_value, "decidable_ratio": row.decidable}
        about |= {"ratio": point, "ratio_low": low, "ratio_high": high}
        rows.append(row.workload.model_dump() | {name: getattr(row, name) for name in same} | about)
    same = ("metric", "arm", "device", "value", "unit", "reason", "config_id")
    return rows + [
        record.workload.model_dump() | {name: getattr(record, name) for name in same}
        for record in view.records
        if record.metric.startswith("tpu_")
    ]


def write_scalars(view: View, folder: Path) -> None:
    """Write one TensorBoard scalar per row and launch, and the TPU figures at step 0; replaces the folder."""
    with outputs.whole_folder(folder) as unfinished:
        with event_files.library().SummaryWriter(str(unfinished), write_to_disk=True) as writer:
            for row in view.rows:
                name = "/".join(part for part in (row.metric, row.workload.label().replace(" ", "_"), row.arm) if part)
                for launch, value in zip(row.numbers, row.launches, strict=True):
                    writer.add_scalar(name, value, launch)
            for record in view.records:
                if record.metric.startswith("tpu_") and record.value is not None:
                    place = f"{record.workload.label()} {record.device}".replace(" ", "_").replace(":", "-")
                    writer.add_scalar(f"{record.metric}/{place}", record.value, 0)
        shutil.rmtree(folder, ignore_errors=True)


def show(view: View, *, console=None) -> None:
    """Print the tables and notes to the terminal."""
    from rich import markup

    console = console or terminal.console()
    if contents.find(view, TERMINAL_METRICS):
        console.print(_measured_table(view))
    for name, detail in view.parity.items():
        color, word = ("green", "passed") if detail.get("passed") else ("red", "FAILED")
        worst = f"worst relative difference of a module {float(detail.get('worst', 'nan')):.1e}"
        console.print(
            f"{labels.arm(name)} against PyTorch in float64 [{color}]{word}[/{color}]: {worst}", highlight=False
        )
    for note in _missing_notes(view):
        console.print(note, highlight=False, markup=False)
    for note in contents.program_notes(view) + contents.product_notes(view):
        console.print(note)
    for note in contents.behind_notes(view) + contents.lost_launches(view) + contents.look_notes(view):
        console.print(f"[yellow]{markup.escape(note)}[/yellow]", highlight=False)
    for note in view.agreement:
        console.print(f"tokens, {note}")
    if contents.tpu_rows(view):
        console.print(_tpu_table(view))
    if slower := [row for row in view.rows if row.verdict == "slower" and row.metric in summary.SPEED]:
        console.print(f"[red]slower than {labels.arm(view.baseline)}[/red]: {'; '.join(map(page.row_name, slower))}")
    undecided = contents.undecided(view)
    if undecided:
        least = "behind ≥ stands the smallest ratio that these launches decide in nine of ten cases"
        console.print(f"[dim]{len(undecided)} rows are undecided; {least}[/dim]")
    if view.drift > view.suite.verdicts.control_drift:
        console.print(f"[yellow]the machine moved: the control loop changed by {100 * view.drift:.0f} %[/yellow]")


def _missing_notes(view: View) -> list[str]:
    """Return sentences on why cells of the table are empty, one for each arm and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in contents.missing(view):
        if row.metric in TERMINAL_METRICS:
            found.setdefault((row.arm, row.reason), []).append(figures.heading(row.metric, row.workload))
    shown = {key: names[0] + (f" and {len(names) - 1} more" if names[1:] else "") for key, names in found.items()}
    return [f"not measured: {labels.arm(arm)}, {names}: {reason}" for (arm, reason), names in shown.items()]


def _measured_table(view: View):
    from rich.table import Table

    counts = contents.verdict_counts(view)
    confidence = f"{100 * view.suite.verdicts.confidence:.0f} %"
    title = (
        f"Medians; ratios to {labels.arm(view.baseline)} (above 1 is better) with {confidence} intervals over launches"
    )
    shown = ", ".join(f"{count} {name}" for name, count in counts.items())
    table = Table(title=title, caption=f"JAX arms, speed rows: {shown}" if sum(counts.values()) else None)
    table.add_column("", no_wrap=True)
    for name in view.arms:
        table.add_column(labels.arm(name), justify="right")
    last = None
    for (metric, workload), rows in contents.by_workload(contents.find(view, TERMINAL_METRICS)).items():
        if last is not None and metric != last:
            table.add_section()
        last, cells = metric, {row.arm: row for row in rows}
        name = f"[bold]{labels.METRICS.get(metric, metric)}[/bold]\n{labels.short(workload)}"
        table.add_row(name, *(_terminal_cell(cells.get(arm)) for arm in view.arms))
    return table


def _terminal_cell(row: summary.Row | None) -> str:
    if row is None:
        return ""
    if row.value is None:
        return "[dim]not measured[/dim]"
    text = labels.percentiles(row.percentiles) or labels.value(row.value, row.unit)
    if not row.ratio:
        return text
    style = {"faster": "green", "slower": "red"}.get(row.verdict, "dim")
    shown = labels.judged(row.verdict, row.ratio, row.decidable).replace("[", r"\[")
    return f"{text}\n[{style}]{shown}[/{style}]"


def _tpu_table(view: View):
    from rich.table import Table

    table = Table(title="TPU slices, compiled ahead of time; per chip")
    for name in ("slice", "program", "bytes", "FLOPs", "sent to others", "least time", "bound"):
        table.add_column(name, justify="left" if name in ("slice", "program", "bound") else "right")
    for row in contents.tpu_rows(view):
        if "roofline_s" not in row.figures:
            table.add_row(row.topology, row.short, row.problem[:60], "", "", "", "")
            continue
        fits = "fits" if row.details["memory_bytes"]["fits"] else "[red]does not fit[/red]"
        share = row.figures.get("roofline_mfu")
        mfu = "" if share is None else f", MFU {100 * share:.1f} %"
        table.add_row(
            row.topology,
            row.short,
            f"{labels.value(row.figures['memory_bytes'], 'bytes')} {fits}",
            labels.value(row.figures["flops"], "FLOP"),
            labels.value(row.figures["collective_bytes"], "bytes"),
            labels.value(row.figures["roofline_s"], "s"),
            row.details["roofline_s"]["bound"] + mfu,
        )
    return table


def read_run(workdir: Path) -> tuple[list[Record], Suite]:
    """Return the records of the run that a folder's suite.json names, without those of other runs, and its suite.

    Raises:
      ValueError: there is no such run, or a file is damaged.
    """
    import pydantic

    from jaxbench.pretrained import safetensors_files

    settings = workdir / "suite.json"
    if not settings.exists():
        raise ValueError(f"report: {settings} does not exist; name the folder of a finished comparison with --workdir")
    stored = safetensors_files.read_json(settings)
    try:
        suite = Suite.model_validate(stored.get("suite"))
    except pydantic.ValidationError as error:
        raise ValueError(f"report: {settings} holds no suite ({str(error).splitlines()[0]})") from error
    # Records written before run_id existed have none; their config_id tells them apart.
    results, run_id, config_id = workdir / RESULTS_NAME, stored.get("run_id", ""), stored.get("config_id")
    everything = RecordFile(results).read()
    records = [record for record in everything if (record.run_id, record.config_id) == (run_id, config_id)]
    if not records:  # a report of nothing would replace results.csv, perhaps all that was kept of the run
        held = f"has {len(everything)} records, none" if results.exists() else "is not there, nothing"
        raise ValueError(
            f"report: {results} {held} of the run of suite.json (run_id={run_id!r}, config_id={config_id!r}); "
            "put its records there"
        )
    return records, suite
