"""Explain why a case became slower: the stage, operations whose time changed, the program's HLO, packages (S file).

Data flow: the regressions of a run -> fresh processes of both sides -> each case that became worse once more, under
JAX's profiler, base head head base -> what differs. An operation counts as moved if all profiles of one side lie above
all of the other; with four of each that happens by chance in 2 of 70 cases, and nothing is gated on it.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxbench import outputs
from jaxbench.measure import verdicts
from jaxbench.profiling import operations
from jaxbench.regress.judge import Finding
from jaxbench.regress.pairs import BASE, HEAD, Launches

ROUNDS = 4  # profiles of each side
SHOWN = 12  # operations shown
LEAST = 0.005  # least share of a measurement's time by which an operation must move
STAGES = {  # metric -> what the process does in that time
    "import_s": "import", "load_s": "load", "trace_s": "trace", "lower_s": "lower", "compile_warm_s": "compile",
    "tokens_per_s": "run", "first_token_s": "run", "token_p50_s": "run", "token_p90_s": "run", "token_p99_s": "run",
    "end_to_end_s": "run",
}  # fmt: skip


def explain(launches: Launches, findings: Sequence[Finding], folder: Path) -> dict[str, Any]:
    """Find what differs in the cases that became worse; returns JSON values.

    Args:
      launches: of a run that has a base.
      folder: where the programs' texts and their differences go.
    """
    stages = stages_of(findings)
    found: dict[str, Any] = {"packages": {}, "cases": {name: {"stages": each} for name, each in stages.items()}}
    if not stages:
        return found
    with launches.workers(launches.finished() + 1, "why") as (workers, answers):
        if BASE not in workers:
            return found
        found["packages"] = _differing(answers[BASE]["packages"], answers[HEAD]["packages"])
        for case in launches.plan.suite.cases:
            if case.name in stages:
                found["cases"][case.name] |= _case(launches, case, workers, folder / case.name)
    return found


def stages_of(findings: Sequence[Finding]) -> dict[str, dict[str, float]]:
    """Return, by case with a regression, its slower stages with the largest share; {} if only counts became worse."""
    found: dict[str, dict[str, float]] = {}
    for each in findings:
        if each.verdict == "regression":
            stages = found.setdefault(each.series.partition(".")[0], {})
            stage = STAGES.get(each.series.rpartition(".")[2])
            if stage is not None:
                stages[stage] = max(stages.get(stage, 0.0), each.worse)
    return found


def _case(launches: Launches, case: Any, workers: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Profile a case and compare its programs on both sides; if one fails, return the reason instead."""
    launches.say(f"why: {case.name}, load and compile")
    opcodes, profiles = {}, {BASE: [], HEAD: []}
    for side, worker in workers.items():
        (folder / side).mkdir(parents=True, exist_ok=True)
        if launches.prepared(side, case, worker) is None:
            return {"error": f"{side}: {launches.lost.get((side, case.name), 'it ended')}"}
        answer = launches.ask(side, case.name, worker, "texts", folder=str((folder / side).absolute()))
        opcodes[side] = {} if answer is None else answer["opcodes"]
    for turn in range(2 * ROUNDS):
        side = (BASE, HEAD, HEAD, BASE)[turn % 4]
        launches.say(f"why: {case.name}, profile {turn // 2 + 1} of {ROUNDS}, {side}")
        answer = launches.ask(side, case.name, workers[side], "profile")
        if answer is None:
            return {"error": f"{side}: {launches.lost[side, case.name]}"}
        profiles[side].append(answer)
    for side, worker in workers.items():
        launches.ask(side, case.name, worker, "unload")
    programs = {
        name: _differing(opcodes[BASE].get(name, {}), opcodes[HEAD].get(name, {}), missing=0)
        for name in sorted(opcodes[BASE].keys() | opcodes[HEAD].keys())
    }
    for name in programs:
        _write_difference(folder, name)
    seconds = [verdicts.median([each["seconds"] for each in profiles[side]]) for side in (BASE, HEAD)]
    return {
        "seconds": seconds, "operations_s": [_total(profiles[side]) for side in (BASE, HEAD)],
        "operations": moved(profiles[BASE], profiles[HEAD], least=LEAST * seconds[0])[:SHOWN],
        "opcodes": {name: each for name, each in programs.items() if each},
    }  # fmt: skip


