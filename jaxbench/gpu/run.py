"""Runs the stages inside a budget of seconds, one after another; each finished one is kept at once (S file).

    results.jsonl     records of every stage (measure/records.py), and one `stage` record each with its command and time
    figures.csv       one line a figure
    environment.json  the machine
    log.txt           what the commands printed
    STAGE-FILE        what a stage returns, such as weights; in parts STAGE-FILE.part0, ... where it is large

A stage works in a folder of its own under `work`, of which nothing else is kept; a long training that is run again with
the same folder goes on from its last checkpoint there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxbench import outputs, process_environment, store
from jaxbench.gpu.stages import Stage
from jaxbench.measure import environment, records
from jaxbench.measure.process import last_line
from jaxbench.measure.records import Record, RecordFile

ROOT = Path(__file__).resolve().parents[2]
STAGE = "stage"  # metric of the record that says how a stage ended
LEAST_S = 15.0  # a stage is not begun with less left
TAIL = 1500  # characters of a failed stage's output that its record keeps
GRACE_S = 10.0  # between asking a stage to end and ending it
KEPT = (records.RESULTS_NAME, "parity.json", "summary.json")  # files of a stage that its records are read from
PART_BYTES = 15 * 2**20  # of a returned file: what comes back from a lent machine has files of 16 MiB at most
SHOWN = (
    "read_bandwidth_bytes_per_s", "gemm_flops_per_s", "prefill_tokens_per_s", "decode_tokens_per_s", "first_token_s",
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
    data: str = ""  # folder of texts that were carried along


def run(
    stages: Sequence[Stage], place: Place, *, budget_s: float, resume: bool, say: Callable[[str], None]
) -> list[Record]:
    """Run the stages that fit the budget, and return their `stage` records.

    resume: stages that ended well in results.jsonl, of the same code and device, are left out.

    Raises:
      ValueError: there are results of another call, and resume is False.
    """
    file, started = RecordFile(place.results / records.RESULTS_NAME), time.monotonic()
    if file.path.exists() and not resume:
        raise ValueError(f"gpu: {file.path} has results; --resume goes on with them, or name another --workdir")
    commit = environment.commit()
    finished = finished_stages(file, commit=commit, device=place.device) if file.path.exists() else set()
    outputs.write_json(place.results / "environment.json", machine())
    ended = []
    for stage in stages:
        if stage.name in finished and not stage.repeats:
            say(f"{stage.name}: done before")
            continue
        left = budget_s - (time.monotonic() - started)
        record = _unable(stage, left, place)
        if record is None:
            say(f"{stage.name}: up to {min(stage.limit_s, left):.0f} s of {left:.0f} left; {stage.about}")
            record, found = _run_one(stage, place, limit_s=min(stage.limit_s, left))
            file.append(*(_of_stage(each, stage) for each in found))
        record = record.model_copy(update={"device": place.device, "commit": commit, "time_utc": records.now_utc()})
        file.append(record)
        say(f"{stage.name}: {record.status}, {record.value or 0:.0f} s{f': {record.reason}' if record.reason else ''}")
        write_figures(file, place.results)
        ended.append(record)
    return ended


def finished_stages(file: RecordFile, *, commit: str, device: str) -> set[str]:
    """Names of the stages that ended well with this code on this device."""
    return {
        record.arm
        for record in file.read()
        if record.metric == STAGE and record.status == "ok" and (record.commit, record.device) == (commit, device)
    }


def machine() -> dict:
    """The machine, its GPU and driver included where nvidia-smi is there."""
    facts = environment.describe(threads=environment.usable_cores())
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,clocks.max.sm,power.limit", "--format=csv"]
    try:
        facts["nvidia_smi"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        facts["nvidia_smi"] = []
    return facts


def figures(found: Sequence[Record]) -> list[dict]:
    """One row a figure: those of arms, the median of its launches, and of the whole run."""
    rows = []
    for record in found:
        marks = (STAGE, records.RUN, records.LAUNCH_BEGUN, records.LAUNCH_DONE, "tokens")
        if record.metric in marks or record.value is None:
            continue
        share = record.detail.get("share_of_roofline")
        rows.append({
            "stage": record.detail.get(STAGE, ""), "figure": record.metric, "arm": record.arm,
            "workload": record.workload.label(), "value": f"{record.value:.6g}", "unit": record.unit,
            "share_of_roofline": "" if share is None else f"{share:.3f}",
            "launch": record.launch, "samples": len(record.samples),
        })  # fmt: skip
    return rows


def write_figures(file: RecordFile, folder: Path) -> None:
    """Write figures.csv anew."""
    rows = figures(file.read()) if file.path.exists() else []
    if rows:
        outputs.write_csv(folder / "figures.csv", rows)


def _unable(stage: Stage, left: float, place: Place) -> Record | None:
    """Record of a stage that is not begun: too little time, or packages or texts that are missing."""
    if missing := stage.missing():
        return _record(stage, "skipped", f"needs {', '.join(missing)}, not installed here")
    if stage.reads_data and not place.data and not place.is_rehearsal:
        return _record(stage, "skipped", "needs texts: name their folder by --data")
    if left < LEAST_S:
        return _record(stage, "skipped", f"{left:.0f} s of the budget were left, wanted {LEAST_S:.0f}; use --resume")
    return None


def _run_one(stage: Stage, place: Place, *, limit_s: float) -> tuple[Record, list[Record]]:
    """Run one stage; how it ended, and its records."""
    folder = place.work / stage.name
    folder.mkdir(parents=True, exist_ok=True)
    how = {"work": str(folder), "device": place.device, "data": place.data}
    words = stage.words(**how, is_rehearsal=place.is_rehearsal, python=sys.executable)
    for name in KEPT:  # of an earlier call, whose records these would pass for
        if (folder / name).exists():
            (folder / name).replace(folder / f"earlier-{name}")
    begun, clock = time.monotonic(), time.time()
    reason, printed = _call(words, stage.settings(**how), limit_s)
    seconds = time.monotonic() - begun
    store.append_text(place.results / "log.txt", f"== {stage.name}: {' '.join(words)}\n{printed}\n")
    try:
        found = kept_records(folder)
    except (ValueError, KeyError, TypeError) as error:
        found, reason = [], reason or f"its records cannot be read: {error!r}"[:300]
    try:
        for name in stage.returned:
            if (folder / name).is_file() and (folder / name).stat().st_mtime >= clock:  # not of an earlier call
                give_back(folder / name, place.results / f"{stage.name}-{name}")
    except OSError as error:
        reason = reason or f"what it returns cannot be written: {error}"[:300]
    status = "error" if reason else "ok"
    detail = {"command": stage.command, "figures": len(found)} | ({"tail": printed[-TAIL:]} if reason else {})
    return _record(stage, status, reason, value=seconds, detail=detail), found


def _call(words: list[str], own: dict[str, str], limit_s: float) -> tuple[str, str]:
    """Why the command failed, empty where it did not, and what it printed."""
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    settings |= {"PYTHONUNBUFFERED": "1", process_environment.MARKER: ""} | own
    try:
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=settings, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"cannot be started: {error.strerror}: {words[0]}", ""
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"ended at its limit of {limit_s:.0f} s", _end(process)
    except BaseException:
        _end(process)
        raise
    if process.returncode == 0:
        return "", printed
    return f"exit code {process.returncode}: {last_line(printed, 'nothing printed')}", printed


def _end(process: subprocess.Popen) -> str:
    """End a command and all that it started, in sessions of their own too; what it printed."""
    import signal

    import psutil

    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=GRACE_S)
    with contextlib.suppress(ProcessLookupError):  # also where the command itself has ended: not all that it started
        os.killpg(process.pid, signal.SIGKILL)
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    try:
        return process.communicate(timeout=GRACE_S)[0] or ""
    except subprocess.TimeoutExpired:
        return ""


def kept_records(folder: Path) -> list[Record]:
    """Records of a stage: its results.jsonl, a training's summary, and what its parity.json says of each case."""
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
    """Copy a file, in parts where it is large, in place of what an earlier call gave back."""
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
    """Records of a training's summary; other commands' summaries have none."""
    units = {"tokens_per_s": "tokens/s", "validation_loss": "nats/token", "mfu": "ratio", "mfu_causal": "ratio"}
    values = {name: summary.get(name) for name in units} if "backend" in summary else {}
    if not values.get("tokens_per_s"):  # a run that had no step left to time
        values = {"validation_loss": values.get("validation_loss")}
    return [
        Record(metric=f"train_{name}", value=float(value), unit=units[name], arm=summary["backend"])
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    ]


