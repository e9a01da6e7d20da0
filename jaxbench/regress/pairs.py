"""Launches of a suite: fresh processes of head, and of base if there is one, one working at a time (S file).

Data flow: a launch starts one worker per side -> case by case both load and compile, then measure in rounds, base head
head base -> rows of samples, appended to the run's file as each case ends. An interrupted launch is run again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench import store
from jaxbench.measure import energy, verdicts
from jaxbench.measure.process import Worker, WorkerError
from jaxbench.regress.judge import Pair
from jaxbench.regress.suite import AnyCase, Suite
from jaxbench.regress.trees import Tree

SAMPLES = "samples.jsonl"
WORKER = Path(__file__).with_name("case_worker.py")
CASES = (WORKER, WORKER.with_name("cases.py"), WORKER.with_name("workload_cases.py"))  # what both sides run
HEAD, BASE = "head", "base"
START, DONE = "start", "launch_done"
LOST, LOOKED = "lost", "looked"  # rows without samples: a case that a side cannot run; the look after which a run ended
PERCENTILES = (0.5, 0.9, 0.99)
# metrics that samples contain directly
PLAIN = (
    "first_token_s", "end_to_end_s", "bits_per_byte", "answer_nll", "detection_rate", "parity_error",
    "tokens_per_vector", "read_back_rate", "retention",
)  # fmt: skip


class Plan(NamedTuple):
    """What a run executes."""

    suite: Suite
    model: str | None  # folder or file; None = the default model
    sides: Mapping[str, Tree]  # head, and base if there is one
    device: str
    threads: int
    workdir: Path


class Look(NamedTuple):
    """The look after which a run ended."""

    launches: int
    note: str  # why it was the last, if the verdicts were not decided; "" = they were, or no further look is planned


class Launches:
    """The launches of a run, stored in its folder."""

    def __init__(self, plan: Plan, say: Callable[[str], Any]):
        self.plan, self.say, self.path = plan, say, plan.workdir / SAMPLES
        rows = [row for row in read(self.path) if row["series"] == LOST]
        # (side, case) -> why it is not measured; of finished launches too, so that a run goes on without the case
        self.lost: dict[tuple[str, str], str] = {(row["side"], row["case"]): row["reason"] for row in rows}

    def finished(self) -> int:
        """Return the number of launches that ran to their end."""
        return max((row["launch"] for row in read(self.path) if row["series"] == DONE), default=0)

    def last_look(self) -> Look | None:
        """Return the look after which the run ended; None if it has not ended."""
        rows = [row for row in read(self.path) if row["series"] == LOOKED]
        return Look(rows[-1]["launch"], rows[-1]["reason"]) if rows else None

    def end(self, look: Look) -> None:
        """Store the look after which the run ended: a run that is judged again makes no further launches."""
        row = {"launch": look.launches, "side": HEAD, "series": LOOKED, "samples": [], "reason": look.note}
        store.append(self.path, [row])

    def until(self, count: int) -> None:
        """Run launches until there are `count`."""
        for index in range(self.finished() + 1, count + 1):
            self._launch(index)

    def _launch(self, index: int) -> None:
        known = set(self.lost)
        with self.workers(index, f"launch {index}") as (workers, answers):
            for side, answer in answers.items():
                self._append(index, side, {"start.import_s": [answer["import_s"]]})
            for case in self.plan.suite.cases:
                self._case(index, case, workers)
        rows = [
            {"launch": index, "side": side, "series": LOST, "samples": [], "case": case, "reason": reason}
            for (side, case), reason in self.lost.items() if (side, case) not in known
        ]  # fmt: skip
        store.append(self.path, [*rows, {"launch": index, "side": HEAD, "series": DONE, "samples": []}])

    @contextlib.contextmanager
    def workers(self, index: int, name: str) -> Iterator[tuple[dict[str, Worker], dict[str, dict]]]:
        """Start fresh processes of all sides that can start; yield them and their answers, and end them afterwards.

        Raises:
          ValueError: this tree cannot be imported, or a side imports another tree.
        """
        sides = [BASE, HEAD] if index % 2 else [HEAD, BASE]
        workers: dict[str, Worker] = {}
        answers: dict[str, dict] = {}
        try:
            for side in (side for side in sides if side in self.plan.sides and (side, START) not in self.lost):
                self.say(f"{name}: start {side}")
                workers[side] = self._start(index, side)
                try:
                    answers[side] = workers[side].request("start")
                except WorkerError as error:
                    if side == HEAD:
                        raise ValueError(f"benchmarks: this tree cannot be imported: {error}") from error
                    self.lost[side, START] = str(error)
                    self.say(f"the base is left out: {error}")
                    workers.pop(side).close()
                    continue
                self._check(side, answers[side])
            yield workers, answers
        finally:
            for worker in workers.values():
                worker.close()

    def _start(self, index: int, side: str) -> Worker:
        tree, plan = self.plan.sides[side], self.plan
        cache = plan.workdir / "compile_cache" / side
        if index == 1:
            shutil.rmtree(cache, ignore_errors=True)  # launch 1 compiles cold, even when it is run again
        variables = tree.environment(plan.device, plan.threads) | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
        log = plan.workdir / "logs" / f"launch{index}-{side}.log"
        log.unlink(missing_ok=True)
        return Worker(
            side, WORKER, environment=variables, log=log, threads=plan.threads, timeout_s=plan.suite.timeout_s,
            python=tree.python, root=tree.root,
        )  # fmt: skip

    def _check(self, side: str, answer: Mapping[str, Any]) -> None:
        tree = self.plan.sides[side]
        if Path(answer["tree"]) != tree.root.resolve():
            raise ValueError(f"benchmarks: {side} imported jaxbench of {answer['tree']}; wanted {tree.root}")
        if answer["device"] != self.plan.device:
            raise ValueError(f"benchmarks: {side} runs on {answer['device']}; wanted {self.plan.device}")

    def _case(self, index: int, case: AnyCase, workers: Mapping[str, Worker]) -> None:
        ready = [side for side in workers if self._prepare(index, side, case, workers[side])]
        samples: dict[str, list[dict]] = defaultdict(list)
        counters: dict[str, float] = defaultdict(float)
        utilisation: dict[str, list[float]] = defaultdict(list)
        for turn in range(self.plan.suite.rounds):
            for side in ready if turn % 2 == 0 else ready[::-1]:
                self.say(f"launch {index}: {case.name}, round {turn + 1} of {self.plan.suite.rounds}, {side}")
                before = energy.readings()
                answer = self.ask(side, case.name, workers[side], "measure", seconds=self.plan.suite.sample_s)
                if answer is None:
                    continue
                samples[side] += answer["samples"]
                utilisation[side].append(answer["utilisation"])
                counters[f"{side}.recompilations"] += answer["recompilations"]
                if before and (joules := energy.spent(before, energy.readings())) is not None:
                    counters[f"{side}.joules"] += joules
        for side in ready:
            memory = self.ask(side, case.name, workers[side], "memory")
            self.ask(side, case.name, workers[side], "unload")
            if memory is None or not samples[side]:
                continue
            rows = {f"{case.name}.{metric}": values for metric, values in series_of(samples[side]).items()}
            rows |= {f"{case.name}.{metric}": [float(value)] for metric, value in memory.items()}
            rows[f"{case.name}.utilisation"] = utilisation[side]
            rows[f"{case.name}.recompilations"] = [counters[f"{side}.recompilations"]]
            tokens = sum(sample.get("tokens", 0) for sample in samples[side])
            if tokens and counters[f"{side}.joules"]:
                rows[f"{case.name}.energy_j_per_token"] = [counters[f"{side}.joules"] / tokens]
            self._append(index, side, rows)

    def _prepare(self, index: int, side: str, case: AnyCase, worker: Worker) -> bool:
        """Load, compile and warm up a case; return False if this side cannot."""
        if (side, case.name) in self.lost:
            return False
        self.say(f"launch {index}: {case.name}, load and compile {side}")
        made = self.prepared(side, case, worker)
        if made is None:
            return False
        loaded, prepared = made
        rows = {f"{case.name}.load_s": [loaded["load_s"]]}
        stages = prepared["stages"]
        if "compile_s" in stages:
            stages[f"compile_{'cold' if index == 1 else 'warm'}_s"] = stages.pop("compile_s")
        rows |= {f"{case.name}.{stage}": [seconds] for stage, seconds in stages.items()}
        if index == 1:  # the compiler's counts are the same in every launch
            rows[f"{case.name}.executables"] = [float(prepared["executables"])]
            for program, counts in prepared["counts"].items():
                rows |= {f"{case.name}.{program}.{metric}": [value] for metric, value in counts.items()}
        self._append(index, side, rows)
        return True

    def prepared(self, side: str, case: AnyCase, worker: Worker) -> tuple[dict, dict] | None:
        """Load, compile and warm up a case in a worker; return its answers to load and prepare, None if it fails."""
        loaded = self.ask(side, case.name, worker, "load", case=case.model_dump(), model=self.plan.model)
        made = None if loaded is None else self.ask(side, case.name, worker, "prepare")
        if made is None:
            return None
        for _ in range(self.plan.suite.warmup):
            if self.ask(side, case.name, worker, "measure", seconds=0.0) is None:
                return None
        return loaded, made

    def ask(self, side: str, name: str, worker: Worker, operation: str, **arguments: Any) -> dict | None:
        """Return a worker's answer; None if it failed, which is recorded, and the other cases continue."""
        if not worker.alive:
            self.lost.setdefault((side, name), "its process ended in an earlier case")
            return None
        try:
            return worker.request(operation, **arguments)
        except WorkerError as error:
            self.lost.setdefault((side, name), str(error))
            self.say(f"{name} is left out of {side}: {error}")
            return None

    def _append(self, index: int, side: str, rows: Mapping[str, Sequence[float]]) -> None:
        made = ({"launch": index, "side": side, "series": name, "samples": list(v)} for name, v in rows.items())
        store.append(self.path, made)


