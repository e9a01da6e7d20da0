"""What a stage leaves: its records, copied into one file while it runs, and the files that it returns (S file)."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from pathlib import Path
from typing import NamedTuple

from jaxbench import outputs
from jaxbench.gpu.stages import Stage
from jaxbench.measure import records
from jaxbench.measure.records import Record, RecordFile

STAGE = "stage"  # metric of the record that says how a stage ended; key of the stage's name in the details of all
KEPT = (records.RESULTS_NAME, "parity.json", "summary.json")  # files of a stage that its records are read from
PART_BYTES = 15 * 2**20  # of a returned file: a lent machine returns files of at most 16 MiB
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # a file that holds no records, or is gone


class Place(NamedTuple):
    """Where the stages of one call run and write."""

    device: str  # gpu, or cpu in a rehearsal
    is_rehearsal: bool
    results: Path  # folder
    work: Path  # folder of the stages' own files
    data: str = ""  # folder of texts brought along


class Shared(NamedTuple):
    """What the stages of one call share, which may run beside one another."""

    lock: threading.RLock  # held while the results are read or written
    stop: threading.Event  # set once the call ends early: what runs is interrupted, nothing more is started


class Keeper:
    """Copies a stage's records into results.jsonl, each record once, while it runs and when it has ended."""

    def __init__(self, file: RecordFile, stage: Stage, place: Place, gpu: str, shared: Shared | None = None):
        self.folder = (place.work / stage.name).absolute()  # the command's working folder may not be this process's
        self._file, self._stage, self._place, self._gpu = file, stage, place, gpu
        self._shared = shared or Shared(threading.RLock(), threading.Event())
        self._kept: set[str] = set()
        self._looked: list[tuple] = []

    def __len__(self) -> int:
        """Number of records kept."""
        return len(self._kept)

    def look(self) -> None:
        """Keep new records if the stage's files have changed; a half-written file waits for the next look.

        Raises:
          KeyboardInterrupt: the call ends early.
        """
        paths = [self.folder / name for name in KEPT]
        stats = []
        for path in paths:
            with contextlib.suppress(OSError):  # missing, or deleted meanwhile
                stat = path.stat()
                stats.append((path.name, stat.st_size, stat.st_mtime_ns))
        if stats != self._looked:
            self._looked = stats
            self.take()
        if self._shared.stop.is_set():
            raise KeyboardInterrupt

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
        with self._shared.lock:
            self._file.append(*(_of_stage(found[line], self._stage, self._place, self._gpu) for line in new))
        self._kept.update(new)
        return ""


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
    return on_gpu(record.model_copy(update=own | {"device": record.device or place.device}), place, gpu)


def on_gpu(record: Record, place: Place, gpu: str) -> Record:
    """Return a record tagged by GPU, so that it does not replace the records of another kind of GPU."""
    if not gpu:
        return record.model_copy(update={"device": record.device or place.device})
    own = {"config_id": f"{record.config_id} {gpu}".strip(), "detail": record.detail | {"gpu": gpu}}
    if record.run_id:  # it does not cover the GPU: a launch begun on one kind would drop the records of the other
        own["run_id"] = f"{record.run_id} {gpu}"
    return record.model_copy(update=own | {"device": record.device or place.device})
