"""Run a suite: head alone, or head and base until their verdicts are decided (S file).

Data flow: a suite and what to compare with -> trees -> launches up to a look -> verdicts -> more launches up to the
next look, or the end; a critical verdict must be confirmed in fresh launches; what became worse is profiled on both
sides -> the run's record.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench import outputs, store
from jaxbench.measure import environment, verdicts
from jaxbench.measure.records import now_utc
from jaxbench.pretrained import assets, weights
from jaxbench.regress import judge, limits, metrics, pairs, run_file, tiny, trees, why
from jaxbench.regress.judge import Finding
from jaxbench.regress.pairs import BASE, HEAD, Launches, Look, Plan
from jaxbench.regress.suite import Suite

RECORD, WHY = "run.json", "why.json"


class Outcome(NamedTuple):
    """Result of a run."""

    findings: list[Finding]  # of every series that both sides have; none without a base
    record: dict[str, Any]  # all that is stored of the run


class Context(NamedTuple):
    """What is known of a run besides what it measures."""

    suite_name: str = ""
    # A run from history that serves as the base instead of a measured one. Exact and quality series are judged; times
    # are not, because a machine behaves differently at another time.
    stored: Mapping[str, Any] | None = None
    stored_id: str = ""  # its id
    qualified: Mapping[str, Any] | None = None  # how reliable the suite's verdicts are here, if `qualify` measured that
    left_out: Sequence[str] = ()  # names of the named suite's cases that the run's suite omits


def run_suite(
    suite: Suite, *, compare_with: str | None, device: str, workdir: Path, context: Context = Context(),
    say: Callable[[str], Any] = print,
) -> Outcome:  # fmt: skip
    """Run a suite, resumably: what is finished in workdir is not run again.

    Args:
      compare_with: commit, branch or tag that is the base; None = no base is measured.

    Raises:
      ValueError: the machine lacks what the suite requires, git knows no such commit, workdir belongs to another run,
        or another process is running there.
    """
    check(suite, device)
    head = trees.here()
    sides, notes = {HEAD: head}, _parts(context.left_out, context.stored)
    if context.stored_id:
        notes.insert(0, _no_times(context.stored_id, context.stored))
    if compare_with is not None:
        try:
            sides = {BASE: trees.of_commit(compare_with, workdir.parent / "trees", say=say), HEAD: head}
        except trees.NotBuilt as error:
            notes.append(f"the base is left out: {error}")
            say(notes[-1])
    with alone(workdir):
        return _run(planned(suite, sides, device, workdir), context, notes, say)


def _parts(left_out: Sequence[str], stored: Mapping[str, Any] | None) -> list[str]:
    """Return notes on a run, or a stored base, that does not have all cases of its suite."""
    sides = (("this run is", left_out), ("the run beside it is", (stored or {}).get("left_out", ())))
    return [f"{which} no whole suite; cases left out: {', '.join(names)}" for which, names in sides if names]


def _variables(plan: Plan) -> list[str]:
    """Return notes if the sides' environment variables differ, which is part of what is measured, or are unknown."""
    if BASE not in plan.sides:
        return []
    reported = {side: tree.reported(plan.device, plan.threads) for side, tree in plan.sides.items()}
    if unknown := [side for side, found in reported.items() if found is None]:
        return [
            f"{side} cannot report the environment variables that it sets; it starts with this version's"
            for side in unknown
        ]
    base, head = reported[BASE], reported[HEAD]
    names = sorted((base.keys() | head.keys()) - {"PYTHONPATH", "JAX_COMPILATION_CACHE_DIR"})
    values = {name: (base.get(name, "unset"), head.get(name, "unset")) for name in names}
    changed = [f"{name} {before} -> {now}" for name, (before, now) in values.items() if before != now]
    return [f"processes of base and head start with other variables: {'; '.join(changed)}"] if changed else []


def _no_times(id: str, stored: Mapping[str, Any]) -> str:
    """Return the note on a run of the history as base: what is compared, and how its times can be."""
    commit = stored["sides"][HEAD]["commit"]
    again = "" if set(commit) - set("0123456789abcdef") else f"; for times, --compare_with={commit} measures it again"
    return f"the base is run {id} of the history: what is counted is compared, no times{again}"


