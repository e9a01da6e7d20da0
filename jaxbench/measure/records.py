"""Results as JSON lines (S file: neither JAX nor PyTorch).

One record is one metric of one arm in one launch: one line of `results.jsonl`. The file is only ever appended to
(store.py), so an interrupt or a full disk never damages a finished line. When a key occurs twice (a launch that was
interrupted and run again), the later line wins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import pydantic

from jaxbench import outputs, store
from jaxbench.config import Base

RESULTS_NAME = "results.jsonl"
SUITE_ARM = "suite"  # the arm of records that belong to the whole run: roofline, control, parity, TPU, launch marks
LAUNCH_BEGUN = "launch_begun"  # marks a launch's start: records that an interrupted try left no longer count
LAUNCH_DONE = "launch_done"  # the metric that marks a finished launch (`--resume` skips it)
LOOK = "look"  # how many launches were finished at each report of a run: its detail's `launches`, in order
RUN = "run"  # the metric whose detail is a run's origin: device, host, commit, versions, arms and the rest of its key


class Workload(Base):
    """What was run: the shape of one measurement."""

    kind: Literal["none", "load", "inference", "prefill", "decode", "train", "gemm", "attention", "read", "control"] = (
        "none"
    )
    dtype: str = ""  # float32, bfloat16, float64
    batch: int = pydantic.Field(default=0, ge=0)  # rows
    prompt_tokens: int = pydantic.Field(default=0, ge=0)  # tokens per row before generation (train: sequence length)
    new_tokens: int = pydantic.Field(default=0, ge=0)  # tokens generated per row

    def label(self) -> str:
        """Return the short unique name used in tables, for example `decode float32 b8 p64 n48`."""
        sizes = {"b": self.batch, "p": self.prompt_tokens, "n": self.new_tokens}
        parts = (self.kind, self.dtype, *(f"{letter}{size}" for letter, size in sizes.items() if size))
        return " ".join(filter(None, parts))


class Record(Base):
    """One metric of one arm in one launch."""

    metric: str  # e.g. decode_tokens_per_s, compile_s, peak_memory_bytes, read_bandwidth_bytes_per_s
    value: float | None = None  # the launch's median over samples; None when skipped or failed
    unit: str = ""  # s, tokens/s, bytes, FLOP, bytes/s, FLOP/s, ratio, count
    samples: tuple[float, ...] = ()  # one value per measurement, in time order
    arm: str = SUITE_ARM  # the arm that was measured, or suite
    workload: Workload = Workload()
    launch: int = 0  # 1, 2, ...; 0 = belongs to no launch
    status: Literal["ok", "skipped", "error"] = "ok"
    reason: str = ""  # why it was skipped or failed: one line
    detail: dict = {}  # further facts: digests of tokens, parity rows, TPU collectives
    run_id: str = ""  # stable id of the run's origin (the record `run`): only records of one id are reported together
    config_id: str = ""  # stable id of the configuration, with model and text sha256
    device: str = ""  # cpu, gpu, tpu, or a TPU topology such as v5e:2x2 (compiled ahead of time)
    host: str = ""  # hashed fingerprint of the machine
    commit: str = ""  # git commit of jaxbench, + when the tree has changes
    versions: dict[str, str] = {}  # package -> version, as the arm saw them
    model_sha256: str = ""
    text_sha256: str = ""
    time_utc: str = ""  # ISO 8601

    def key(self) -> tuple:
        """Return the fields that make a record unique; a later record with the same key replaces an earlier one."""
        return (self.run_id, self.config_id, self.metric, self.arm, self.workload, self.launch, self.device)


class RecordFile:
    """Append records to one file safely and read them back."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def set_aside(self) -> None:
        """Rename the file of an earlier run to NAME.1, .2, ..., so that its launches do not mix with the new ones."""
        outputs.set_aside(self.path)

    def append(self, *records: Record) -> None:
        """Write the records as whole lines; a full disk raises an OSError that says what was kept."""
        if not records:
            return
        text = "".join(record.model_dump_json(exclude_defaults=True) + "\n" for record in records)
        try:
            store.append_text(self.path, text)
        except OSError as error:
            if not self.path.is_file():
                raise
            raise OSError(
                f"results: cannot write {self.path} ({error.strerror or error}); the {self.path.stat().st_size} bytes "
                "before are kept, free some space and run again with --resume"
            ) from error

    def read(self) -> list[Record]:
        """Return all records, the later of two with the same key; a torn last line is dropped.

        If a launch was begun twice, only the second counts: a launch's arms are one set of processes.
        """
        latest: dict[tuple, Record] = {}
        for record in read_lines(self.path):
            if record.metric == LAUNCH_BEGUN:
                same = (record.run_id, record.launch)
                latest = {key: kept for key, kept in latest.items() if (kept.run_id, kept.launch) != same}
            latest.pop(record.key(), None)
            latest[record.key()] = record
        return list(latest.values())

    def of_run(self, run_id: str) -> list[Record]:
        """Records of one run."""
        return [record for record in self.read() if record.run_id == run_id]

    def finished_launches(self, run_id: str) -> set[int]:
        """Return the numbers of this run's launches that ran to their end."""
        return {record.launch for record in self.of_run(run_id) if record.metric == LAUNCH_DONE}

    def left_aside(self, run_id: str, origin: Mapping[str, object]) -> str:
        """Return one sentence on the records of other runs and how each run differs; empty if there are none."""
        others = [record for record in self.read() if record.run_id != run_id]
        known = {record.run_id: record.detail for record in others if record.metric == RUN}
        reasons = {
            record.run_id: _difference(known[record.run_id], origin)
            if record.run_id in known
            else "written before records carried their origin"
            for record in others
        }
        return f"{len(others)} records of other runs are left aside: {'; '.join(reasons.values())}" if others else ""


def _difference(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Describe the keys in which two origins differ, with both values."""
    flat = []
    for origin in (before, now):
        versions = origin.get("versions")
        named = {f"{name} version": value for name, value in versions.items()} if isinstance(versions, dict) else {}
        flat.append({key: value for key, value in origin.items() if key != "versions"} | named)
    keys = [key for key in sorted(flat[0].keys() | flat[1].keys()) if flat[0].get(key) != flat[1].get(key)]
    return ", ".join(f"{key} was {flat[0].get(key)}, is {flat[1].get(key)}" for key in keys)


def read_lines(path: str | os.PathLike) -> list[Record]:
    """Read every record of a file in order; drop a torn last line (a crash while writing), raise for any other one."""
    path = Path(path)
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"results: {path} is not UTF-8 text (byte {error.start}), so no file of results; move it away"
        ) from error
    records = []
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(Record.model_validate_json(line))
        except ValueError as error:
            if place == len(lines):
                break
            message = str(error).splitlines()[0]
            raise ValueError(f"results: {path} line {place} is not a record ({message}); remove that line") from error
    return records


def now_utc() -> str:
    """Current time as ISO 8601 with seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")
