"""The command `benchmarks.py gate`: compare noise-free counts before a push (S file)."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from jaxbench import cli, outputs
from jaxbench.measure import environment
from jaxbench.regress import gate as gates
from jaxbench.regress import history_commands, metrics, report, trees
from jaxbench.regress.history import History
from jaxbench.regress.pairs import BASE
from jaxbench.regress.suite import Suite

ABOUT = """Compare what is counted with the commit that this branch left: FLOPs, bytes, programs, bits a byte.

Counts have no noise, so one launch tells. The base's come from the newest run of the history that measured it on this
machine, else from one launch of it, which is kept. A count that rose critically, or that this tree has no longer, ends
with exit code 1. Times are not judged: `run` does that."""
VALUES = flags.FLAGS


def define_gate(define_suite: Callable[[], None]) -> None:
    """Define the flags of gate, including those of the suite."""
    define_suite()
    flags.DEFINE_string(
        "compare_with", None, "commit, branch or tag; unset: where this branch left its upstream or main"
    )
    flags.DEFINE_list("cases", None, "names or workloads of cases, as file names match; unset: all of the suite")
    flags.DEFINE_list("gone", [], "counts that this tree is meant to have no longer: --gone=decode.prefill.*")
    cli.define_device()
    cli.define_workdir("out/benchmarks/counts")
    history_commands.define_folder()


def gate(suite: Suite, *, say: Callable[[str], Any]) -> int:
    """Compare the counts of this tree with those of its base.

    Raises:
      ValueError: git knows no such base, or the machine lacks what the suite requires.
      cli.GateFailed: a count rose critically, this tree lost a case, or it lacks a count of the base that --gone does
        not name.
    """
    started, folder = time.monotonic(), outputs.check_folder(VALUES.workdir).absolute()
    history, head = history_commands.folder(), trees.here()
    base = (gates.base_commit() if VALUES.compare_with is None else trees.resolved(VALUES.compare_with))[:12]
    if head.commit == base:
        print(f"nothing to compare: this tree is {base} itself")
        return cli.EXIT_OK
    known, where = _base(suite, base, folder, history, say)
    if not known:
        return cli.EXIT_OK
    counts, lost = gates.counts_of(suite, head, device=VALUES.device, folder=folder, say=say)
    found = gates.compare(known, counts, suite)
    for each in sorted(found.findings, key=lambda each: -each.worse):
        if each.verdict != "no change":
            unit = metrics.metric_of(each.series).unit
            values = f"{report.number(each.base, unit)} to {report.number(each.head, unit)}"
            print(f"{each.series}: {values}, {report.interval(each)}, {report.verdict(each)}")
    for what, names in (("not there any more", found.missing), ("new", found.new)):
        if names:
            print(f"{what}: {', '.join(names)}")
    equal = sum(each.verdict == "no change" for each in found.findings)
    print(f"{equal} of {len(found.findings)} counts of {head.commit} as in {base} ({where}), {_since(started)}")
    if failed := _failures(found, lost):
        raise cli.GateFailed("; ".join(failed))
    return cli.EXIT_OK


def _failures(found: gates.Compared, lost: Mapping[str, str]) -> list[str]:
    """Return why the gate fails: a phrase for lost cases, for critical rises and for counts that are gone."""
    gone = [name for name in found.missing if name.partition(".")[0] not in lost]
    gone = [name for name in gone if not any(fnmatch.fnmatchcase(name, each) for each in VALUES.gone)]
    kinds = {
        "this tree does not run ": "; ".join(f"{name} ({why})" for name, why in lost.items()),
        "critical rise of ": ", ".join(each.series for each in found.findings if each.level == "critical"),
        "this tree has no longer, and --gone does not name, ": ", ".join(gone),
    }
    return [what + which for what, which in kinds.items() if which]


def _base(
    suite: Suite, base: str, folder: Path, history: History, say: Callable[[str], Any]
) -> tuple[gates.Counts, str]:
    """Return the base's counts and where they come from; no counts if it cannot be run, which is reported."""
    threads = suite.threads or environment.usable_cores()
    if (kept := gates.stored(history, suite, commit=base, device=VALUES.device, threads=threads)) is not None:
        return kept.counts, f"run {kept.run}"
    try:
        tree = trees.of_commit(base, folder.parent / "trees", say=say)  # the same folder as for `run`
    except trees.NotBuilt as error:
        print(f"nothing to compare with: {error}")
        return {}, ""
    counts, lost = gates.counts_of(suite, tree, device=VALUES.device, folder=folder, side=BASE, say=say)
    for name, reason in lost.items():
        print(f"{name} of {base}: {reason}")
    if not counts:
        print(f"nothing to compare with: {base} has no counts")
    return counts, "one launch of it"


def _since(started: float) -> str:
    return f"{time.monotonic() - started:.0f} s"
