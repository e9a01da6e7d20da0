"""One launch: fresh workers of all arms, run in turn, never two at once (S file).

The orders of the arms over launches form a Williams square, and every other round reverses its launch's order (ABBA),
so that slow drift of the machine and carry-over between arms affect every arm alike. A worker that fails becomes a
record with its error; the other arms continue.
"""

from __future__ import annotations

import functools
import itertools
import math
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from jaxbench.bench import arm_outputs, sample_rates, visit
from jaxbench.bench.arms import arm_table
from jaxbench.bench.arms.arm_table import ARMS
from jaxbench.bench.plan import Plan
from jaxbench.measure import process, records, roofline, verdicts
from jaxbench.measure.process import Worker, WorkerError
from jaxbench.measure.records import RecordFile, Workload
from jaxbench.training import observe

WORKER = "jaxbench.bench.worker"  # the module that an arm's process runs
CACHE = "compile_cache"  # folder of a workdir
READER = "reader"  # the worker that measures read bandwidth between the arms' visits
PROGRAMS = "programs"  # folder in CACHE: whole compiled programs of this run, which later launches load


class Launch:
    """One set of workers and the records they produce."""

    def __init__(self, plan: Plan, index: int, file: RecordFile, say: Callable[[str], None], *, num_rounds: int):
        self.plan, self.index, self.file, self.say = plan, index, file, say
        fewer = plan.suite.rounds.fewer
        self.order = process.turn([arm for arm in plan.suite.arms if index <= fewer.get(arm, index)], index - 1)
        self.num_rounds = num_rounds
        self.workers: dict[str, Worker] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.lost: dict[str, str] = {}  # arm -> why it is out of the rest of the launch
        self.skipped: dict[str, str] = {}  # arm -> why it cannot run here at all
        self.rates = roofline.Rates(0.0, {})
        self.reads: dict[Workload, list[float]] = defaultdict(list)  # bytes/s before each decode visit
        self.measured: list[tuple[str, Workload, list[dict], dict]] = []  # arm, workload, answers, prepare's facts
        self.outputs = arm_outputs.ArmOutputs(plan, self._logits)
        self.failed: dict[tuple[str, Workload], str] = {}
        self.control = visit.Control(plan.suite.verdicts.control_drift)
        self.compile_s = 0.0  # spent compiling so far

    def run(self) -> None:
        """Run every stage and append its records as it ends; workers are closed whatever happens."""
        suite = self.plan.suite
        self.file.append(self._record(records.LAUNCH_BEGUN, value=float(self.index), unit="count"))
        try:
            # The roofline's arrays and programs must not count in any arm's peak memory, so it runs in separate
            # processes on an accelerator, and after all stages on a CPU.
            if suite.roofline.enabled and self.plan.device != "cpu":
                self._start()
                self._roofline()
                self._close()
            self._start()
            for dtype in suite.dtypes():
                self._stage(Workload(kind="inference", dtype=dtype), suite.inference(dtype))
            for workload in suite.train_workloads():
                train = suite.train.model_dump(exclude={"enabled", "dtype", "num_layers"})
                self._stage(workload, [workload], num_layers=suite.train.num_layers, train=train)
            if suite.roofline.enabled and self.plan.device == "cpu":
                self._roofline()
                for each in self.measured:
                    self._append_measured(*each)  # replaces the records, now with the share of the roofline
            self.file.append(self._record(records.LAUNCH_DONE, value=float(self.index), unit="count"))
        finally:
            self._close()

    def _close(self) -> None:
        for worker in self.workers.values():
            worker.close()

    # Stages

    def _start(self) -> None:
        if self.index == 1:
            # Launch 1 compiles cold; later launches find its programs in the cache.
            shutil.rmtree(self.plan.workdir / CACHE, ignore_errors=True)
        for arm in self.order:
            self.say(f"start {arm}")
            log = self.plan.workdir / "logs" / f"launch{self.index}-{arm}.log"
            log.unlink(missing_ok=True)
            self.workers[arm] = start_worker(self.plan, arm, log)
            answer = self._ask(arm, "start", **self._places())
            if answer is None:
                continue
            self.versions[arm] = answer["versions"]
            if answer["skip"]:
                self.skipped[arm] = answer["skip"]
                self.workers[arm].close()
                continue
            self._append(arm, "start_s", Workload(), [answer["seconds"]])
            self._append(arm, "import_bytes", Workload(), [answer["level_bytes"]])

    def _places(self) -> dict[str, str]:
        """Return the arguments of a worker's start request."""
        model, programs = self.plan.model, self.plan.workdir / CACHE / PROGRAMS
        places = {"checkpoint": model.folder, "file": model.file, "programs": programs}
        return {"device": self.plan.device} | {name: str(place) for name, place in places.items()}

    def _roofline(self) -> None:
        """Measure read bandwidth and matmul rate with the library of each arm; the best wins."""
        self.say("roofline")
        settings = self.plan.suite.roofline
        reads, products = {}, defaultdict(dict)
        for arm, row in ARMS.items():
            is_known = row.library is None or row.library in {ARMS[name].library for name in reads}
            if is_known or arm not in self._alive(quietly=True):
                continue
            answer = self._ask(arm, "read", size=settings.read_bytes, repeats=settings.repeats)
            if answer is not None:
                reads[arm] = roofline.rate(settings.read_bytes, answer["seconds"])
            for dtype in settings.dtypes:
                for shape in settings.gemm_sizes:
                    answer = self._ask(arm, "gemm", shape=list(shape), dtype=dtype, repeats=settings.repeats)
                    if answer is not None:
                        rate = roofline.rate(2 * math.prod(shape), answer["seconds"])
                        products[dtype][f"{arm} {'x'.join(map(str, shape))}"] = rate
        if not reads:
            return
        best = {dtype: max(rates.values()) for dtype, rates in products.items()}
        self.rates = roofline.Rates(max(reads.values()), best)
        size = Workload(kind="read", dtype="float32")
        rows = [self._record("read_bandwidth_bytes_per_s", size, max(reads.values()), "bytes/s", detail=reads)]
        for dtype, rate in best.items():
            gemm = Workload(kind="gemm", dtype=dtype)
            rows.append(self._record("gemm_flops_per_s", gemm, rate, "FLOP/s", detail=products[dtype]))
        self.file.append(*rows)

    def _stage(
        self, stage: Workload, workloads: list[Workload], *, num_layers: int | None = None, train: dict | None = None
    ) -> None:
        """Load one dtype in every arm, prepare, warm up, measure in rounds, unload."""
        ready: dict[tuple[str, Workload], dict] = {}
        for arm in self._alive():
            self.say(f"{stage.label()}: load and compile {arm}")
            answer = self._ask(arm, "load", dtype=stage.dtype, num_layers=num_layers, train=train)
            if answer is None:
                reason = self.lost.get(arm, "the model could not be loaded in this arm")
                self._append_absent(arm, workloads, "error", reason)
                continue
            for workload in workloads:
                facts = self._prepare(arm, workload)
                if facts is not None:
                    ready[arm, workload] = facts
            if train is None and "seconds" in answer and any((arm, each) in ready for each in workloads):
                self._append(arm, "load_s", Workload(kind="load", dtype=stage.dtype), [answer["seconds"]])
        samples = self._rounds(stage, workloads, ready)
        samples = {key: answers for key, answers in samples.items() if key not in self.failed}  # an error, no rates
        if self.plan.suite.decode.latency:
            self._latencies([each for each in workloads if each.kind == "decode"], ready)
        for (arm, workload), answers in samples.items():
            answers = answers[visit.settled([sum(sample_rates.seconds_of(answer)) for answer in answers]) :]
            self.measured.append((arm, workload, answers, ready[arm, workload]))
            self._append_measured(*self.measured[-1])
        self._append_tokens(workloads)
        for arm in self._alive(quietly=True):
            has_run = any((arm, each) in ready for each in workloads)  # else the arm holds no model in this stage
            for metric, size in (self._ask(arm, "memory") or {}).items() if has_run else ():
                self._append(arm, metric, stage, [size])
            self._ask(arm, "unload")

    def _prepare(self, arm: str, workload: Workload) -> dict | None:
        """Compile and warm up one workload; None when it failed (the failure is kept)."""
        facts = self._ask(arm, "prepare", workload, workload=workload.model_dump())
        if facts is None:
            return None
        if "skip" in facts:
            self._append_absent(arm, [workload], "skipped", facts["skip"])
            return None
        for _ in range(self.plan.suite.rounds.warmup):
            answer = self._ask(arm, "warm", workload, workload=workload.model_dump(), inputs=self.plan.inputs[workload])
            if answer is None:
                return None
            if workload.kind == "train":
                self.outputs.note(arm, workload, answer)  # the loss of the first step
        if "compile_s" in facts:
            name = "compile_cold_s" if self.index == 1 else "compile_warm_s"
            self._append(arm, name, workload, [facts["compile_s"]])
            self.compile_s += facts["compile_s"]
        for name in ("temp_bytes", "argument_bytes", "flops"):
            if facts.get(name) is not None:
                self._append(arm, name, workload, [facts[name]])
        return facts

    def _rounds(
        self, stage: Workload, workloads: list[Workload], ready: dict
    ) -> dict[tuple[str, Workload], list[dict]]:
        samples: dict[tuple[str, Workload], list[dict]] = defaultdict(list)
        joules: dict[tuple[str, Workload], list[float]] = defaultdict(list)
        before, stalls = len(self.control.seconds), 0
        self.control.is_calm()
        for index, workload in itertools.product(range(self.num_rounds), workloads):
            self.say(f"{stage.label()}: round {index + 1} of {self.num_rounds}, {workload.label()}")
            with visit.competing(self.plan.suite.rounds.competing):
                for arm in self.order if index % 2 == 0 else self.order[::-1]:
                    if (arm, workload) not in ready or (arm, workload) in self.failed or arm in self.lost:
                        continue
                    self._read(workload)
                    measure = functools.partial(self._sample, arm, workload)
                    made = visit.visit(measure, self.control, sample_s=self.plan.suite.sample_s(workload.kind))
                    samples[arm, workload] += made.answers
                    stalls += made.repeats
                    if made.joules is not None:
                        num_tokens = sample_rates.tokens_of(workload) * len(made.answers)
                        joules[arm, workload].append(made.joules / num_tokens)
        control = Workload(kind="control", dtype=stage.dtype, batch=int(stage.kind == "train"))
        seconds = tuple(self.control.seconds[before:])
        detail = {"visits_made_again": stalls} if stalls else {}
        self.file.append(
            self._record("control_s", control, verdicts.median(seconds), "s", samples=seconds, detail=detail)
        )
        for workload in [each for each in workloads if self.reads[each]]:
            reads = tuple(self.reads[workload])
            self.file.append(self._record("reads_beside", workload, verdicts.median(reads), "bytes/s", samples=reads))
        for (arm, workload), values in joules.items():
            if (arm, workload) in self.failed:
                continue
            self._append(arm, "energy_j_per_token", workload, values)
        return {key: answers for key, answers in samples.items() if answers}

    def _read(self, workload: Workload) -> None:
        """Measure the read bandwidth once more, if the suite asks for it before each decode visit."""
        settings, alive = self.plan.suite.roofline, self._alive(quietly=True)
        arm = next((arm for arm, row in ARMS.items() if row.library and arm in alive), None)
        if workload.kind != "decode" or not (settings.enabled and settings.in_rounds and arm):
            return
        if READER not in self.workers:  # a separate process, so that its array is in no arm's peak memory
            log = self.plan.workdir / "logs" / f"launch{self.index}-{READER}.log"
            log.unlink(missing_ok=True)
            self.workers[READER] = start_worker(self.plan, arm, log)
            if (answer := self._ask(READER, "start", **self._places())) is None or answer["skip"]:
                self.lost.setdefault(READER, "cannot start")  # so that it gets no further requests
        if answer := self._ask(READER, "read", size=settings.read_bytes, repeats=3):
            self.reads[workload].append(roofline.rate(settings.read_bytes, answer["seconds"]))

    def _latencies(self, workloads: list[Workload], ready: dict) -> None:
        """Record the seconds of every token of one generation per arm."""
        for workload in workloads:
            for arm in self.order:
                if (arm, workload) in ready and (arm, workload) not in self.failed and arm not in self.lost:
                    request = {"workload": workload.model_dump(), "inputs": self.plan.inputs[workload]}
                    answer = self._ask(arm, "token_seconds", workload, metric="token_s", **request)
                    if answer and answer["seconds"]:
                        self._append(arm, "token_s", workload, answer["seconds"])

    # Records

    def _record(self, metric: str, workload: Workload = Workload(), value=None, unit: str = "", **fields):
        return self.plan.record(metric, workload=workload, value=value, unit=unit, launch=self.index, **fields)

    def _append(self, arm: str, metric: str, workload: Workload, values: list[float], **detail) -> None:
        self.file.append(self._record(
            metric, workload, verdicts.median(values), sample_rates.unit_of(metric), arm=arm, detail=detail,
            samples=tuple(map(float, values)), versions=self.versions.get(arm, {}),
        ))  # fmt: skip

    def _append_absent(self, arm: str, workloads: list[Workload], status: str, reason: str) -> None:
        """Append records of the workloads for which an arm has no rate, with the reason."""
        self.file.append(
            *(self._record(sample_rates.main_metric(x), x, arm=arm, status=status, reason=reason) for x in workloads)
        )

    def _append_measured(self, arm: str, workload: Workload, answers: list[dict], facts: dict) -> None:
        """Append the records of a workload's samples; a second call replaces those of the first."""
        self._append_rates(arm, workload, answers, facts)
        if workload.kind == "train" and self.plan.suite.train.form == "run":
            self._append_mfu(arm, workload, answers, facts["device_kind"])

    def _append_rates(self, arm: str, workload: Workload, answers: list[dict], facts: dict) -> None:
        products = {"single_row": facts["single_row"]} if workload.kind == "decode" and "single_row" in facts else {}
        for metric, values in sample_rates.rates(workload, answers).items():
            detail = {}
            if metric.endswith("tokens_per_s"):
                config = self.plan.trained_config() if workload.kind == "train" else self.plan.model.config
                read = verdicts.median(self.reads[workload]) if self.reads[workload] else self.rates.read_bytes_per_s
                limits = self.rates._replace(read_bytes_per_s=read)
                share = roofline.share(
                    config, workload, verdicts.median(values), limits, weight_bytes=facts.get("weight_bytes")
                )
                detail = products | ({} if share is None else {"share_of_roofline": share})
            self._append(arm, metric, workload, values, **detail)

    def _append_mfu(self, arm: str, workload: Workload, answers: list[dict], device_kind: str) -> None:
        """Record the MFU: the model's FLOP/s over the device's rate, with attention counted in full and by half.

        The rate is the data sheet's if the device has one (observe.py), else the one measured in this launch.
        """
        known = observe.peak_flops(device_kind, workload.dtype)
        peak = known or self.rates.gemm_flops_per_s.get(workload.dtype)
        if not peak:
            return
        for metric, is_causal in (("train_mfu", False), ("train_mfu_causal", True)):
            work = observe.flops_per_token(self.plan.trained_config(), workload.prompt_tokens, is_causal=is_causal)
            values = [work * rate / peak for rate in sample_rates.rates(workload, answers)["train_tokens_per_s"]]
            detail = {"peak_flops_per_s": peak, "peak": "data sheet" if known else "measured", "flops_per_token": work}
            self._append(arm, metric, workload, values, **detail)

    def _append_tokens(self, workloads: list[Workload]) -> None:
        """Record the digest of each arm's output and where it first differs from the baseline's."""
        for workload in workloads:
            for arm, is_same, detail in self.outputs.compared(workload):
                self.file.append(self._record("tokens", workload, float(is_same), "count", arm=arm, detail=detail))

    def _logits(self, arm: str, tokens: list[int]) -> list[float] | None:
        """Return an arm's next-token logits [V] after one row's tokens; None if it fails."""
        answer = self._ask(arm, "logits", tokens=tokens)
        return answer and answer["logits"]

    def _sample(self, arm: str, workload: Workload) -> dict | None:
        """Measure one workload of an arm once and keep its output; None if it fails."""
        request = {"workload": workload.model_dump(), "inputs": self.plan.inputs[workload]}
        answer = self._ask(arm, "measure", workload, **request)
        if answer is not None:
            self.outputs.note(arm, workload, answer)
        return answer

    # Workers

    def _ask(
        self, arm: str, operation: str, for_workload: Workload | None = None, *, metric: str | None = None, **arguments
    ) -> dict | None:
        """Send a request; a failure is recorded and returns None. metric: of the error record; None = the main one."""
        if arm in self.lost:
            return None
        try:
            return self.workers[arm].request(operation, **arguments)
        except WorkerError as error:
            reason = str(error)
        self.say(f"error: {reason}")
        if not self.workers[arm].alive:
            self.lost[arm] = reason
        if for_workload is not None:
            self.failed[arm, for_workload] = reason
        metric = metric or (operation if for_workload is None else sample_rates.main_metric(for_workload))
        self.file.append(self._record(metric, for_workload or Workload(), arm=arm, status="error", reason=reason))
        return None

    def _alive(self, *, quietly: bool = False) -> list[str]:
        """Return the arms that can still run; unless quietly, record why a skipped arm's workloads are missing."""
        for arm in self.order if not quietly else ():
            if arm in self.skipped and arm not in self.lost:
                self._append_absent(arm, self.plan.suite.workloads(), "skipped", self.skipped[arm])
                self.lost[arm] = self.skipped[arm]
        return [arm for arm in self.order if arm not in self.lost and arm not in self.skipped]


def start_worker(plan: Plan, arm: str, log: Path) -> Worker:
    """Start an arm's process with the environment and the time limit of a run."""
    library = ARMS[arm.removesuffix(arm_table.AGAIN)].library or "PyTorch"  # llama.cpp: glibc's default arenas too
    environment = worker_environment(plan.device, cache=plan.workdir / CACHE, threads=plan.threads, library=library)
    limit_s = plan.suite.rounds.worker_timeout_s
    return Worker(arm, WORKER, environment=environment, log=log, threads=plan.threads, timeout_s=limit_s)


def worker_environment(device: str, *, cache: Path, threads: int, library: str = "XLA") -> dict[str, str]:
    """Return a worker's environment variables: jaxbench's own, offline, with the run's own compile cache."""
    return process.environment(device, threads=threads, library=library) | {
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),  # the run's own, so that launch 1 is cold
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
