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
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench import outputs
from jaxbench.gpu.stages import FLAGS, INTERRUPTED, Log, Stage, call, end_left
from jaxbench.measure import environment, records
from jaxbench.measure.records import Record, RecordFile

STAGE = "stage"  # metric of the record that says how a stage ended
LEAST_S = 15.0  # a stage is not started with less left
TAIL = 1500  # characters of a failed stage's output that its record keeps
REHEARSED = "--xla_backend_optimization_level=0"  # XLA's flag in a rehearsal, which is mostly spent on compiling
RUNNING = ".running"  # suffix after a stage's name: the file under `work` that names its command while it runs
KEPT = (records.RESULTS_NAME, "parity.json", "summary.json")  # files of a stage that its records are read from
PART_BYTES = 15 * 2**20  # of a returned file: a lent machine returns files of at most 16 MiB
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # a file that holds no records, or is gone
SHOWN = (
    "read_bandwidth_bytes_per_s", "gemm_flops_per_s", "prefill_tokens_per_s", "decode_tokens_per_s", "first_token_s",
    "weights_bytes_per_s", "largest_batch",
    "watermark_overhead", "layer_s", "train_tokens_per_s", "train_mfu", "train_mfu_causal", "device_peak_bytes",
    "train_validation_loss", "memory_tokens_per_s", "responses_per_minute", "compress_tokens_per_s",
    "detect_tokens_per_s", "attention_forward_flops_per_s", "attention_forward_backward_flops_per_s",
    "serve_tokens_per_s", "token_gap_s", "first_token_p99_s", "token_s", "token_gap_p99_s", "server_processor",
    "clients_processor", "serve_errors", "parity",
)  # fmt: skip


class Place(NamedTuple):
    """Where the stages of one call run and write."""

    device: str  # gpu, or cpu in a rehearsal
    is_rehearsal: bool
    results: Path  # folder
    work: Path  # folder of the stages' own files
    data: str = ""  # folder of texts brought along


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
    stages: Sequence[Stage], place: Place, *, budget_s: float, resume: bool, say: Callable[[str], None]
) -> list[Record]:
    """Run the stages that fit the budget, and return their `stage` records.

    resume: leave out stages that succeeded in results.jsonl with the same code, command, configurations and device,
      except those that repeat.

    Raises:
      ValueError: there are results of another call, and resume is False.
      KeyboardInterrupt: an interrupt came while a stage ran; its records are kept.
    """
    file, started = RecordFile(place.results / records.RESULTS_NAME), time.monotonic()
    if file.path.exists() and not resume:
        raise ValueError(f"gpu: {file.path} has results; --resume goes on with them, or name another --workdir")
    commit, facts = environment.commit(), machine()
    for mark in sorted(place.work.glob(f"*{RUNNING}")):  # its command would write the stage's files, hold the device
        if end_left(mark):
            say(f"{mark.stem}: ended what a killed call had left running")
    where = {"commit": commit, "device": place.device, "gpu": gpu_of(facts) if place.device == "gpu" else ""}
    finished = finished_stages(file, stages, **where, is_rehearsal=place.is_rehearsal)
    write_machine(place.results / "environment.json", facts)
    ended = []
    for stage in stages:
        if stage.name in finished and not stage.repeats:
            say(f"{stage.name}: done before")
            continue
        left = budget_s - (time.monotonic() - started)
        record = _unable(stage, left, place)
        if is_run := record is None:
            say(f"{stage.name}: up to {min(stage.limit_s, left):.0f} s of {left:.0f} left; {stage.about}")
            record = _run_one(stage, place, Keeper(file, stage, place, where["gpu"]), limit_s=min(stage.limit_s, left))
        record = _on(record.model_copy(update={"commit": commit, "time_utc": records.now_utc()}), place, where["gpu"])
        if is_run or record.key() not in {each.key() for each in file.read()}:  # keep how it ended before
            file.append(record)
        say(f"{stage.name}: {record.status}, {record.value or 0:.0f} s{f': {record.reason}' if record.reason else ''}")
        write_figures(file, place.results)
        ended.append(record)
        if record.reason == INTERRUPTED:
            raise KeyboardInterrupt
    return ended


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


