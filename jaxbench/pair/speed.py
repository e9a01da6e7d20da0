"""Time each side of a pair in fresh processes: forward, forward and backward, an optimiser step.

A launch starts one process per arm. All stay alive, but only one works at a time; their order rotates from launch to
launch and is reversed in the second of two rounds. A launch gives one ratio per arm, of medians, to PyTorch's eager
arm; intervals are t-intervals over launches. The first two calls, which compile, are reported separately: cold in the
first launch, in the others with the compile cache of the first (S file).
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxbench.measure import environment, moderation, process, verdicts
from jaxbench.measure.process import Worker, WorkerError
from jaxbench.measure.records import Record, RecordFile, Workload, now_utc
from jaxbench.pair import speed_report, speed_worker

WORKER = "jaxbench.pair.speed_worker"
BASELINE = "torch_eager"
ARMS = ("jax_compiled", "jax_eager", BASELINE, "torch_compiled", "torchax", "torch2jax")
ALONE = (BASELINE, "torch_compiled")  # PyTorch without JAX in the process
PARTS = ("forward", "forward_backward", "step")
DTYPES = ("float32", "bfloat16")
ROUNDS = 2
TIMEOUT_S = 600.0  # of one request
SLACK = 3.0  # an arm errs against float64 by more than this times the baseline's error: it computes something else
EPSILONS = {"float32": 1.2e-7, "bfloat16": 7.8e-3}  # of the types: 2**-23 and 2**-7
MOST_WAITING = 0.2  # share of time in which a task waited for a core; above it there are no verdicts
MARGIN = 0.02  # relative difference that does not count


class Settings(NamedTuple):
    """Settings of a timing run."""

    dtypes: tuple[str, ...] = ("float32",)
    arms: tuple[str, ...] = ARMS
    launches: int = 5
    seconds: float = 0.5  # time spent on samples, for every arm, part and round
    threads: int | None = None  # None: every core that this process may use


class Speed(NamedTuple):
    """Result of a timing run."""

    rows: list[dict[str, Any]]  # part, dtype, arm, seconds, ratio to torch_eager with its interval, verdict, ...
    notes: list[str]  # missing arms and why, arms that compute something else
    about: dict[str, Any]  # machine, versions, settings

    def __str__(self) -> str:
        """Return the tables as plain text."""
        return speed_report.text(self)


def speed(path: str | Path, *, workdir: str | Path | None = None, **settings: Any) -> Speed:
    """Time both sides of the pair that a Python file describes.

    Args:
      path: file that defines pair(), as for `python -m jaxbench pair`. Every process loads it itself, which is why this
        takes a file where `compare` takes models.
      workdir: folder for speed.jsonl, logs and compile caches; None: a temporary one.
      **settings: fields of Settings.

    Raises:
      ValueError: a setting has an invalid value, or the file describes no pair.
    """
    if workdir is None:
        with tempfile.TemporaryDirectory() as folder:
            return speed(path, workdir=folder, **settings)
    from jaxbench.pair import pair_file, proof, public_types

    chosen = checked(Settings(**settings))
    pair = public_types.checked(pair_file.load(str(path)))
    return run(Path(path), proof.weights(pair), chosen, Path(workdir), has_optimizers=pair.optimizers is not None)


def checked(settings: Settings) -> Settings:
    """Check the settings and return them with the number of threads filled in.

    Raises:
      ValueError: a setting has an invalid value.
    """
    for field, known in (("dtypes", DTYPES), ("arms", ARMS)):
        values = getattr(settings, field)
        if not values or set(values) - set(known):
            raise ValueError(f"{field}={','.join(values)}: wanted some of {', '.join(known)}")
    if settings.launches < 1 or not settings.seconds > 0:
        raise ValueError(f"launches={settings.launches}, seconds={settings.seconds}: wanted 1 or more, and above 0")
    cores = environment.usable_cores()
    if not 1 <= (settings.threads or cores) <= cores:
        raise ValueError(f"threads={settings.threads}: wanted 1 to {cores}")
    return settings._replace(threads=settings.threads or cores)


def run(
    path: Path, weights: Any, settings: Settings, workdir: Path, *, has_optimizers: bool,
    say: Callable[[str], None] = lambda line: None,
) -> Speed:  # fmt: skip
    """Run every launch and summarise. `weights` is what proof.weights returns."""
    workdir.mkdir(parents=True, exist_ok=True)
    np.savez(
        workdir / "weights.npz",
        **{f"t/{name}": x for name, x in weights.tensors.items()},
        **{f"j/{name}": x for name, x in weights.arrays.items()},
    )
    plan = _Plan(path.resolve(), workdir, settings, datetime.now(UTC).isoformat(), {
        "weights": str((workdir / "weights.npz").resolve()), "is_training": weights.is_training,
        "trained": {"torch": sorted(weights.trained_tensors), "jax": sorted(weights.trained_arrays)},
    }, PARTS if has_optimizers else PARTS[:2])  # fmt: skip
    shutil.rmtree(workdir / "compile_cache", ignore_errors=True)
    file, waiting = RecordFile(workdir / "speed.jsonl"), [0.0]
    for index in range(1, settings.launches + 1):
        say(f"launch {index} of {settings.launches}")
        _Launch(plan, index, file).run()
        waiting.append(environment.pressure().get("cpu", 0.0))  # over the last 10 seconds, including the workers' own
    about = environment.describe(threads=settings.threads) | {
        "launches": settings.launches, "seconds": settings.seconds, "is_training": weights.is_training,
        "waiting": max(waiting), "is_judged": max(waiting) <= MOST_WAITING,
    }  # fmt: skip
    rows, notes = summary(
        file.of_run(plan.run_id), speed_worker.quantiles(weights.outputs), is_judged=about["is_judged"]
    )
    return Speed(rows, notes, about)


class _Plan(NamedTuple):
    path: Path
    workdir: Path
    settings: Settings
    run_id: str
    opening: dict[str, Any]  # arguments of `open` besides the dtype
    parts: tuple[str, ...]


class _Launch:
    """One set of workers and the records that they produce."""

    def __init__(self, plan: _Plan, index: int, file: RecordFile):
        self.plan, self.index, self.file = plan, index, file
        self.order = process.turn(plan.settings.arms, index - 1)
        self.workers: dict[str, Worker] = {}
        self.lost: set[str] = set()

    def run(self) -> None:
        """Measure every type and part; always close the workers."""
        threads, cache = self.plan.settings.threads, self.plan.workdir.resolve() / "compile_cache"
        variables = {
            "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "MKL_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        }  # fmt: skip
        try:
            for arm in self.order:
                log = self.plan.workdir / "logs" / f"launch{self.index}-{arm}.log"
                log.unlink(missing_ok=True)
                library = "PyTorch" if arm in ALONE else "XLA"
                own = process.environment("cpu", threads=threads, library=library)
                self.workers[arm] = Worker(
                    arm, WORKER, environment=own | variables, log=log, threads=threads, timeout_s=TIMEOUT_S
                )
                self._ask(arm, "start", Workload(), path=str(self.plan.path))
            for dtype in self.plan.settings.dtypes:
                self._dtype(Workload(dtype=dtype))
        finally:
            for worker in self.workers.values():
                worker.close()

    def _dtype(self, load: Workload) -> None:
        arms = [arm for arm in self.order if arm not in self.lost]
        arms = [arm for arm in arms if self._ask(arm, "open", load, dtype=load.dtype, **self.plan.opening) is not None]
        for part in self.plan.parts:
            ready = []
            for arm in arms:
                answer = self._ask(arm, "prepare", load, part, part=part, limit_s=4 * self.plan.settings.seconds)
                if answer is not None:
                    ready.append(arm)
                    metric = f"{part}_first_cold_s" if self.index == 1 else f"{part}_first_warm_s"
                    self._append(arm, metric, load, [answer["first_s"]], **answer["detail"],
                                 warmup=answer["warmup"], is_settled=answer["is_settled"])  # fmt: skip
            samples: dict[str, list[float]] = defaultdict(list)
            for index in range(ROUNDS):
                for arm in ready if index % 2 == 0 else ready[::-1]:
                    answer = self._ask(arm, "measure", load, part, seconds=self.plan.settings.seconds)
                    if answer is not None:
                        samples[arm].append(answer["seconds"])
            for arm, values in samples.items():
                self._append(arm, f"{part}_s", load, values)
                taken = self._ask(arm, "memory", load, part)
                if taken is not None:
                    self._append(arm, f"{part}_bytes", load, [taken["bytes"]], unit="bytes")

    def _ask(self, arm: str, operation: str, load: Workload, for_part: str = "", **arguments: Any) -> dict | None:
        """Send a request and return the answer; a failure adds an error record and returns None."""
        if arm in self.lost:
            return None
        try:
            return self.workers[arm].request(operation, **arguments)
        except WorkerError as error:
            if not self.workers[arm].alive or operation == "start":
                self.lost.add(arm)
            metric = f"{for_part}_s" if for_part else operation
            self._add(metric, arm, load, status="error", reason=str(error).partition(f"{operation}: ")[2] or str(error))
        return None

    def _append(self, arm: str, metric: str, load: Workload, values: list[float], *, unit: str = "s", **detail) -> None:
        self._add(metric, arm, load, value=verdicts.median(values), unit=unit, samples=tuple(values), detail=detail)

    def _add(self, metric: str, arm: str, load: Workload, **fields: Any) -> None:
        self.file.append(Record(
            metric=metric, arm=arm, workload=load, launch=self.index, run_id=self.plan.run_id, device="cpu",
            time_utc=now_utc(), **fields,
        ))  # fmt: skip


def summary(
    records: Sequence[Record], reference: Sequence[float], *, is_judged: bool = True
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of the table, and notes; rows in which a JAX arm is slower come first.

    Args:
      records: of one run.
      reference: quantiles of the outputs in float64.
      is_judged: False on a busy machine: rows then have no verdicts and are not reordered.
    """
    by_key: dict[tuple, dict[int, Record]] = defaultdict(dict)
    for record in records:
        by_key[record.metric, record.workload.dtype, record.arm][record.launch] = record
    dtypes = dict.fromkeys(record.workload.dtype for record in records if record.workload.dtype)
    rows = [
        row for dtype in dtypes for part in PARTS for arm in ARMS if (row := _row(by_key, part, dtype, arm)) is not None
    ]
    _judge(rows)
    losing = lambda row: row["verdict"] == "slower" and row["arm"].startswith("jax")
    if not is_judged:
        rows = [row | {"verdict": ""} for row in rows]
    return sorted(rows, key=lambda row: not losing(row)), _notes(by_key, dtypes, reference)


