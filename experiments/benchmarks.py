"""Performance over time: run a suite, compare with a commit, keep the runs.

    benchmarks.py run --suite=quick
    benchmarks.py run --suite=standard --compare_with=main
    benchmarks.py qualify --suite=quick --launches=180
    benchmarks.py history list
    benchmarks.py history show --run=latest

A comparison makes a worktree of the base with the packages that it pins, and runs it and this tree as pairs of fresh
processes in turn. A critical regression ends with exit code 1, bad input with 2 and one line. A run that is killed
goes on with the same command.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, process_environment, terminal

VALUES = flags.FLAGS
SUITES = Path("configs/benchmarks")


def _define_history() -> None:
    flags.DEFINE_string("history", "out/history", "folder of the runs that are kept")


def _history() -> Any:
    from jaxbench.regress.history import History

    return History(Path(VALUES.history))


def _define_suite() -> None:
    flags.DEFINE_string("suite", "quick", f"a name of {SUITES}, or a YAML file")
    flags.DEFINE_multi_string("set", [], "changes of its keys: --set=rounds=3")


def _suite() -> tuple[Any, str]:
    """The suite that --suite names, and its name."""
    from jaxbench import config
    from jaxbench.regress.suite import Suite

    path = Path(VALUES.suite)
    path = path if path.suffix else SUITES / f"{VALUES.suite}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in SUITES.glob("*.yaml")))
        raise ValueError(f"--suite={VALUES.suite}: {path} is no file; wanted one of {known}, or a YAML file")
    suite = config.load(path, VALUES.set, Suite)
    process_environment.check_attached(VALUES.device)
    return suite, path.stem


def _say() -> Any:
    """What prints a line of progress with the seconds since now."""
    from rich import markup

    console, started = terminal.console(stderr=True), time.monotonic()
    return lambda text: console.print(
        f"[dim]{time.monotonic() - started:6.1f} s[/dim] {markup.escape(text)}", soft_wrap=True
    )


def define_run() -> None:
    """Define the flags of run."""
    _define_suite()
    flags.DEFINE_string("compare_with", None, "commit, branch or tag that is measured beside; or a run of the history")
    flags.DEFINE_bool("other_machine", False, "compare with a run of another machine: what is counted, no times")
    flags.DEFINE_bool("keep", True, "keep the run in the history")
    cli.define_device()
    cli.define_workdir()
    _define_history()


def run() -> int:
    """Run a suite, beside a base where one is named."""
    from jaxbench import config
    from jaxbench.measure import environment
    from jaxbench.regress import report, trees
    from jaxbench.regress import run as running

    suite, name = _suite()
    history, compare_with, stored = _history(), VALUES.compare_with, None
    if compare_with is not None and any(row.id.startswith(compare_with) for row in history.list()):
        stored, compare_with = history.load(compare_with), None
        if stored["host"] != environment.fingerprint() and not VALUES.other_machine:
            raise ValueError(
                f"--compare_with={VALUES.compare_with} was run on machine {stored['host']}, this is "
                f"{environment.fingerprint()}; pass --other_machine to compare what is counted"
            )
    known = [config.config_id(suite), VALUES.device, trees.here().commit, VALUES.compare_with or ""]
    folder = running.unfinished(
        Path("out") / "benchmarks", f"{name}-{hashlib.sha256(repr(known).encode()).hexdigest()[:8]}"
    )
    workdir = cli.workdir(folder)
    cli.keep(f"finished launches are in {workdir}; the same command goes on")
    found = running.run(
        suite, compare_with=compare_with, device=VALUES.device, workdir=workdir, stored=stored, say=_say()
    )  # fmt: skip
    terminal.console().print(report.table(found.record))
    written = report.write(found.record, workdir)
    print(report.summary(found.record))
    for line in report.explanation(found.record) + found.record["notes"]:
        print(line)
    print(f"written: {', '.join(written)} in {workdir}")
    if VALUES.keep:
        print(f"kept as {history.add(found.record)} in {history.folder}")
    critical = [each.series for each in found.findings if each.level == "critical"]
    if critical:
        raise cli.GateFailed(f"critical regression of {', '.join(critical)}")
    return cli.EXIT_OK


def define_qualify() -> None:
    """Define the flags of qualify."""
    _define_suite()
    flags.DEFINE_integer("launches", 30, "of this tree beside itself", lower_bound=2)
    flags.DEFINE_integer("drawn", 300, "runs drawn from them", lower_bound=1)
    cli.define_device()
    cli.define_workdir()


def qualify() -> int:
    """Measure false alarms and power on this machine: this tree beside itself, and slow-downs injected."""
    from jaxbench import outputs
    from jaxbench.measure import environment
    from jaxbench.regress import qualify as qualifying
    from jaxbench.regress import run as running

    suite, name = _suite()
    if VALUES.launches < max(suite.looks):
        raise ValueError(f"--launches={VALUES.launches}; wanted {max(suite.looks)} at least, as a run may have")
    workdir = cli.workdir(Path("out") / "qualify" / name)
    cli.keep(f"finished launches are in {workdir}; the same command goes on")
    pairs = running.same_sides(
        suite, launches=VALUES.launches, device=VALUES.device, workdir=workdir, say=_say()
    )  # fmt: skip
    found = qualifying.qualify(pairs, suite, num_drawn=VALUES.drawn)
    print(f"runs of equal sides that said anything: {found.real}; drawn from all launches: {found.drawn}")
    for ratio, share in found.power.items():
        print(f"primary series found when head takes {ratio} times as long: {share.count} of {share.total}")
    for series, share in sorted(found.smallest.items(), key=lambda item: item[1]):
        print(f"{series}: {100 * share:.0f} % worse is decided")
    about = {"machine": environment.describe(threads=suite.threads or environment.usable_cores()), "suite": name}
    outputs.write_json(workdir / "qualify.json", {"about": about, "launches": VALUES.launches, **found._asdict()})
    print(f"written: {workdir / 'qualify.json'}")
    return cli.EXIT_OK


def list_() -> int:
    """List the runs, oldest first."""
    import rich.table

    table = rich.table.Table("run", "time", "head", "base", "machine", "device", "tag")
    for row in _history().list():
        table.add_row(row.id, row.time_utc, row.head, row.base, row.host, row.device, row.tag)
    terminal.console().print(table)
    return cli.EXIT_OK


def _define_named() -> None:
    _define_history()
    flags.DEFINE_string("run", None, "its id or the beginning of it, its tag, or latest", required=True)


def show() -> int:
    """Show a run."""
    from jaxbench.regress import report

    record = _history().load(VALUES.run)
    terminal.console().print(report.table(record))
    print(report.summary(record))
    for line in report.explanation(record) + record["notes"]:
        print(line)
    return cli.EXIT_OK


def define_trend() -> None:
    """Define the flags of history trend."""
    _define_history()
    cli.define_device()
    flags.DEFINE_string("series", None, "case.metric, such as decode.tokens_per_s", required=True)


def trend() -> int:
    """Show a series on this machine over the runs."""
    from jaxbench.measure import environment
    from jaxbench.regress import metrics, report

    unit, host = metrics.metric_of(VALUES.series).unit, environment.fingerprint()
    points = _history().points(VALUES.series, host=host, device=VALUES.device)
    if not points:
        raise ValueError(f"--series={VALUES.series}: no run of machine {host} on {VALUES.device} in {VALUES.history}")
    for time_utc, commit, median in points:
        print(f"{time_utc}  {commit}  {report.number(median, unit)}")
    return cli.EXIT_OK


def define_tag() -> None:
    """Define the flags of history tag."""
    _define_named()
    flags.DEFINE_string("tag", None, "its name", required=True)


def tag() -> int:
    """Name a run, which is then kept for ever."""
    _history().tag(VALUES.run, VALUES.tag)
    print(f"{VALUES.run} is {VALUES.tag}")
    return cli.EXIT_OK


def define_prune() -> None:
    """Define the flags of history prune."""
    _define_history()
    flags.DEFINE_bool("dry_run", False, "only say what would be removed")


def prune() -> int:
    """Remove runs of more than twelve months, and raw launches of more than 90 days; tagged runs stay."""
    changes = _history().prune(now=datetime.datetime.now(datetime.UTC), dry_run=VALUES.dry_run)
    for change in changes:
        print(f"{change.id}: {change.what}")
    print(f"{len(changes)} runs {'would be ' if VALUES.dry_run else ''}changed")
    return cli.EXIT_OK


def _define_other() -> None:
    _define_history()
    flags.DEFINE_string("backup", None, "folder of the copies", required=True)


def backup() -> int:
    """Copy runs into another folder; what is there already is not copied again."""
    print(f"{_history().backup(Path(VALUES.backup))} runs copied to {VALUES.backup}")
    return cli.EXIT_OK


def restore() -> int:
    """Copy runs of a backup that are not here."""
    print(f"{_history().restore(Path(VALUES.backup))} runs copied from {VALUES.backup}")
    return cli.EXIT_OK


def verify() -> int:
    """Read every run; exit code 1 where one is damaged."""
    history = _history()
    damaged = history.verify()
    print(json.dumps(damaged, indent=1) if damaged else f"{len(history.files())} runs, all of them whole")
    if damaged:
        raise cli.GateFailed(f"{len(damaged)} of {len(history.files())} runs cannot be read")
    return cli.EXIT_OK


HISTORY = {
    "list": cli.Command(_define_history, list_, "List the runs."),
    "show": cli.Command(_define_named, show, "Show a run."),
    "trend": cli.Command(define_trend, trend, "Show a series on this machine over the runs."),
    "tag": cli.Command(define_tag, tag, "Name a run, which is then kept for ever."),
    "prune": cli.Command(define_prune, prune, "Remove what is too old."),
    "backup": cli.Command(_define_other, backup, "Copy runs into another folder."),
    "restore": cli.Command(_define_other, restore, "Copy runs of a backup that are not here."),
    "verify": cli.Command(_define_history, verify, "Read every run."),
}


def history() -> None:
    """Run the command that follows `history`."""
    cli.run_commands(HISTORY, about=__doc__, argv=[f"{sys.argv[0]} history", *sys.argv[2:]])


COMMANDS = {
    "run": cli.Command(define_run, run, "Run a suite, beside a base where one is named."),
    "qualify": cli.Command(define_qualify, qualify, "Measure false alarms and power on this machine."),
    "history": cli.Command(lambda: None, history, "The runs that are kept: list, show, tag, prune, backup, ..."),
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["history"]:
        history()
    cli.run_commands(COMMANDS, about=__doc__)
