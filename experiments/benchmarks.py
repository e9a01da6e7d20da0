"""Performance over time: run a suite, compare with a commit, keep the runs.

    benchmarks.py run --suite=quick
    benchmarks.py run --suite=standard --compare_with=main
    benchmarks.py run --suite=standard --cases=compress
    benchmarks.py gate --suite=quick
    benchmarks.py qualify --suite=quick --launches=180
    benchmarks.py history list
    benchmarks.py history show --run=latest
    benchmarks.py alerts list
    benchmarks.py site
    benchmarks.py dashboard

A comparison makes a worktree of the base with the packages that it pins, and runs it and this tree alternately, as
pairs of fresh processes. A critical regression, a broken limit or a case that this tree cannot run ends with exit code
1, bad input with 2 and one line. A killed run is resumed by the same command.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, outputs, process_environment, terminal
from jaxbench.regress import alert_commands, gate_command, history_commands
from jaxbench.regress.site import commands as site_commands

VALUES = flags.FLAGS
SUITES = Path("configs/benchmarks")


def _define_suite() -> None:
    flags.DEFINE_string("suite", "quick", f"a name of {SUITES}, or a YAML file")
    flags.DEFINE_multi_string("set", [], "changes of its keys: --set=rounds=3")


def _suite() -> tuple[Any, str]:
    """Return the suite that --suite names, and its name."""
    from jaxbench import config
    from jaxbench.regress.suite import Suite

    path = Path(VALUES.suite)
    if not path.suffix:
        path = SUITES / f"{VALUES.suite}.yaml"
        path = path if path.is_file() else cli.ROOT / path  # a name means the repository's suite, from any folder
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in (cli.ROOT / SUITES).glob("*.yaml")))
        raise ValueError(f"--suite={VALUES.suite}: {path} is no file; wanted one of {known}, or a YAML file")
    suite = config.load(path, VALUES.set, Suite)
    process_environment.check_attached(VALUES.device)
    return suite, path.stem


def _part(suite: Any, name: str) -> tuple[Any, str, tuple[str, ...]]:
    """Return the part of a suite that --cases names, the suite's name, and the names of the cases left out."""
    if VALUES.cases is None:
        return suite, name, ()
    part = suite.only(VALUES.cases)
    kept = {case.name for case in part.cases}
    return part, name, tuple(case.name for case in suite.cases if case.name not in kept)


def _say() -> Any:
    """Return a function that prints a line of progress with the seconds since this call."""
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
    flags.DEFINE_list(
        "cases", None, "names or workloads of cases, as file names match: --cases=native*,bits; unset: all"
    )
    alert_commands.define_alerts()
    flags.DEFINE_bool("detailed_report", False, "report.html with every series, every section open")
    flags.DEFINE_bool("keep", True, "keep the run in the history")
    cli.define_device()
    cli.define_workdir()
    history_commands.define_folder()


def run() -> int:
    """Run a suite, versus a base if one is named."""
    from jaxbench.measure import environment
    from jaxbench.regress import html_report, report, run, trees

    suite, name, left_out = _part(*_suite())
    alerts = alert_commands.config()
    if alerts is not None and not VALUES.keep:
        raise ValueError(f"--alerts={VALUES.alerts}: an alert names a run of the history; leave --nokeep out")
    history, compare_with, stored, stored_id = history_commands.folder(), VALUES.compare_with, None, ""
    if VALUES.keep:  # before anything is measured
        outputs.check_folder(VALUES.history, flag="--history")
    if compare_with is not None and history.has(compare_with):
        stored, stored_id, compare_with = history.load(compare_with), history.find(compare_with).stem, None
        if stored["host"] != environment.fingerprint() and not VALUES.other_machine:
            raise ValueError(
                f"--compare_with={VALUES.compare_with} was run on machine {stored['host']}, this is "
                f"{environment.fingerprint()}; pass --other_machine to compare what is counted"
            )
    known = [suite.id, VALUES.device, trees.here().commit, VALUES.compare_with or "", *run.surroundings(suite)]
    folder = run.unfinished(
        Path("out") / "benchmarks", f"{name}-{hashlib.sha256(repr(known).encode()).hexdigest()[:8]}"
    )
    workdir = cli.workdir(folder)
    cli.keep(f"finished launches are in {workdir}; the same command goes on")
    qualified = None if left_out else history.qualification(environment.fingerprint(), VALUES.device, suite.id)
    context = run.Context(name, stored, stored_id, qualified, left_out)
    found = run.run_suite(
        suite, compare_with=compare_with, device=VALUES.device, workdir=workdir, context=context, say=_say()
    )
    terminal.console().print(report.table(found.record))
    if (limits := report.limits_table(found.record)) is not None:
        terminal.console().print(limits)
    written = report.write(found.record, workdir)
    if "html" in suite.reports or VALUES.detailed_report:
        written += html_report.write(found.record, workdir, detailed=VALUES.detailed_report)
    print(report.summary(found.record))
    said = report.worth(found.record) if found.findings else []
    for line in report.explanation(found.record) + said + found.record["notes"]:
        print(line)
    print(f"written: {', '.join(written)} in {workdir}")
    failed = report.failures(found.record)
    if VALUES.keep:
        id = history.add(found.record)
        print(f"kept as {id} in {history.folder}")
        if alerts is not None:
            try:
                alert_commands.take_in(alerts, found.record, id)
            except ValueError as error:  # a damaged file of alerts must not hide the verdict
                failed.append(f"nobody was told: {error}")
    if failed:
        raise cli.GateFailed("; ".join(failed))
    return cli.EXIT_OK


