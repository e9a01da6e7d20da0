"""The commands `benchmarks.py history ...`: manage the stored runs (S file)."""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from absl import flags

from jaxbench import cli, outputs, terminal
from jaxbench.regress import remote_copy
from jaxbench.regress.alerts import Book
from jaxbench.regress.history import EVENTS, Copied, History
from jaxbench.regress.run_file import read

ABOUT = "The runs that are kept: list, show, trend, import, export, table, tag, prune, backup, restore, verify."
VALUES = flags.FLAGS


def define_folder() -> None:
    """Define --history."""
    flags.DEFINE_string("history", "out/history", "folder of the runs that are kept")


def folder() -> History:
    """Return the history that --history names."""
    return History(Path(VALUES.history))


def list_() -> int:
    """List the runs, oldest first."""
    import rich.table

    identity = rich.table.Column("run", overflow="fold", min_width=25)  # the id that other commands take
    table = rich.table.Table(identity, "time", "head", "base", "machine", "device", "tag")
    history = folder()
    rows = history.list()
    for row in rows:
        table.add_row(row.id, row.time_utc, row.head, row.base, row.host, row.device, row.tag)
    terminal.console().print(table)
    total = len(history.files())
    if damaged := total - len(rows):
        print(f"{damaged} of {total} run files cannot be read: see history verify")
    return cli.EXIT_OK


def _define_named() -> None:
    define_folder()
    flags.DEFINE_string("run", None, "its id or the beginning of it, its tag, or latest", required=True)


def show() -> int:
    """Show a run."""
    from jaxbench.regress import report

    record = folder().load(VALUES.run)
    terminal.console().print(report.table(record))
    if (limits := report.limits_table(record)) is not None:
        terminal.console().print(limits)
    print(report.summary(record))
    said = report.worth(record) if record["findings"] else []
    for line in report.explanation(record) + said + record["notes"]:
        print(line)
    return cli.EXIT_OK


def define_trend() -> None:
    """Define the flags of history trend."""
    define_folder()
    cli.define_device()
    flags.DEFINE_string("series", None, "case.metric, such as decode.tokens_per_s", required=True)
    flags.DEFINE_string("host", None, "fingerprint of a machine; unset: this one")


def trend() -> int:
    """Show a series on one machine over the runs, and where it changed."""
    from jaxbench.measure import environment
    from jaxbench.regress import change_points, metrics, report

    history, host = folder(), VALUES.host or environment.fingerprint()
    points = history.points(VALUES.series, host=host, device=VALUES.device)
    if not points:
        metrics.metric_of(VALUES.series)
        raise ValueError(
            f"--series={VALUES.series}: no run of machine {host} on {VALUES.device} in {VALUES.history} has it"
        )
    metric = metrics.of_run(history.load(points[-1].run), VALUES.series)
    unit, counted = metric.unit, metric.kind == "exact"
    for work in dict.fromkeys(point.work for point in points):  # a changed case is a different series
        mine = [point for point in points if point.work == work]
        found = change_points.change_points([point.median for point in mine], counted=counted)
        changes = {each.index: each for each in found}
        print(f"case {work}, {len(mine)} runs")
        for index, point in enumerate(mine):
            said = ""
            if (change := changes.get(index)) is not None:
                said = (
                    f"  from here on {report.number(change.after, unit)}, before {report.number(change.before, unit)}"
                )
            print(f"{point.time_utc}  {point.commit}  {report.number(point.median, unit)}{said}")
    return cli.EXIT_OK


def define_import() -> None:
    """Define the flags of history import."""
    from jaxbench.regress import imported

    define_folder()
    flags.DEFINE_multi_string("input", None, "a file, or a folder of figures; may be repeated", required=True)
    flags.DEFINE_enum("format", None, list(imported.FORMATS), "what wrote it", required=True)