def case_code() -> str:
    """Return a hash of the code of the cases, this tree's for both sides; 8 hex digits."""
    return hashlib.sha256(b"\n".join(path.read_bytes() for path in CASES)).hexdigest()[:8]


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's file, checked for the fields that every row has.

    Raises:
      ValueError: a line is not a row.
    """
    for number, line in enumerate(store.rows(path), start=1):
        try:
            row = json.loads(line)
            samples = [math.nan if value is None else value for value in row["samples"]]  # null: not finite
            yield row | {name: row[name] for name in ("launch", "side", "series")} | {"samples": samples}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} line {number} is no row of samples ({error}); remove it") from error


def series_of(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Compute the metrics of a case's samples: rates, times, percentiles over tokens if enough for a bound."""
    found: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if "tokens" in sample:
            found["tokens_per_s"].append(sample["tokens"] / sample["seconds"])
        for metric in PLAIN:
            if metric in sample:
                found[metric].append(sample[metric])
    tokens = [second for sample in samples for second in sample.get("token_s", [])]
    bounded = verdicts.percentiles(tokens, PERCENTILES) if tokens else {}
    return dict(found) | {f"token_{name}_s": [value] for name, value in bounded.items() if value is not None}


def launch_medians(path: Path) -> dict[str, dict[str, dict[int, float]]]:
    """Return each series' median by side and launch; of a launch that was run again, the later row."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in read(path):
        if row["samples"]:
            found[row["series"]][row["side"]][row["launch"]] = verdicts.median(row["samples"])
    return {series: dict(sides) for series, sides in found.items()}


def pairs_of(path: Path, launches: Sequence[int] | None = None) -> dict[str, list[Pair]]:
    """Return pairs of both sides by series, in the order of the launches; None = of all launches."""
    found = {}
    for series, sides in launch_medians(path).items():
        both = sorted(sides.get(BASE, {}).keys() & sides.get(HEAD, {}).keys())
        kept = [i for i in both if launches is None or i in launches]
        if kept:
            found[series] = [Pair(sides[BASE][i], sides[HEAD][i]) for i in kept]
    return found
