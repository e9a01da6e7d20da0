"""The parts of a comparison other than the launches: parity proof, TPU compile, traces (S file).

Each runs in its own process, because it needs its own settings of JAX (float64, the TPU compiler). A failure becomes a
record with its reason, and the rest of the comparison continues.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from jaxbench import config, process_environment
from jaxbench.bench import launch
from jaxbench.bench.plan import Plan
from jaxbench.measure import records, tpu_compile
from jaxbench.measure.process import WorkerError, last_line
from jaxbench.measure.records import RecordFile

PARITY_TIMEOUT_S = 300
TPU_TIMEOUT_S = 600
ROOT = Path(__file__).resolve().parents[2]


def parity(plan: Plan, file: RecordFile, say: Callable[[str], None]) -> None:
    """Prove each JAX arm's model against PyTorch's in float64, layer by layer, and append the results."""
    for arm in plan.suite.parity:
        if _done(file, plan, "parity", arm=arm):
            continue
        say(f"parity: {arm} against torch_ref in float64, layer by layer")
        command = ["jaxbench.parity.run", "--case=transformer/smollm2", "--quick", f"--backend={arm}"]
        if plan.suite.model != "default":
            command.append(f"--model={plan.model.folder}")
        environment = process_environment.environment("cpu")
        output, reason = _run(command, environment, plan, f"parity-{arm}.json", PARITY_TIMEOUT_S)
        if reason:
            say(f"parity: {arm}: {reason}")
            file.append(plan.record("parity", arm=arm, status="error", reason=reason))
            continue
        detail = json.loads(output.read_text())
        file.append(plan.record("parity", value=float(detail["worst"]), unit="ratio", arm=arm, detail=detail))
        outcome = "passed" if detail["passed"] else "FAILED"
        say(f"parity: {arm}: worst relative difference {detail['worst']:.1e}, {outcome}")


def tpu(plan: Plan, file: RecordFile, say: Callable[[str], None]) -> None:
    """Compile the model's programs and the suite's training steps for TPU slices; append the compiler's figures."""
    settings = plan.suite.tpu
    if reason := tpu_compile.unavailable().removeprefix("tpu: "):
        names = [*settings.topologies, *(run.name() for run in settings.runs)]
        file.append(*(plan.record("tpu", device=name, status="skipped", reason=reason) for name in names))
        say(f"tpu: {reason}")
        return
    model = plan.workdir / "tpu-model.yaml"
    if settings.topologies:
        config.dump(plan.model.config, model)
    shapes = settings.model_dump(exclude={"topologies", "runs"}) | {"train_layers": plan.suite.train.num_layers}
    for topology in settings.topologies:
        command = ["jaxbench.bench.tpu", f"--topology={topology}", f"--model_config={model}"]
        command += [f"--{name}={value}" for name, value in shapes.items()]
        _compile(command, topology, f"for {topology}", f"tpu-{topology.replace(':', '-')}.jsonl", plan, file, say)
    for index, run in enumerate(settings.runs, start=1):
        command = ["jaxbench.training.tpu_train", f"--config={ROOT / run.config}", f"--topology={run.topology}"]
        command += [f"--set={change}" for change in run.set]
        _compile(command, run.name(), f"the step of {run.name()}", f"tpu-run-{index}.jsonl", plan, file, say)


def _compile(
    command: list[str], device: str, what: str, name: str, plan: Plan, file: RecordFile, say: Callable[[str], None]
) -> None:
    """Run a module that compiles for TPUs and append its records, which name their slice and, for a run, its mesh."""
    if _done(file, plan, "tpu", device=device):
        return
    say(f"tpu: compile {what}")
    output, reason = _run(command, tpu_compile.ENVIRONMENT, plan, name, TPU_TIMEOUT_S)
    if reason:
        say(f"tpu: {device}: {reason}")
        file.append(plan.record("tpu", device=device, status="error", reason=reason))
        return
    rows = records.read_lines(output)
    stamped = [row.model_copy(update={**plan.common, "device": row.device}) for row in rows]
    file.append(*stamped, plan.record("tpu", device=device, value=float(len(rows)), unit="count"))


def profile(plan: Plan, file: RecordFile, say: Callable[[str], None]) -> None:
    """Trace each inference workload of the first dtype once on every arm that can: xprof (JAX), Chrome (PyTorch)."""
    [dtype, *_] = plan.suite.dtypes()
    for arm in plan.suite.arms:
        log = plan.workdir / "logs" / f"profile-{arm}.log"
        try:
            with launch.start_worker(plan, arm, log) as worker:
                places = {"checkpoint": str(plan.model.folder), "file": str(plan.model.file)}
                if worker.request("start", device=plan.device, **places)["skip"]:
                    continue
                worker.request("load", dtype=dtype)
                for workload in plan.suite.inference(dtype):
                    dumped, inputs = workload.model_dump(), plan.inputs[workload]
                    worker.request("prepare", workload=dumped)
                    worker.request("measure", workload=dumped, inputs=inputs)
                    folder = str(plan.workdir / "profile")
                    path = worker.request("profile", workload=dumped, inputs=inputs, folder=folder)["path"]
                    say(f"profile: {path}")
        except WorkerError as error:
            say(f"profile: {error}")
            file.append(plan.record("profile", arm=arm, status="error", reason=str(error)))


def _done(file: RecordFile, plan: Plan, metric: str, *, device: str | None = None, arm: str | None = None) -> bool:
    return any(
        record.metric == metric and record.status == "ok"
        for record in file.of_run(plan.run_id)
        if device in (None, record.device) and arm in (None, record.arm)
    )


def _run(command: list[str], environment: dict[str, str], plan: Plan, name: str, timeout_s: float) -> tuple[Path, str]:
    """Run a module in a new process, logging to the workdir; return its output file and why it failed, or ""."""
    output = plan.workdir / name
    output.unlink(missing_ok=True)
    log = plan.workdir / "logs" / f"{output.stem}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, f"--output={output}"],
            env=os.environ | environment, cwd=ROOT, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return output, f"took longer than {timeout_s:.0f} s"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if output.exists():
        return output, ""
    return output, f"exit code {code}: {last_line(log.read_text(errors='replace'), 'no output')}"