def import_() -> int:
    """Store runs of another tool, of comparisons, or of any committed result; a run is never stored twice.

    Raises:
      ValueError: an input is missing, cannot be read, or is of another format; nothing is stored then.
    """
    from jaxbench.regress import imported

    history, runs = folder(), []
    if missing := [path for path in VALUES.input if not Path(path).exists()]:
        raise ValueError(f"--input={missing[0]} does not exist; name a file, or a folder of figures")
    for path in VALUES.input:
        runs += imported.read_runs(Path(path), VALUES.format)
    before = len(history.files())
    for run in runs:
        history.add(run)
    print(f"{len(runs)} runs read, {len(history.files()) - before} of them new in {history.folder}")
    return cli.EXIT_OK


def define_export() -> None:
    """Define the flags of history export."""
    define_folder()
    flags.DEFINE_string("output", None, "a CSV file", required=True)
    flags.DEFINE_bool("overwrite", False, "replace the output; never a file of the history")


def export() -> int:
    """Write the median of every series of every run as CSV.

    Raises:
      ValueError: there is no run, or the file cannot be written.
    """
    history = folder()
    if Path(VALUES.output).resolve().is_relative_to(history.folder.resolve()):
        raise ValueError(
            f"--output={VALUES.output} is in --history={history.folder}, among the runs; name another file"
        )
    output = outputs.check_file(VALUES.output, overwrite=VALUES.overwrite)
    rows = list(history.every_point())
    if not rows:
        raise ValueError(f"--history={VALUES.history}: there is no run to export")
    outputs.write_csv(output, rows)
    print(f"{len(rows)} points in {VALUES.output}")
    return cli.EXIT_OK


def define_tag() -> None:
    """Define the flags of history tag."""
    _define_named()
    flags.DEFINE_string("tag", None, "its name", required=True)


def tag() -> int:
    """Name a run, which is then kept for ever."""
    folder().tag(VALUES.run, VALUES.tag)
    print(f"{VALUES.run} is {VALUES.tag}")
    return cli.EXIT_OK


def define_prune() -> None:
    """Define the flags of history prune."""
    define_folder()
    flags.DEFINE_bool("dry_run", False, "only say what would be removed")


def prune() -> int:
    """Remove runs older than twelve months, and raw launches older than 90 days; tagged runs stay."""
    changes = folder().prune(now=datetime.datetime.now(datetime.UTC), dry_run=VALUES.dry_run)
    for change in changes:
        print(f"{change.id}: {change.what}")
    print(f"{len(changes)} runs {'would be ' if VALUES.dry_run else ''}changed")
    return cli.EXIT_OK


def _define_other() -> None:
    define_folder()
    flags.DEFINE_string("backup", None, "folder of the copies, or [USER@]HOST:FOLDER by rsync", required=True)


def backup() -> int:
    """Copy runs into another folder or to another host: files that are not there, or changed here.

    Raw launches that were pruned here stay there, as FILE.before.
    """
    history, target = folder(), VALUES.backup
    is_remote = remote_copy.is_remote(target)
    if not is_remote and Path(target).resolve().is_relative_to(history.folder.resolve()):
        raise ValueError(f"--backup={target} is --history={history.folder} or in it; name a folder outside")
    if not is_remote:
        outputs.check_folder(target, flag="--backup")
    if not history.files():
        raise ValueError(f"--history={history.folder} holds no run; there is nothing to copy")
    if is_remote:
        damaged = list(history.verify())
        copied = Copied(_carried(lambda: remote_copy.send(history.folder, target, left_out=damaged)), tuple(damaged))
    else:
        copied = history.backup(Path(target))
    print(f"{copied.count} files copied to {target}")
    if copied.damaged:
        raise cli.GateFailed(
            f"history: {', '.join(copied.damaged[:3])}: {len(copied.damaged)} damaged files were not copied; `history "
            "restore` puts them aside and brings back what the copy has"
        )
    return cli.EXIT_OK