@contextlib.contextmanager
def alone(workdir: Path) -> Iterator[None]:
    """Lock workdir against other processes inside the context.

    Raises:
      ValueError: another process holds it.
    """
    workdir.parent.mkdir(parents=True, exist_ok=True)
    with store.taken(workdir.parent / f".{workdir.name}.lock") as is_alone:
        if not is_alone:
            raise ValueError(
                f"--workdir={workdir}: another run works there now; wait for its end, or name another folder"
            )
        yield


def _run(plan: Plan, context: Context, notes: Sequence[str], say: Callable[[str], Any]) -> Outcome:
    notes = [*notes, *_variables(plan)]
    launches, confirmed = Launches(plan, say), {}
    findings, look = _looked(plan, launches)
    if look.note:
        notes.append(look.note)
    if context.stored is not None:
        findings, left = _beside_stored(plan, context.stored)
        notes += left
    criticals = [each.series for each in findings if each.level == "critical"]
    if criticals and plan.suite.confirm:
        findings, confirmed = _confirmed(plan, launches, findings, criticals, look.launches)
    notes += [f"{case} of {side}: {reason}" for (side, case), reason in launches.lost.items()]
    lost = {case: reason for (side, case), reason in launches.lost.items() if side == HEAD}
    gone = [name for name in _gone(plan, context.stored) if name.partition(".")[0] not in lost]
    if gone:
        notes.append(f"not compared, because head has them no longer: {', '.join(gone)}")
    explained = None
    if BASE in plan.sides:  # the profiles of a run that is judged again are there
        explained, _ = store.kept(plan.workdir / WHY, lambda: why.explain(launches, findings, plan.workdir / "why"))
    record = _record(plan, findings, confirmed, notes, launches.finished()) | {"lost": lost, "gone": gone}
    record["suite_name"] = context.suite_name
    if context.qualified is not None:
        record["qualified"] = context.qualified
    if context.left_out:
        record["left_out"] = list(context.left_out)
    if explained is not None:
        record["why"] = explained
    if context.stored is not None:
        record["sides"][BASE] = context.stored["sides"][HEAD]
    outputs.write_json(plan.workdir / RECORD, record)
    return Outcome(findings, record)


def _looked(plan: Plan, launches: Launches) -> tuple[list[Finding], Look]:
    """Launch up to one look after another until the verdicts are decided; return them and the last look."""
    suite, findings, last, note = plan.suite, [], 0, ""
    looks, ended = suite.looks if BASE in plan.sides else suite.looks[:1], launches.last_look()
    if ended is not None:  # the run is judged again
        return _judged(plan, range(1, ended.launches + 1), len(suite.looks)), ended
    started, before = time.monotonic(), launches.finished()
    for look in looks:
        if note := _late(suite, look, launches.finished() - before, time.monotonic() - started, look - before):
            launches.say(note)
            break
        launches.until(look)
        last, findings = look, _judged(plan, range(1, look + 1), len(suite.looks))
        if BASE in plan.sides and not _undecided(findings, suite):
            break
    launches.end(Look(last, note))
    return findings, Look(last, note)


def unfinished(folder: Path, name: str) -> Path:
    """Return the folder of an unfinished run of this name: the first of name, name-2, name-3, ... without a record."""
    numbered = (folder / (name if i == 1 else f"{name}-{i}") for i in itertools.count(1))
    return next(path for path in numbered if not (path / RECORD).exists())


def same_sides(
    suite: Suite, *, launches: int, device: str, workdir: Path, say: Callable[[str], Any] = print
) -> dict[str, list[judge.Pair]]:
    """Return pairs of launches of this tree against itself, as `qualify` takes them; resumable.

    An extra first launch, which compiles from scratch, is not counted, so that every series has the same launches.

    Raises:
      ValueError: as `run_suite` does.
    """
    check(suite, device)
    tree = trees.here()
    with alone(workdir):
        plan = planned(suite, {BASE: tree, HEAD: tree}, device, workdir)
        Launches(plan, say).until(launches + 1)
    return pairs.pairs_of(workdir / pairs.SAMPLES, range(2, launches + 2))


def planned(suite: Suite, sides: Mapping[str, trees.Tree], device: str, workdir: Path) -> Plan:
    """Return the plan of a run and claim its folder.

    Raises:
      ValueError: workdir belongs to another run.
    """
    origin = [suite.id, device, environment.fingerprint(), *(tree.commit for tree in sides.values())]
    store.claim(workdir, "-".join([*origin, *surroundings(suite)]))
    threads = suite.threads or environment.usable_cores()
    named = Path(suite.model)  # a worker's working directory is its tree
    model = str(named.absolute()) if named.exists() else suite.model
    model = {"default": None, "tiny": str((workdir / "tiny").absolute())}.get(suite.model, model)
    if suite.model == "tiny":
        tiny.save(workdir / "tiny")
    return Plan(suite, model, sides, device, threads, workdir)