def _of_stage(record: Record, stage: Stage) -> Record:
    """A record as results.jsonl keeps it: of no other stage that measured the same of another model."""
    own = {"config_id": record.config_id or stage.name, "detail": record.detail | {STAGE: stage.name}}
    return record.model_copy(update=own)


def _record(stage: Stage, status: str, reason: str, **fields) -> Record:
    return Record(metric=STAGE, arm=stage.name, status=status, reason=reason, unit="s", **fields)


def table(folder: Path):
    """What the results say, as a table of rich: one line a figure worth a look, under its stage's line."""
    from rich.markup import escape
    from rich.table import Table

    shown = Table(title=f"figures of {folder}", title_justify="left")
    for name in ("stage", "figure", "arm", "workload", "value", "share"):
        shown.add_column(name, justify="right" if name in ("value", "share") else "left", overflow="fold")
    read = RecordFile(folder / records.RESULTS_NAME).read()
    for record in read:
        if record.metric == STAGE:
            shown.add_row(record.arm, record.status, "", escape(record.reason), f"{record.value or 0:.0f} s", "")
    for row in figures(read):
        if row["figure"] in SHOWN:
            value = f"{float(row['value']):,.4g} {row['unit']}"
            shown.add_row(row["stage"], row["figure"], row["arm"], row["workload"], value, row["share_of_roofline"])
    return shown