def restore() -> int:
    """Copy from a backup what is missing or damaged here."""
    history, target = folder(), VALUES.backup
    if remote_copy.is_remote(target):
        with tempfile.TemporaryDirectory() as fetched:
            _carried(lambda: remote_copy.fetch(target, Path(fetched)))
            copied = history.restore(Path(fetched))
    else:
        copied = history.restore(Path(target))
    aside = f"; damaged ones are put aside as {copied.damaged[0]}.damaged, ..." if copied.damaged else ""
    print(f"{copied.count} files copied from {target}{aside}")
    return cli.EXIT_OK


def _carried(copy: Callable[[], int]) -> int:
    """Return what a copy returns; turn a failed copy into cli.GateFailed, as a requested part that failed."""
    try:
        return copy()
    except remote_copy.CopyFailed as error:
        raise cli.GateFailed(str(error)) from error


def define_table() -> None:
    """Define the flags of history table."""
    define_folder()
    flags.DEFINE_string("run", None, "its id or the beginning of it, its tag, latest, or a run's file", required=True)
    flags.DEFINE_string("file", None, "Markdown file that gets the table between its marks; unset: it is printed")
    flags.DEFINE_bool("check", False, "write nothing; exit code 1 where the file has another table")


def table() -> int:
    """Print a run's primary series as Markdown, write them into a document, or check that the document has them.

    Raises:
      ValueError: there is no such run, or the document has no place for the table.
      cli.GateFailed: the document is checked and has a different table.
    """
    from jaxbench.regress import tables

    is_file = VALUES.run.endswith(".json") and Path(VALUES.run).is_file()
    path = Path(VALUES.run) if is_file else folder().find(VALUES.run)
    made = tables.table(read(path), path.stem)
    if VALUES.file is None:
        if VALUES.check:
            raise ValueError(f"--check={VALUES.check} wants --file, the document that is checked")
        print(made)
        return cli.EXIT_OK
    document = Path(VALUES.file)
    if VALUES.check:
        if not tables.is_current(document, made):
            raise cli.GateFailed(f"{document} has another table than run {VALUES.run}; write it without --check")
        print(f"{document} is current")
    else:
        print(f"{document}: {'written' if tables.write(document, made) else 'was current'}")
    return cli.EXIT_OK


def verify() -> int:
    """Read every run, qualification and alert; exit code 1 if one is damaged.

    Raises:
      ValueError: there is no such folder: a misspelt one must not pass as whole.
    """
    history = folder()
    if not history.folder.is_dir():
        raise ValueError(f"--history={VALUES.history} does not exist; there is nothing to verify")
    damaged = history.verify()
    try:
        Book(history.folder).alerts()
    except ValueError as error:
        damaged[EVENTS] = str(error)
    print(json.dumps(damaged, indent=1) if damaged else f"{len(history.files())} runs, all of them whole")
    if damaged:
        raise cli.GateFailed(f"{len(damaged)} files cannot be read, of {len(history.files())} runs and what is beside")
    return cli.EXIT_OK


COMMANDS = {
    "list": cli.Command(define_folder, list_, "List the runs."),
    "show": cli.Command(_define_named, show, "Show a run."),
    "trend": cli.Command(define_trend, trend, "Show a series on this machine over the runs."),
    "import": cli.Command(define_import, import_, "Keep runs of other tools, of compare, or of results."),
    "export": cli.Command(define_export, export, "Every point as CSV."),
    "table": cli.Command(define_table, table, "A run's primary series as Markdown, in a document too."),
    "tag": cli.Command(define_tag, tag, "Name a run, which is then kept for ever."),
    "prune": cli.Command(define_prune, prune, "Remove what is too old."),
    "backup": cli.Command(_define_other, backup, "Copy runs into another folder, or to another host."),
    "restore": cli.Command(_define_other, restore, "Copy runs of a backup that are not here."),
    "verify": cli.Command(define_folder, verify, "Read every run."),
}


def main(about: str) -> None:
    """Run the command that follows `history`."""
    cli.run_commands(COMMANDS, about=about, argv=[f"{sys.argv[0]} history", *sys.argv[2:]])