def surroundings(suite: Suite) -> tuple[str, ...]:
    """Return what launches depend on besides code and suite: threads, packages (hashed) and the model's files."""
    packages = hashlib.sha256(repr(environment.versions()).encode()).hexdigest()[:8]
    threads = suite.threads or environment.usable_cores()
    return (str(threads), packages, *([model_of(suite)[:8]] if model_of(suite) else []))


def model_of(suite: Suite) -> str:
    """Return the SHA-256 of a suite's model; "" for the default and the tiny one, which never change."""
    return "" if suite.model in ("default", "tiny") else weights.checksum(suite.model)


def check(suite: Suite, device: str) -> None:
    """Check that this machine has what a suite requires.

    Raises:
      ValueError: it lacks something, or there is no such model.
    """
    needs = suite.requires
    if needs.device != device and needs.device != "cpu":
        raise ValueError(
            f"suite: requires.device={needs.device}, this run is on {device}; pass --device={needs.device}"
        )
    free = environment.available_memory_bytes()
    if free < needs.memory_bytes:
        raise ValueError(f"suite: requires.memory_bytes={needs.memory_bytes}, {free} are free here")
    if suite.model not in ("default", "tiny"):
        weights.read_config(suite.model)
    if (suite.threads or 1) > environment.usable_cores():
        raise ValueError(f"suite: threads={suite.threads}, this process may use {environment.usable_cores()} cores")


def _judged(plan: Plan, launches: Sequence[int], num_looks: int) -> list[Finding]:
    return judge.judge(pairs.pairs_of(plan.workdir / pairs.SAMPLES, launches), plan.suite, num_looks=num_looks)


def _beside_stored(plan: Plan, stored: Mapping[str, Any]) -> tuple[list[Finding], list[str]]:
    """Judge exact and quality series against a run from history, and note what is another series there."""
    theirs, ours = (stored["device"], stored["machine"].get("threads")), (plan.device, plan.threads)
    if theirs != ours:
        words = [f"on {device} with {threads} threads" for device, threads in (theirs, ours)]
        return [], [f"nothing is compared: the run beside it was {words[0]}, this one {words[1]}"]
    own = {"suite": plan.suite.model_dump(mode="json"), "model_sha256": _model_sha256(plan)}
    both, others = {}, {}
    for name, sides in pairs.launch_medians(plan.workdir / pairs.SAMPLES).items():
        if metrics.metric_of(name).kind not in metrics.COUNTED or HEAD not in stored["series"].get(name, {}):
            continue
        if run_file.work_of(own, name) != run_file.work_of(stored, name):
            others[name.partition(".")[0]] = True
            continue
        median = verdicts.median(list(sides[HEAD].values()))
        both[name] = [judge.Pair(stored["series"][name][HEAD]["median"], median)]
    notes = [f"not compared, because case or model differ in the run beside it: {', '.join(others)}"] if others else []
    before, now = stored["machine"].get("versions", {}), environment.versions()
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if before and names:
        changed = (f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}" for name in names)
        notes.append(f"packages differ from those of the run beside it: {', '.join(changed)}")
    if stored.get("case_code", pairs.case_code()) != pairs.case_code():
        notes.append("the run beside it ran another code of the cases: a count may differ by that alone")
    return judge.judge(both, plan.suite), notes


def _gone(plan: Plan, stored: Mapping[str, Any] | None) -> list[str]:
    """Return the counts of the base that head lacks: a comparison of what both have would pass over them."""
    medians = pairs.launch_medians(plan.workdir / pairs.SAMPLES)
    theirs = [name for name, sides in medians.items() if BASE in sides]
    if stored is not None and (stored["device"], stored["machine"].get("threads")) == (plan.device, plan.threads):
        own = {"suite": plan.suite.model_dump(mode="json"), "model_sha256": _model_sha256(plan)}
        cases = {case.name for case in plan.suite.cases}
        theirs = [name for name, sides in stored["series"].items() if HEAD in sides and name.partition(".")[0] in cases]
        theirs = [name for name in theirs if run_file.work_of(own, name) == run_file.work_of(stored, name)]
    known = [name for name in theirs if name.rpartition(".")[2] in metrics.METRICS]
    counted = [name for name in known if metrics.metric_of(name).kind in metrics.COUNTED]
    return [name for name in counted if HEAD not in medians.get(name, {})]


