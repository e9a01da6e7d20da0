"""Run the stages one after another within a budget of seconds, keeping results as they come (S file).

    results.jsonl     records of every stage (measure/records.py), and one `stage` record each with its command and time
    figures.csv       one line per figure
    environment.json  the machine, and under `earlier` the machines of the calls that this one resumes
    log.txt           what the commands printed
    STAGE-FILE        what a stage returns, such as weights; in parts STAGE-FILE.part0, ... if it is large

A stage works in its own folder under `work`, of which nothing else is kept; a long training that is run again with the
same folder resumes from its last checkpoint there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

from jaxbench import outputs
from jaxbench.gpu.kept import KEPT, STAGE, Keeper, Place, Shared, give_back, on_gpu
from jaxbench.gpu.stages import FLAGS, INTERRUPTED, Log, Stage, call, end_left
from jaxbench.measure import environment, records
from jaxbench.measure.records import Record, RecordFile

LEAST_S = 15.0  # a stage is not started with less left
TAIL = 1500  # characters of a failed stage's output that its record keeps
REHEARSED = "--xla_backend_optimization_level=0"  # XLA's flag in a rehearsal, which is mostly spent on compiling
RUNNING = ".running"  # suffix after a stage's name: the file under `work` that names its command while it runs
SHOWN = (
    "read_bandwidth_bytes_per_s", "gemm_flops_per_s", "prefill_tokens_per_s", "decode_tokens_per_s", "first_token_s",
    "weights_bytes_per_s", "largest_batch",
    "watermark_overhead", "layer_s", "train_tokens_per_s", "train_mfu", "train_mfu_causal", "device_peak_bytes",
    "train_validation_loss", "memory_tokens_per_s", "responses_per_minute", "compress_tokens_per_s",
    "detect_tokens_per_s", "attention_forward_flops_per_s", "attention_forward_backward_flops_per_s",
    "serve_tokens_per_s", "token_gap_s", "first_token_p99_s", "token_s", "token_gap_p99_s", "server_processor",
    "clients_processor", "serve_errors", "parity",
)  # fmt: skip


@contextlib.contextmanager
def _hangup_interrupts() -> Iterator[None]:
    """Let a closed terminal (SIGHUP) interrupt the block, unless SIGHUP is handled already (nohup)."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGHUP) != signal.SIG_DFL:
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt(signal.SIGHUP.name)

    signal.signal(signal.SIGHUP, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@_hangup_interrupts()
def run(
    stages: Sequence[Stage],
    place: Place,
    *,
    budget_s: float,
    resume: bool,
    say: Callable[[str], None],
    at_once: int = 1,
) -> list[Record]:
    """Run the stages that fit the budget, and return their `stage` records.

    resume: leave out stages that succeeded in results.jsonl with the same code, command, configurations and device,
      except those that repeat.
    at_once: how many run beside one another, which is for rehearsals: figures would disturb each other.

    Raises:
      ValueError: there are results of another call, and resume is False.
      KeyboardInterrupt: an interrupt came while a stage ran; its records are kept.
    """
    file = RecordFile(place.results / records.RESULTS_NAME)
    if file.path.exists() and not resume:
        raise ValueError(f"gpu: {file.path} has results; --resume goes on with them, or name another --workdir")
    for mark in sorted(place.work.glob(f"*{RUNNING}")):  # its command would write the stage's files, hold the device
        if end_left(mark):
            say(f"{mark.stem}: ended what a killed call had left running")
    facts = machine()
    call = _Call(file, place, budget_s, say, gpu_of(facts) if place.device == "gpu" else "", at_once)
    where = {"commit": call.commit, "device": place.device, "gpu": call.gpu}
    finished = finished_stages(file, stages, **where, is_rehearsal=place.is_rehearsal)
    write_machine(place.results / "environment.json", facts)
    left = []
    for stage in stages:
        if stage.name in finished and not stage.repeats:
            say(f"{stage.name}: done before")
        else:
            left.append(stage)
    if at_once == 1:
        return [call.stage(stage) for stage in left]
    return call.beside_one_another(left)


class _Call:
    """The stages of one call: each is run within what is left of the budget, and kept."""

    def __init__(
        self, file: RecordFile, place: Place, budget_s: float, say: Callable[[str], None], gpu: str, at_once: int
    ):
        self.commit, self.gpu = environment.commit(), gpu
        self._file, self._place, self._say, self._at_once = file, place, say, at_once
        self._end = time.monotonic() + budget_s
        self._shared = Shared(threading.RLock(), threading.Event())

    def stage(self, stage: Stage) -> Record:
        """Run one stage, keep how it ended, and return that.

        Raises:
          KeyboardInterrupt: it was interrupted; what it measured is kept.
        """
        if self._shared.stop.is_set():
            raise KeyboardInterrupt
        left, place = self._end - time.monotonic(), self._place
        record = _unable(stage, left, place)
        if is_run := record is None:
            limit_s = min(stage.limit_s, left)
            self._say(f"{stage.name}: up to {limit_s:.0f} s of {left:.0f} left; {stage.about}")
            keeper = Keeper(self._file, stage, place, self.gpu, self._shared)
            name = "log.txt" if self._at_once == 1 else f"{stage.name}.log"
            record = _run_one(stage, place, keeper, place.results / name, limit_s=limit_s)
        record = on_gpu(
            record.model_copy(update={"commit": self.commit, "time_utc": records.now_utc()}), place, self.gpu
        )
        with self._shared.lock:
            if is_run or record.key() not in {each.key() for each in self._file.read()}:  # keep how it ended before
                self._file.append(record)
            why = f": {record.reason}" if record.reason else ""
            self._say(f"{stage.name}: {record.status}, {record.value or 0:.0f} s{why}")
            write_figures(self._file, place.results)
            if is_run and self._at_once > 1:
                _append_log(place.results / name, place.results / "log.txt")
        if record.reason == INTERRUPTED:
            raise KeyboardInterrupt
        return record

    def beside_one_another(self, stages: Sequence[Stage]) -> list[Record]:
        """Run the stages, some at once in the order given; an interrupt or an error ends those that run."""
        with futures.ThreadPoolExecutor(self._at_once) as pool:
            running = [pool.submit(self.stage, stage) for stage in stages]
            try:
                ended, _ = futures.wait(running, return_when=futures.FIRST_EXCEPTION)
                for each in ended:
                    each.result()  # raises what ended one of them; the others may run for long
                return [each.result() for each in running]
            except BaseException:  # also an interrupt of this thread
                self._shared.stop.set()
                pool.shutdown(cancel_futures=True)
                raise


def _append_log(path: Path, whole: Path) -> None:
    """Move what a stage printed to the end of the log of all."""
    with open(path, "rb") as source, open(whole, "ab") as target:
        target.write(b"\n" if target.tell() else b"")
        shutil.copyfileobj(source, target)
    path.unlink()


def finished_stages(
    file: RecordFile, stages: Sequence[Stage], *, commit: str, device: str, gpu: str, is_rehearsal: bool = False
) -> set[str]:
    """Return the names of stages that succeeded with this code and command on this device; gpu: gpu_of's name."""
    wanted = {stage.name: _command(stage, is_rehearsal=is_rehearsal) for stage in stages}
    return {
        record.arm
        for record in file.read()
        if record.metric == STAGE and record.status == "ok" and (record.commit, record.device) == (commit, device)
        and record.detail.get("gpu", "") == gpu and wanted.get(record.arm, {}).items() <= record.detail.items()
    }  # fmt: skip


def machine() -> dict:
    """Describe the machine, including its GPU and driver if nvidia-smi is available, and the user's flags of XLA."""
    facts = environment.describe(threads=environment.usable_cores())
    if flags := os.environ.get(FLAGS):
        facts["xla_flags"] = flags
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,clocks.max.sm,power.limit", "--format=csv"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        facts["nvidia_smi"] = [] if done.returncode else done.stdout.splitlines()  # an error message is not a GPU
    except (OSError, subprocess.TimeoutExpired):
        facts["nvidia_smi"] = []
    return facts


def gpu_of(facts: dict) -> str:
    """Return nvidia-smi's name of the machine's GPU, such as NVIDIA H200, with the count if several; else empty."""
    names = [line.partition(",")[0].strip() for line in facts.get("nvidia_smi", [])[1:] if line.strip()]
    return ", ".join(dict.fromkeys(names)) + (f" x {len(names)}" if len(names) > 1 else "")


def write_machine(path: Path, facts: dict) -> None:
    """Write environment.json; its previous content goes under `earlier` if machine, versions or commit differ."""
    earlier: list[dict] = []
    if path.is_file():
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # not such JSON: nothing to keep
            old = json.loads(path.read_text(encoding="utf-8"))
            before = old.pop("earlier", [])
            earlier = [each for each in (*(before if isinstance(before, list) else ()), old) if isinstance(each, dict)]
    same = ("host", "nvidia_smi", "versions", "commit", "xla_flags")
    earlier = [old for old in earlier if [old.get(name) for name in same] != [facts.get(name) for name in same]]
    outputs.write_json(path, facts | ({"earlier": earlier} if earlier else {}))


def figures(found: Sequence[Record]) -> list[dict]:
    """Return one row per record that has a value, without marks of stages, runs and launches, and without `tokens`."""
    rows = []
    for record in found:
        marks = (STAGE, records.RUN, records.LAUNCH_BEGUN, records.LAUNCH_DONE, "tokens")
        if record.metric in marks or record.value is None:
            continue
        share = record.detail.get("share_of_roofline")
        rows.append({
            "stage": record.detail.get(STAGE, ""), "gpu": record.detail.get("gpu", ""), "figure": record.metric,
            "arm": record.arm,
            "workload": record.workload.label(), "value": f"{record.value:.6g}", "unit": record.unit,
            "share_of_roofline": "" if share is None else f"{share:.3f}",
            "launch": record.launch, "samples": len(record.samples),
        })  # fmt: skip
    return rows


def write_figures(file: RecordFile, folder: Path) -> None:
    """Rewrite figures.csv."""
    rows = figures(file.read()) if file.path.exists() else []
    if rows:
        outputs.write_csv(folder / "figures.csv", rows)


def _unable(stage: Stage, left: float, place: Place) -> Record | None:
    """Return the record of a stage that cannot start (too little time, missing packages or texts), else None."""
    if missing := stage.missing():
        return _record(stage, "skipped", f"needs {', '.join(missing)}, not installed here")
    if stage.reads_data and not place.data and not place.is_rehearsal:
        return _record(stage, "skipped", "needs texts: name their folder by --data")
    least = LEAST_S if place.is_rehearsal else max(LEAST_S, stage.least_s)
    if left < least:  # a shorter stage after it may still fit
        return _record(stage, "skipped", f"{left:.0f} s of the budget were left, wanted {least:.0f}; use --resume")
    return None


def _run_one(stage: Stage, place: Place, keeper: Keeper, log_path: Path, *, limit_s: float) -> Record:
    """Run one stage and keep what it measures; return the record of how it ended."""
    folder = keeper.folder
    folder.mkdir(parents=True, exist_ok=True)
    how = {"work": str(folder), "device": place.device, "data": place.data}
    words, own = stage.words(**how, is_rehearsal=place.is_rehearsal, python=sys.executable), stage.settings(**how)
    if place.is_rehearsal:
        own[FLAGS] = f"{own.get(FLAGS, '')} {REHEARSED}".strip()
    for name in KEPT:  # else files of an earlier call would be taken for this one's
        if (folder / name).exists():
            (folder / name).replace(folder / f"earlier-{name}")
    begun, clock = time.monotonic(), time.time()
    log, reason = Log(log_path, f"== {stage.name}: {' '.join(words)}\n"), INTERRUPTED
    command = _command(stage, is_rehearsal=place.is_rehearsal)  # as of the start
    try:
        with log, contextlib.suppress(KeyboardInterrupt):  # a second interrupt, while the command was being ended
            mark = place.work / f"{stage.name}{RUNNING}"
            reason = call(words, own, limit_s, log, keeper.look, mark)
    finally:
        seconds = time.monotonic() - begun
        unread = keeper.take()
        reason = reason or unread
    try:
        for name in stage.returned:
            if (folder / name).is_file() and (folder / name).stat().st_mtime >= clock:  # not of an earlier call
                give_back(folder / name, place.results / f"{stage.name}-{name}")
    except OSError as error:
        reason = reason or f"what it returns cannot be written: {error}"[:300]
    status = "error" if reason else "ok"
    detail = command | {"figures": len(keeper)} | ({"tail": log.said[-TAIL:]} if reason else {})
    return _record(stage, status, reason, value=seconds, detail=detail)


def _command(stage: Stage, *, is_rehearsal: bool) -> dict[str, Any]:
    """Return the settings that determine a stage's figures, by which a resumed call recognises the stage."""
    found = {"command": stage.command, "environment": stage.environment}
    named = stage.configurations(is_rehearsal=is_rehearsal)  # the commit does not cover their content
    return found | ({"configurations": named} if named else {})


def _record(stage: Stage, status: str, reason: str, **fields) -> Record:
    return Record(metric=STAGE, arm=stage.name, status=status, reason=reason, unit="s", **fields)


def table(folder: Path):
    """Return the results as a rich table: one line per stage, then one per figure of SHOWN."""
    from rich.markup import escape
    from rich.table import Table

    shown = Table(title=f"figures of {folder}", title_justify="left")
    for name in ("stage", "figure", "arm", "workload", "value", "share"):
        shown.add_column(name, justify="right" if name in ("value", "share") else "left", overflow="fold")
    read = RecordFile(folder / records.RESULTS_NAME).read()
    has_several = len({record.detail.get("gpu", "") for record in read}) > 1

    def named(stage: str, gpu: str) -> str:
        return f"{stage} ({gpu})" if has_several and gpu else stage

    for record in read:
        if record.metric == STAGE:
            name, took = named(record.arm, record.detail.get("gpu", "")), f"{record.value or 0:.0f} s"
            shown.add_row(name, record.status, "", escape(record.reason), took, "")
    for row in figures(read):
        if row["figure"] in SHOWN:
            name, value = named(row["stage"], row["gpu"]), f"{float(row['value']):,.4g} {row['unit']}"
            shown.add_row(name, row["figure"], row["arm"], row["workload"], value, row["share_of_roofline"])
    return shown
