"""Recommend what to do after a run, and what a release still needs, from the run's record alone (S file)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pydantic

from jaxbench.regress import judge, limits, metrics
from jaxbench.regress.judge import MOST_LAUNCHES, Finding
from jaxbench.regress.limits import Judged
from jaxbench.regress.suite import Suite

FEW = 6  # names in a sentence, at most
WAITED = 0.25  # share of 10 s in which a thread waited for a core; a run by itself has as many threads as cores
COMMAND = ".venv/bin/python experiments/benchmarks.py"


class Item(NamedTuple):
    """An item on the release checklist."""

    what: str
    is_done: bool
    detail: str


def suite_of(record: Mapping[str, Any]) -> Suite | None:
    """Return the suite of a run; None if another tool made the run, or a version of this one with other keys."""
    try:
        return Suite.model_validate(record["suite"])
    except pydantic.ValidationError:
        return None


def primaries(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the series that a run's looks wait for; () if its suite is unknown here."""
    suite = suite_of(record)
    return suite.primaries() if suite is not None else ()


def suite_name(record: Mapping[str, Any]) -> str:
    """Return the name of a run's suite, plus the cases run if some were left out: such runs are a separate group."""
    name = record.get("suite_name") or record.get("suite_id", "")
    return f"{name} ({', '.join(_cases(record))} alone)" if record.get("left_out") else name


# Recommendations


def recommendations(record: Mapping[str, Any]) -> list[str]:
    """Return what to do next, one sentence each, the most urgent first; empty if nothing is left to do."""
    found = judge.stored(record)
    broken = [each.series for each in limits.broken(record)]
    first = [f"limits broken: {_names(broken)}; mend it, or say in the suite why another limit holds"] if broken else []
    if not found:
        busy = _busy(record, limits.broken(record))
        return [*first, *busy, f"no base: `{_command(record)} --compare_with=COMMIT` gives verdicts"]
    steps = (_bisect, _not_confirmed, _warnings, _counts, _quality, _undecided, _qualify, _busy)
    return first + [line for step in steps for line in step(record, found)]


def _bisect(record: Mapping[str, Any], found: Sequence[Finding]) -> list[str]:
    """Advise on critical regressions: which commit, and where to look."""
    critical = [each.series for each in found if each.level == "critical"]
    if not critical:
        return []
    head, base = (record["sides"][side]["commit"] for side in ("head", "base"))
    said = [f"critical: {_names(critical)}"]
    if head.startswith("sources-") or "+" in head + base:
        said[0] += f"; commit what {head} has beside its commit, then bisect"
    else:
        said[0] += (
            f"; find the commit: `git bisect start {head} {base}`, then `git bisect run {_command(record)} "
            f"--compare_with={base}`"
        )
    for case in dict.fromkeys(series.partition(".")[0] for series in critical):
        moved = record.get("why", {}).get("cases", {}).get(case, {}).get("operations", ())
        slower = [each["name"] for each in moved if each["seconds"][1] > each["seconds"][0]]
        if slower:
            said.append(f"{case}: look first at {_names(slower[:3])}, which take longer under the profiler")
    return said


def _not_confirmed(record: Mapping[str, Any], found: Sequence[Finding]) -> list[str]:
    lost = [series for series, held in record["confirmed"].items() if not held]
    said = f"fresh launches did not find {_names(lost)} critical again: run once more before anything is changed"
    return [said] if lost else []


def _warnings(record: Mapping[str, Any], found: Sequence[Finding]) -> list[str]:
    """Advise on time and memory that became worse, but not critically."""
    worse = [each.series for each in found if each.level == "warning" and _kind(each) in ("timed", "memory")]
    if not worse:
        return []
    return [f"worse, short of critical: {_names(worse)}; mend what the explanation names, or say why it is worth it"]


def _counts(record: Mapping[str, Any], found: Sequence[Finding]) -> list[str]:
    """Advise on counted series that rose: where to find the differences of the programs."""
    more = [each.series for each in found if each.verdict == "regression" and _kind(each) == "exact"]
    if not more:
        return []
    cases = record.get("why", {}).get("cases", {})
    named = dict.fromkeys(series.partition(".")[0] for series in more)
    files = [f"`why/{case}/{name}.diff`" for case in named for name in cases.get(case, {}).get("opcodes", ())]
    where = (
        f"read {_names(files)} in the run's folder: instructions that one side has more often"
        if files
        else f"a run beside a commit (`{_command(record)} --compare_with=COMMIT`) writes how the programs differ"
    )
    return [f"counted, so no noise: {_names(more)} rose; {where}"]


def _quality(record: Mapping[str, Any], found: Sequence[Finding]) -> list[str]:
    worse = [each.series for each in found if each.verdict == "regression" and _kind(each) == "quality"]
    if not worse:
        return []
    return [f"{_names(worse)} became worse: `.venv/bin/python experiments/parity.py --all` names the module"]