def moved(base: Sequence[Mapping], head: Sequence[Mapping], *, least: float) -> list[dict[str, Any]]:
    """Return operations that changed by `least` seconds or more, all profiles of one side above those of the other.

    The largest change comes first.
    """
    names = {name for each in (*base, *head) for name in each["operations"]}
    found = []
    for name in names:
        before, after = ([each["operations"].get(name, (0, 0.0)) for each in side] for side in (base, head))
        first, second = ([seconds for _, seconds in side] for side in (before, after))
        apart = min(second) > max(first) or min(first) > max(second)
        middle = verdicts.median(first), verdicts.median(second)
        if apart and abs(middle[1] - middle[0]) >= least:
            calls = [int(verdicts.median([count for count, _ in side])) for side in (before, after)]
            found.append({"name": name, "seconds": list(middle), "calls": calls})
    return sorted(found, key=lambda each: -abs(each["seconds"][1] - each["seconds"][0]))


def sentences(why: Mapping[str, Any]) -> list[str]:
    """Return an explanation as sentences, one per line."""
    said = []
    if changed := why["packages"]:
        pairs = ", ".join(
            f"{name} {before or 'none'} to {after or 'none'}" for name, (before, after) in changed.items()
        )
        said.append(f"packages: {pairs}")
    for name, each in why["cases"].items():
        if each["stages"]:
            stages = sorted(each["stages"].items(), key=lambda item: -item[1])
            said.append(f"{name}: slower in {', '.join(f'{stage} ({100 * worse:+.0f} %)' for stage, worse in stages)}")
        if "error" in each:
            said.append(f"{name}: no profile ({each['error']})")
        if "seconds" in each:
            said += [f"{name}: {line}" for line in _case_sentences(each)]
    return said


def _case_sentences(each: Mapping[str, Any]) -> list[str]:
    (base, head), (base_ops, head_ops) = each["seconds"], each["operations_s"]
    more, in_operations = head - base, head_ops - base_ops
    line = f"a measurement takes {1e3 * more:+.3g} ms ({1e3 * base:.3g} to {1e3 * head:.3g}) under the profiler, "
    line += f"its operations {1e3 * in_operations:+.3g} ms on all threads"
    if more > 0 and in_operations < more / 2:
        line += "; most of it is outside the compiled programs"
    said = [line]
    for moved_one in each["operations"]:
        (before, after), (calls, now) = moved_one["seconds"], moved_one["calls"]
        count = f"{calls} calls" if calls == now else f"{calls} to {now} calls"
        said.append(
            f"{1e3 * (after - before):+.3g} ms ({1e3 * before:.3g} to {1e3 * after:.3g}), {count}: {moved_one['name']}"
        )
    for program, counts in each["opcodes"].items():
        said.append(f"HLO of {program}: " + ", ".join(f"{name} {b} to {h}" for name, (b, h) in counts.items()))
    return said


def _differing(base: Mapping[str, Any], head: Mapping[str, Any], *, missing: Any = "") -> dict[str, list[Any]]:
    """Return, by key, both values where two mappings differ."""
    both = {name: [base.get(name, missing), head.get(name, missing)] for name in sorted(base.keys() | head.keys())}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def _total(profiles: Sequence[Mapping]) -> float:
    return verdicts.median([sum(seconds for _, seconds in each["operations"].values()) for each in profiles])


def _write_difference(folder: Path, program: str) -> None:
    """Write the instructions that one side has more often than the other to a text file; no file if there are none."""
    sides = []
    for side in (BASE, HEAD):
        path = folder / side / f"{program}.txt"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        sides.append(collections.Counter(operations.instructions(text)))
    lines = [f"-{count:4d}  {name}" for name, count in sorted((sides[0] - sides[1]).items())]
    lines += [f"+{count:4d}  {name}" for name, count in sorted((sides[1] - sides[0]).items())]
    if lines:
        outputs.write_text(folder / f"{program}.diff", "\n".join(lines) + "\n")