class Keeper:
    """Copies a stage's records into results.jsonl, each record once, while it runs and when it has ended."""

    def __init__(self, file: RecordFile, stage: Stage, place: Place, gpu: str):
        self.folder = (place.work / stage.name).absolute()  # the command's working folder may not be this process's
        self._file, self._stage, self._place, self._gpu = file, stage, place, gpu
        self._kept: set[str] = set()
        self._looked: list[tuple] = []

    def __len__(self) -> int:
        """Number of records kept."""
        return len(self._kept)

    def look(self) -> None:
        """Keep new records if the stage's files have changed; a half-written file waits for the next look."""
        paths = [self.folder / name for name in KEPT]
        stats = []
        for path in paths:
            with contextlib.suppress(OSError):  # missing, or deleted meanwhile
                stat = path.stat()
                stats.append((path.name, stat.st_size, stat.st_mtime_ns))
        if stats != self._looked:
            self._looked = stats
            self.take()

    def take(self) -> str:
        """Keep new records; return why nothing could be read, else an empty string.

        Raises:
          OSError: results.jsonl cannot be written.
        """
        try:
            found = {record.model_dump_json(): record for record in kept_records(self.folder)}
        except UNREADABLE as error:
            return f"its records cannot be read: {error!r}"[:300]
        new = [line for line in found if line not in self._kept]
        self._file.append(*(_of_stage(found[line], self._stage, self._place, self._gpu) for line in new))
        self._kept.update(new)
        return ""


def _run_one(stage: Stage, place: Place, keeper: Keeper, *, limit_s: float) -> Record:
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
    log, reason = Log(place.results / "log.txt", f"== {stage.name}: {' '.join(words)}\n"), INTERRUPTED
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


def kept_records(folder: Path) -> list[Record]:
    """Return a stage's records: from results.jsonl, a training's summary, and each case of parity.json."""
    found = records.read_lines(folder / records.RESULTS_NAME) if (folder / records.RESULTS_NAME).exists() else []
    summary = folder / "summary.json"
    found += _of_training(json.loads(summary.read_text())) if summary.exists() else []
    for case in json.loads((folder / "parity.json").read_text()) if (folder / "parity.json").exists() else []:
        gates = [
            {name: gate.get(name) for name in ("id", "what", "passed", "error", "limit", "where")}
            for gate in case["gates"]
        ]
        found.append(
            Record(
                metric="parity", value=float(case["passed"]), unit="count", arm=case["case"], detail={"gates": gates}
            )
        )
    return found


def give_back(source: Path, target: Path) -> None:
    """Copy a file, in parts if it is large, replacing what an earlier call gave back."""
    content = source.read_bytes()
    starts = range(0, max(len(content), 1), PART_BYTES)
    names = [target.name] if len(starts) == 1 else [f"{target.name}.part{number}" for number in range(len(starts))]
    for name, start in zip(names, starts, strict=True):
        with outputs.whole(target.with_name(name)) as temporary:
            temporary.write_bytes(content[start : start + PART_BYTES])
    for old in (target, *target.parent.glob(f"{target.name}.part*")):
        if old.name not in names:
            old.unlink(missing_ok=True)


def _of_training(summary: dict) -> list[Record]:
    """Return the records of a training's summary; other commands' summaries have none."""
    units = {"tokens_per_s": "tokens/s", "validation_loss": "nats/token", "mfu": "ratio", "mfu_causal": "ratio"}
    values = {name: summary.get(name) for name in units} if "backend" in summary else {}
    if not values.get("tokens_per_s"):  # a run without any step left to time
        values = {"validation_loss": values.get("validation_loss")}
    return [
        Record(metric=f"train_{name}", value=float(value), unit=units[name], arm=summary["backend"])
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    ]


def _of_stage(record: Record, stage: Stage, place: Place, gpu: str) -> Record:
    """Return a record as kept in results.jsonl, tagged by stage: others may measure the same of another model."""
    own = {"config_id": record.config_id or stage.name, "detail": record.detail | {STAGE: stage.name}}
    return _on(record.model_copy(update=own | {"device": record.device or place.device}), place, gpu)


def _on(record: Record, place: Place, gpu: str) -> Record:
    """Return a record tagged by GPU, so that it does not replace the records of another kind of GPU."""
    if not gpu:
        return record.model_copy(update={"device": record.device or place.device})
    own = {"config_id": f"{record.config_id} {gpu}".strip(), "detail": record.detail | {"gpu": gpu}}
    if record.run_id:  # it does not cover the GPU: a launch begun on one kind would drop the records of the other
        own["run_id"] = f"{record.run_id} {gpu}"
    return record.model_copy(update=own | {"device": record.device or place.device})


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