def _undecided(record: Mapping[str, Any], found: Sequence[Finding]) -> list[str]:
    """Advise on undecided series: how many launches would decide them; primary series first."""
    first = primaries(record)
    open_ = sorted((each for each in found if each.verdict == "undecided"), key=lambda each: each.series not in first)
    within = [each for each in open_ if each.wanted_pairs < MOST_LAUNCHES]
    beyond = [each.series for each in open_ if each.wanted_pairs >= MOST_LAUNCHES]
    said = []
    if within:
        wanted = [each for each in within if each.series in first] or within
        most = max(each.wanted_pairs for each in wanted)
        names = _names([f"{each.series} (about {each.wanted_pairs} launches)" for each in within])
        said.append(f"undecided: {names}; `{_command(record)} --compare_with=COMMIT --set=looks=[{most}]` would tell")
    if beyond:
        said.append(f"too noisy or too near a margin for any number of launches: {_names(beyond)}")
    return said


def _qualify(record: Mapping[str, Any], found: Sequence[Finding]) -> list[str]:
    if record.get("qualified") is not None or record.get("left_out"):
        return []
    suite = record.get("suite_name") or "SUITE"
    return [f"not qualified here: `{COMMAND} qualify --suite={suite}` measures false alarms and power on this machine"]


def _busy(record: Mapping[str, Any], found: Sequence[Finding | Judged]) -> list[str]:
    """Advise to run again if other work ran at the same time; only worth it if times were judged."""
    machine = record["machine"]
    load = next(iter(machine.get("load_average", ())), 0.0)
    waited = machine.get("pressure", {}).get("cpu", 0.0)
    threads = machine.get("threads", 1)
    is_busy = load > threads + 1 or waited > WAITED
    if not is_busy or all(_kind(each) in ("exact", "quality") for each in found):
        return []
    return [
        f"the machine was busy (load {load:.1f} with {threads} threads of the run's own, waiting for a core in "
        f"{100 * waited:.0f} % of the time): run again when it is quiet"
    ]


# Checklist


def checklist(record: Mapping[str, Any]) -> list[Item]:
    """Return what a release requires of a run, each item done or not."""
    found = judge.stored(record)
    head, base = record["sides"]["head"]["commit"], record["sides"].get("base", {}).get("commit", "")
    committed = "+" not in head and not head.startswith("sources-")
    qualified = f"machine {record['host']}" if record.get("qualified") is not None else "`qualify` was not run here"
    bounds, broken = limits.of_run(record), [each.series for each in limits.broken(record)]
    said = f"broken: {_names(broken)}" if broken else f"{len(bounds)} limits"
    items = [
        Item("the base is named", bool(base), base or "none: pass --compare_with"),
        Item("what was measured is a commit", committed, head),
        _covered(record, found),
        _equal("counted metrics are equal", record, found, "exact"),
        _equal("quality is unchanged", record, found, "quality"),
        _no_critical(found),
        _decided(record, found),
        Item(
            "the machine is qualified for this suite",
            record.get("qualified") is not None,
            "a whole suite is qualified, no part of it" if record.get("left_out") else qualified,
        ),
    ]
    if bounds:
        items.append(Item("every limit is held", not broken, said))
    return items


def _covered(record: Mapping[str, Any], found: Sequence[Finding]) -> Item:
    seen = {each.series.partition(".")[0] for each in found}
    cases = [*_cases(record), *record.get("left_out", ())]
    lost = [name for name in cases if name not in seen]
    said = f"not on both sides: {_names(lost)}" if lost else f"{len(cases)} cases"
    return Item("every case was measured on both sides", bool(found) and not lost, said)


def _equal(what: str, record: Mapping[str, Any], found: Iterable[Finding], kind: str) -> Item:
    """Return the item that every series of a kind is unchanged, and still there."""
    own = [each for each in found if _kind(each) == kind]
    moved = [f"{each.series} {100 * each.worse:+.1f} %" for each in own if each.verdict != "no change"]
    moved += [f"{name} is gone" for name in record.get("gone", ()) if metrics.metric_of(name).kind == kind]
    none = "none was measured on both sides"
    return Item(what, bool(own) and not moved, _names(moved) if moved else f"{len(own)} series" if own else none)


def _no_critical(found: Sequence[Finding]) -> Item:
    critical = [each.series for each in found if each.level == "critical"]
    said = _names(critical) if critical else f"{len(found)} series judged" if found else "nothing was judged"
    return Item("no critical regression", bool(found) and not critical, said)


def _decided(record: Mapping[str, Any], found: Sequence[Finding]) -> Item:
    names = primaries(record)
    verdicts = {each.series: each.verdict for each in found}
    open_ = [name for name in names if verdicts.get(name, "undecided") == "undecided"]
    said = _names(open_) if open_ else f"{len(names)} series" if names else "this run has none"
    return Item("every primary series is decided", bool(names) and not open_, said)


def _kind(each: Finding | Judged) -> str:
    return metrics.metric_of(each.series).kind


def _command(record: Mapping[str, Any]) -> str:
    only = f" --cases={','.join(_cases(record))}" if record.get("left_out") else ""
    return f"{COMMAND} run --suite={record.get('suite_name') or 'SUITE'}{only}"


def _cases(record: Mapping[str, Any]) -> list[str]:
    """Return the names of the cases that a run ran."""
    return [case["name"] for case in record["suite"].get("cases", ())]


def _names(names: Sequence[str]) -> str:
    """Join the first few names for a sentence."""
    rest = len(names) - FEW
    return ", ".join(names[:FEW]) + (f" and {rest} more" if rest > 0 else "")
