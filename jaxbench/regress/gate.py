"""Compare the counts of two trees: counts have no noise, so one launch of each is enough (S file).

Data flow: a tree -> one launch of the suite's cases, kept by commit, so that a base that was measured before costs
nothing -> what the compiler counts, compilations during measurement, bits per byte -> findings by value. A run in the
history that measured the base on this machine replaces a launch.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench.measure import environment, verdicts
from jaxbench.regress import judge, metrics, pairs, run, trees
from jaxbench.regress.history import History
from jaxbench.regress.judge import Finding
from jaxbench.regress.pairs import BASE, HEAD, Launches
from jaxbench.regress.suite import Suite
from jaxbench.regress.trees import Tree

BRANCHES = ("@{upstream}", "origin/HEAD", "origin/main", "main")  # what a branch was made from: the first that exists
Counts = dict[str, float]  # series -> value


class Stored(NamedTuple):
    """Counts of a run in the history."""

    run: str
    counts: Counts


class Compared(NamedTuple):
    """Result of the gate."""

    findings: list[Finding]  # of every count that both sides have
    missing: list[str]  # counts of the base that head lacks
    new: list[str]  # counts of head that the base lacks


def base_commit() -> str:
    """Return the SHA at which this branch left the one it was made from; HEAD itself on that branch.

    Raises:
      ValueError: this is no git repository, or there is no such branch.
    """
    for name in BRANCHES:
        command = ["git", "--no-optional-locks", "merge-base", "HEAD", name]
        done = subprocess.run(command, cwd=trees.ROOT, capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            return done.stdout.strip()
    raise ValueError(f"gate: git finds none of {', '.join(BRANCHES)} here; name the base with --compare_with=COMMIT")


def counts_of(
    suite: Suite, tree: Tree, *, device: str, folder: Path, side: str = HEAD, say: Callable[[str], Any] = print
) -> tuple[Counts, dict[str, str]]:
    """Return the counts of a tree, and the cases that it lost with reasons; kept in `folder` by commit and case code.

    Args:
      side: head; or base, whose failure to start loses its cases but is no error.

    Raises:
      ValueError: the machine lacks what the suite requires, this tree cannot be imported, or another gate is run.
    """
    run.check(suite, device)
    short = quick(suite)
    name = "-".join([short.id, device, *run.surroundings(suite), pairs.case_code(), side, tree.commit])
    with run.alone(folder / name):
        plan = run.planned(short, {side: tree}, device, folder / name)
        launches = Launches(plan, say)
        launches.until(1)
        own = pairs.launch_medians(plan.workdir / pairs.SAMPLES)
        counts = {name: verdicts.median(list(sides[side].values())) for name, sides in own.items() if side in sides}
        shutil.rmtree(plan.workdir / "compile_cache", ignore_errors=True)
        if launches.lost:
            shutil.rmtree(plan.workdir)  # or the next gate would take this incomplete result for complete
    return _counted(counts), {name: reason for (_, name), reason in launches.lost.items()}


def quick(suite: Suite) -> Suite:
    """Return the shortest suite that still gives the counts: one visit per case, one sample per visit."""
    return suite.model_copy(update={"rounds": 1, "sample_s": 0.0})


def stored(history: History, suite: Suite, *, commit: str, device: str, threads: int) -> Stored | None:
    """Return a commit's counts from the newest run of this suite on this machine that measured it; None if none did.

    A run with other files of the model, other packages (the compiler), another number of threads or another code of the
    cases does not count; runs of older versions do not say their code.
    """
    wanted = (environment.fingerprint(), device, suite.id)
    present = (threads, environment.versions(), run.model_of(suite))
    for row in reversed(history.list()):
        side = next((name for name, sha in ((HEAD, row.head), (BASE, row.base)) if sha and sha == commit), None)
        if side is None or (row.host, row.device, row.suite_id) != wanted:
            continue
        record = history.load(row.id)
        machine, own = record["machine"], run.model_of(suite) and record.get("model_sha256")
        if (machine.get("threads"), machine.get("versions"), own) != present:
            continue  # the compiler partitions loops by thread count
        if record.get("case_code", pairs.case_code()) != pairs.case_code():
            continue
        counts = {name: sides[side]["median"] for name, sides in record["series"].items() if side in sides}
        if counts := _counted(counts):
            return Stored(row.id, counts)
    return None


def compare(base: Mapping[str, float], head: Mapping[str, float], suite: Suite) -> Compared:
    """Judge the counts of two trees, and list the counts that one of them lacks."""
    both = {name: [judge.Pair(base[name], head[name])] for name in head if name in base}
    missing, new = ([name for name in one if name not in other] for one, other in ((base, head), (head, base)))
    return Compared(judge.judge(both, suite), missing, new)


def _counted(series: Mapping[str, float]) -> Counts:
    return {name: value for name, value in series.items() if metrics.metric_of(name).kind in metrics.COUNTED}