def _unequal(medians: Mapping[str, Mapping[str, Mapping[int, float]]]) -> list[str]:
    """Return notes on counts that are not the same in every launch: a verdict on their medians may pass over some."""
    return [
        f"{name} of {side} is not the same in every launch ({', '.join(f'{value:g}' for value in launches.values())}); "
        "its median is judged"
        for name, sides in medians.items() if metrics.metric_of(name).kind == "exact"
        for side, launches in sides.items() if len(set(launches.values())) > 1
    ]  # fmt: skip


def _late(suite: Suite, look: int, made: int, seconds: float, wanted: int) -> str:
    """Return why a look is skipped, or "": `wanted` launches would exceed the time limit, at the pace of `made`."""
    limit = suite.requires.time_s
    if limit is None or look == suite.looks[0] or made == 0 or seconds / made * wanted <= limit:
        return ""
    return (
        f"the look after {look} launches is left out: {made} took {seconds:.0f} s, and with them "
        f"requires.time_s={limit:.0f} would be passed"
    )


def _undecided(findings: Sequence[Finding], suite: Suite) -> bool:
    """True if a primary series is undecided."""
    primaries = set(suite.primaries())
    return any(each.verdict == "undecided" for each in findings if each.series in primaries)


def _confirmed(
    plan: Plan, launches: Launches, findings: Sequence[Finding], criticals: Sequence[str], judged: int
) -> tuple[list[Finding], dict[str, bool]]:
    """Return findings after fresh launches: a critical one that they do not confirm becomes a warning.

    judged: launches that the findings come from; the fresh ones follow them.
    """
    exact = {each.series for each in findings if each.low == each.high}  # counted, not timed: nothing to confirm
    if set(criticals) <= exact:
        return list(findings), dict.fromkeys(criticals, True)
    launches.say(f"critical: {', '.join(criticals)}; {plan.suite.confirm} fresh launches to confirm it")
    launches.until(judged + plan.suite.confirm)
    fresh = {each.series: each for each in _judged(plan, range(judged + 1, judged + plan.suite.confirm + 1), 1)}
    held = {
        series: series in exact or (series in fresh and fresh[series].low > plan.suite.margin(series).warning)
        for series in criticals
    }
    levels = {series: "critical" if is_held else "warning" for series, is_held in held.items()}
    return [each._replace(level=levels.get(each.series, each.level)) for each in findings], held


def _record(
    plan: Plan, findings: Sequence[Finding], confirmed: dict[str, bool], notes: Sequence[str], num_launches: int
) -> dict[str, Any]:
    """Return everything about a run as JSON values, as history stores it."""
    series: dict[str, dict[str, Any]] = {}
    medians = pairs.launch_medians(plan.workdir / pairs.SAMPLES)
    notes = [*notes, *_unequal(medians)]
    for name, sides in medians.items():
        for side, values in sides.items():
            if run_file.is_finite(median := verdicts.median(list(values.values()))):
                series.setdefault(name, {})[side] = {"median": median, "launches": list(values.values())}
            else:
                notes = [*notes, f"{name} of {side} is no finite number"]
    origin = environment.describe(threads=plan.threads)
    return {
        "schema": run_file.SCHEMA, "time_utc": _ended(plan, num_launches), "suite": plan.suite.model_dump(mode="json"),
        "device": plan.device, "suite_id": plan.suite.id, "host": origin["host"], "machine": origin,
        "model_sha256": _model_sha256(plan), "launches": num_launches, "case_code": pairs.case_code(),
        "sides": {
            name: {"commit": tree.commit, "subject": tree.subject} for name, tree in plan.sides.items()
        },
        "series": series, "findings": [each._asdict() for each in findings], "confirmed": confirmed,
        "limits": [each._asdict() for each in limits.judge(plan.suite.limits, series)], "notes": list(notes),
    }  # fmt: skip


def _ended(plan: Plan, num_launches: int) -> str:
    """Return when these launches ended: a finished run that is judged again is no new run."""
    with contextlib.suppress(OSError, ValueError):
        before = outputs.read_json(plan.workdir / RECORD)
        if before["launches"] == num_launches:
            return str(before["time_utc"])
    return now_utc()


def _model_sha256(plan: Plan) -> str:
    if plan.model is None and not assets.default_model_path().is_file():
        return ""  # no case needed it
    return weights.checksum(plan.model)