def _row(by_key: dict, part: str, dtype: str, arm: str) -> dict[str, Any] | None:
    """Return the row of one arm; None if it was not measured."""
    timed = {i: r for i, r in by_key[f"{part}_s", dtype, arm].items() if r.status == "ok"}
    if not timed:
        return None
    base = {i: r for i, r in by_key[f"{part}_s", dtype, BASELINE].items() if r.status == "ok"}
    value = lambda metric: [r.value for r in by_key[f"{part}_{metric}", dtype, arm].values() if r.value is not None]
    middle = lambda values: verdicts.median(values) if values else None
    row = {
        "part": part, "dtype": dtype, "arm": arm, "seconds": middle([r.value for r in timed.values()]),
        "launches": len(timed), "ratio": None, "verdict": "", "bytes": middle(value("bytes")),
        "first_cold_s": middle(value("first_cold_s")), "first_warm_s": middle(value("first_warm_s")),
    }  # fmt: skip
    both = sorted(timed.keys() & base.keys())
    if both and arm != BASELINE:
        ratios = [verdicts.log_ratio(timed[i].samples, base[i].samples, higher_is_better=False) for i in both]
        row["log_ratios"] = ratios
    return row


def _judge(rows: Sequence[dict[str, Any]]) -> None:
    """Replace every row's log ratios by interval and verdict; all rows are one family, as in the comparison."""
    compared = [row for row in rows if "log_ratios" in row]
    baselines = {(row["part"], row["dtype"]) for row in compared}  # arms of one are not independent
    logs = [row.pop("log_ratios") for row in compared]
    intervals = moderation.intervals(logs, margin=MARGIN, num_baselines=len(baselines))
    for row, interval, judged in zip(compared, intervals, verdicts.judge(intervals, margin=MARGIN), strict=True):
        ratio = [x if math.isfinite(x) else None for x in interval.ratio()]  # a single launch has no interval
        row |= {"ratio": ratio, "verdict": judged.verdict}