def gate() -> int:
    """Compare counted figures with the commit that this branch started from."""
    suite, *_ = _part(*_suite())
    return gate_command.gate(suite, say=_say())


def define_qualify() -> None:
    """Define the flags of qualify."""
    _define_suite()
    flags.DEFINE_integer("launches", 30, "of this tree beside itself", lower_bound=2)
    flags.DEFINE_integer("drawn", 300, "runs drawn from them", lower_bound=1)
    history_commands.define_folder()
    cli.define_device()
    cli.define_workdir()


def qualify() -> int:
    """Measure false alarms and power on this machine: this tree versus itself, and with injected slow-downs."""
    from jaxbench.measure import environment
    from jaxbench.regress import qualify, run

    suite, name = _suite()
    if VALUES.launches < max(suite.looks):
        raise ValueError(f"--launches={VALUES.launches}; wanted {max(suite.looks)} at least, as a run may have")
    history, workdir = history_commands.folder(), cli.workdir(Path("out") / "qualify" / name)
    cli.keep(f"finished launches are in {workdir}; the same command goes on")
    pairs = run.same_sides(suite, launches=VALUES.launches, device=VALUES.device, workdir=workdir, say=_say())
    found = qualify.measure(pairs, suite, num_drawn=VALUES.drawn)
    print(f"runs of equal sides that said anything: {found.real}; drawn from all launches: {found.drawn}")
    if found.left_out:
        print(f"left out, because not every launch has it: {', '.join(found.left_out)}")
    for ratio, share in found.power.items():
        print(f"primary series found when head takes {ratio} times as long: {share.count} of {share.total}")
    for series, share in sorted(found.smallest.items(), key=lambda item: item[1]):
        print(f"{series}: {100 * share:.0f} % worse is decided")
    machine = environment.describe(threads=suite.threads or environment.usable_cores())
    about = {"machine": machine, "suite": name, "suite_id": suite.id, "device": VALUES.device}
    kept = history.qualify({"about": about, "launches": VALUES.launches, **found._asdict()})
    print(f"written: {kept}, which reports of this suite on this machine print from now on")
    return cli.EXIT_OK


def _heat_map(result: dict[str, Any]) -> dict[str, Any]:
    from jaxbench.parity import report

    return report.heat_map(result)


COMMANDS = {
    "run": cli.Command(define_run, run, "Run a suite, beside a base where one is named."),
    "gate": cli.Command(lambda: gate_command.define_gate(_define_suite), gate, gate_command.ABOUT),
    "qualify": cli.Command(define_qualify, qualify, "Measure false alarms and power on this machine."),
    "site": cli.Command(site_commands.define_site, lambda: site_commands.site(_heat_map), site_commands.ABOUT_SITE),
    "dashboard": cli.Command(
        site_commands.define_dashboard, lambda: site_commands.dashboard(_heat_map), site_commands.ABOUT_DASHBOARD
    ),
    "history": cli.Command(lambda: None, lambda: None, history_commands.ABOUT),
    "alerts": cli.Command(lambda: None, lambda: None, alert_commands.ABOUT),
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["history"]:
        history_commands.main(__doc__)
    if sys.argv[1:2] == ["alerts"]:
        alert_commands.main(__doc__)
    cli.run_commands(COMMANDS, about=__doc__)