def _notes(by_key: dict, dtypes: Iterable[str], reference: Sequence[float]) -> list[str]:
    """Return notes: why arms are missing, once per reason, arms that compute something else, arms not warmed up."""
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (metric, dtype, arm), launches in by_key.items():
        for record in launches.values():
            where = f"{metric.removesuffix('_s')} {dtype}".strip()
            if record.status == "error" and where not in reasons[arm, record.reason]:
                reasons[arm, record.reason].append(where)
    notes = [f"{arm} was left out of {', '.join(where)}: {reason}" for (arm, reason), where in reasons.items()]
    for dtype in dtypes:
        first = {arm: by_key["forward_first_cold_s", dtype, arm].get(1) for arm in ARMS}
        found = {arm: record.detail["quantiles"] for arm, record in first.items() if record is not None}
        notes += _other_functions(found, reference, dtype)
    unsettled = [
        f"{arm} ({metric.removesuffix('_s')} {dtype})"
        for (metric, dtype, arm), launches in by_key.items()
        if any(record.detail.get("is_settled") is False for record in launches.values())
    ]
    return notes + (
        [f"still getting faster when the warm-up's time was up: {', '.join(unsettled)}"] if unsettled else []
    )


def _other_functions(found: Mapping[str, Sequence[float]], reference: Sequence[float], dtype: str) -> list[str]:
    """Return sentences on arms that err against float64 by more than the type explains, judged by the baseline."""
    wanted = np.asarray(reference)
    errors = {name: float(np.linalg.norm(wanted - y) / np.linalg.norm(wanted)) for name, y in found.items()}
    limit = SLACK * max(errors.get(BASELINE, 0.0), EPSILONS[dtype])
    return [
        f"{name} computes something else: its outputs err by {error:.1e}, {BASELINE}'s by {errors[BASELINE]:.1e}"
        for name, error in errors.items()
        if BASELINE in errors and not error <= limit
    ]
