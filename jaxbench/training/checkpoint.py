"""Checkpoints of a training run with Orbax: asynchronous, atomic, verified when read.

A checkpoint is a flat {name: array} and a JSON object. Orbax writes into a temporary folder and renames it, so that a
killed process leaves no partial checkpoint under a step's number. The JSON object holds the CRC-32 of every array, and
its own CRC-32 is stored beside its text, so that a damaged file is noticed even if it can be read. Both backends use
the same format.

With several processes, each writes the parts of arrays that its devices hold, and every part has a CRC-32. Reading
loads whole arrays into each process's memory, so that a run can resume on any mesh and the parts can be checked.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxbench.parallel.processes import ALONE, Processes

STATE, META = "state", "meta"
MAX_LISTED = 8  # names shown of each kind of difference
TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a folder that Orbax has not finished
DAMAGED = "damaged"  # suffix that a damaged checkpoint's folder gets
PARAMETERS = "params."  # how the names of a model's own arrays begin
# Why an intact checkpoint cannot be read at the moment. A disk's own error (EIO) is damage.
PASSING = (errno.EACCES, errno.EPERM, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT)


class Checkpoint(NamedTuple):
    """What was saved after a step."""

    step: int
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, in one folder with a sub-folder per step. Only one run at a time may write.

    Every process of a run must call every method, and all of them must see the folder.
    """

    def __init__(
        self, folder: str | Path, *, keep: int, say: Callable[[str], None] = print, processes: Processes = ALONE
    ):
        """Open or create the folder.

        Args:
          keep: how many of the newest checkpoints are kept; the one with the lowest loss is kept too.
          say: called with a sentence when a damaged checkpoint is skipped.
        """
        self.folder, self.keep, self.say, self.processes = Path(folder).absolute(), keep, say, processes
        self.folder.mkdir(parents=True, exist_ok=True)
        self._losses: dict[int, float] = {}  # by step, of the checkpoints whose loss was measured
        self._open()

    def _open(self) -> None:
        import orbax.checkpoint as ocp

        for unfinished in self.folder.glob(f"*{TEMPORARY}*") if self.processes.is_first else ():
            shutil.rmtree(unfinished)  # of a process that was killed while it saved
        self.processes.agree(True)
        # Orbax logs every phase of every save, and pages of traces for a failed save before it raises.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        _drop_late_callbacks()
        self._ocp = ocp
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_NewestAndBest(self.keep, self._losses), enable_async_checkpointing=True
            ),
            item_names=(STATE, META),
        )
        for step in self.steps():
            with contextlib.suppress(Exception):  # a damaged one is no candidate; `restore` reports it
                self._note_loss(step, _loss(step, self._read_meta(step)))

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, arrays: Mapping[str, Any], meta: Mapping[str, Any], *, loss: float | None = None) -> None:
        """Start to save the state after a step; return once the arrays are copied, a thread does the rest.

        Args:
          arrays: state by name; arrays are copied, so they may change or be donated afterwards.
          meta: values that can be written as JSON.
          loss: the checkpoint with the lowest one is the best; None = not measured at this step.

        Raises:
          OSError: this save or the one before it could not be written; earlier checkpoints are kept.
        """
        copied = {name: _copy(value) for name, value in arrays.items()}
        sums = self._sums(copied)
        shapes = {name: [list(value.shape), str(value.dtype)] for name, value in copied.items()}
        loss = None if loss is None else float(loss)
        text = json.dumps(dict(meta) | {"arrays": shapes, "crc32": sums, "loss": loss})
        entry = {"content": text, "crc32": zlib.crc32(text.encode())}
        items = self._ocp.args.Composite(
            **{STATE: self._ocp.args.StandardSave(copied), META: self._ocp.args.JsonSave(entry)}
        )
        self._note_loss(step, loss)
        self._guarded(lambda: self._manager.save(step, args=items, force=True))

    def wait(self) -> None:
        """Wait until the last save is on disk.

        Raises:
          OSError: the last save could not be written.
        """
        self._guarded(self._manager.wait_until_finished)

    def close(self) -> None:
        """Wait until the last save is on disk, and free the threads."""
        self._guarded(self._manager.close)

    def restore(self, wanted: Mapping[str, Any], *, check_meta: Callable[[dict], None]) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None; damaged ones are reported and set aside.

        Args:
          wanted: arrays, or their shapes and types, by name.
          check_meta: raises if a checkpoint's JSON object belongs to another run.

        Raises:
          ValueError: the checkpoint is of another model, or check_meta accepts it but its arrays differ from the wanted
            ones; the differing names and shapes are listed. Or a process lacks memory, open files or permission to read
            it, which is no damage: nothing is moved.
        """
        for step in reversed(self.steps()):
            try:
                meta = self._read_meta(step)
                shapes, sums, _ = meta.pop("arrays"), meta.pop("crc32"), meta.pop("loss", None)
                reason = None
            except Exception as error:  # Orbax and TensorStore raise many types for a damaged file
                reason = error
            if self._is_damaged(step, reason):
                continue
            parts = _differing(shapes, wanted)
            if not any(name.startswith(PARAMETERS) for names in parts.values() for name in names):
                check_meta(meta)  # same model: a difference of settings or backend says more than an optimiser's names
            self._refuse_other_model(step, parts)
            try:
                arrays = self._read(step, wanted)
                broken = [name for name in sums if _differs(arrays[name], sums[name])]
                if broken:
                    raise ValueError(f"checksums differ for {', '.join(broken[:MAX_LISTED])}")
            except Exception as error:
                reason = error
            if not self._is_damaged(step, reason):
                return Checkpoint(step, arrays, meta)
        return None

    def _note_loss(self, step: int, loss: float | None) -> None:
        """Take the loss of a checkpoint into account when deciding what is kept."""
        self._losses.pop(step, None)
        if loss is not None:
            self._losses[step] = loss

    def _is_damaged(self, step: int, reason: Exception | None) -> bool:
        """Return True if any process could not read the checkpoint, and set it aside.

        Raises:
          ValueError: one could not for a passing reason: an older checkpoint, or none, would take this one's place.
        """
        if self.processes.agree(reason is None):
            return False
        is_intact = not self.processes.agree(reason is None or not _is_passing(reason))
        reason = reason or ValueError(f"another process than {self.processes.index} could not read it")
        if is_intact:
            raise ValueError(
                f"checkpoint: {self.folder / str(step)} cannot be read at the moment and stays where it is "
                f"({_in_short(reason)}); wanted memory, open files and permission to read it, then start again"
            ) from reason
        self._set_aside(step, reason)
        return True

    def _sums(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """CRC-32 of every array: of the whole array, or [bounds, CRC-32] of each part where processes hold parts.

        A part's bounds are a start and a stop for each dim. The process of its first device computes its CRC-32.
        """
        sums = {name: _sum(value) for name, value in arrays.items() if isinstance(value, np.ndarray)}
        owned: list[int] = []
        for name, value in arrays.items():
            if name in sums:
                continue
            owners: dict[tuple, Any] = {}
            for device, index in value.sharding.devices_indices_map(value.shape).items():
                bounds = tuple(part.indices(size)[:2] for part, size in zip(index, value.shape))
                owners.setdefault(bounds, device)
            here = {shard.device: shard.data for shard in value.addressable_shards}
            owned += [_sum(np.asarray(here[device])) if device in here else 0 for device in owners.values()]
            sums[name] = list(owners)
        if owned:
            gathered = iter(self.processes.gather(np.array(owned, np.uint32)).max(axis=0).tolist())
            sums |= {n: [[b, next(gathered)] for b in parts] for n, parts in sums.items() if isinstance(parts, list)}
        return sums

    def _read_meta(self, step: int) -> dict[str, Any]:
        """JSON object of a checkpoint, checked against its CRC-32."""
        entry = self._manager.restore(step, args=self._ocp.args.Composite(meta=self._ocp.args.JsonRestore()))[META]
        text = str(entry.get("content"))
        if zlib.crc32(text.encode()) != entry.get("crc32"):
            raise ValueError(
                f"the checksum of its JSON object is {zlib.crc32(text.encode())}, not {entry.get('crc32')}"
            )
        return json.loads(text)

    def _read(self, step: int, wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Whole arrays of a checkpoint, by name."""
        target = {name: np.zeros(value.shape, value.dtype) for name, value in wanted.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about shardings of arrays that have none
            items = self._ocp.args.Composite(**{STATE: self._ocp.args.StandardRestore(target)})
            return dict(self._manager.restore(step, args=items)[STATE])

    def _refuse_other_model(self, step: int, parts: Mapping[str, list[str]]) -> None:
        """Raise if a checkpoint's arrays are not the wanted ones; parts: the result of `_differing`."""
        if any(parts.values()):
            listed = "; ".join(f"{len(names)} {kind}: {_listed(names)}" for kind, names in parts.items() if names)
            raise ValueError(
                f"checkpoint: {self.folder / str(step)} is of another model or optimiser; {listed}; "
                "use another --workdir, or the configuration that the checkpoint was made with"
            )

    def _set_aside(self, step: int, error: Exception) -> None:
        """Report a damaged checkpoint and move it out of the way of later saves."""
        place, copies = self.folder / str(step), 0
        while (aside := self.folder.parent / f"{self.folder.name}-{DAMAGED}" / f"{step}-{copies}").exists():
            copies += 1
        if self.processes.is_first:
            aside.parent.mkdir(exist_ok=True)
            os.rename(place, aside)
        self._manager.close()
        self._open()
        before = [other for other in self.steps() if other < step]
        then = f"going on from step {before[-1]}" if before else "no earlier one is left, starting anew"
        self.say(f"checkpoint {place} is damaged ({_in_short(error)}), kept as {aside}; {then}")

    def _guarded(self, action: Callable[[], Any]) -> None:
        """Run an Orbax action; a full disk becomes an OSError that says what is kept."""
        try:
            action()
        except Exception as error:  # the writing thread's own, or TensorStore's
            message = " ".join(str(error).split())
            signs = {"File too large": errno.EFBIG, "No space left": errno.ENOSPC, "quota": errno.EDQUOT}
            code = getattr(error, "errno", None) or next((c for sign, c in signs.items() if sign in message), None)
            if code is None:
                raise
            kept = finished(self.folder)
            last = f"the last good checkpoint is step {kept[-1]}" if kept else "no checkpoint was finished"
            raise OSError(code, f"{os.strerror(code)}, {last}", str(self.folder)) from error


def finished(folder: Path) -> list[int]:
    """Steps of the finished checkpoints in a folder, oldest first; empty if there is no folder."""
    # Orbax renames a folder to its step's number once it is complete.
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def _is_passing(error: Exception) -> bool:
    """Return True if this process lacks what reading takes, which says nothing about the files."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in PASSING:
        return True
    message = str(error)  # TensorStore's and XLA's errors have no number
    return "RESOURCE_EXHAUSTED" in message or any(os.strerror(code) in message for code in PASSING)


def _in_short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


class _NewestAndBest:
    """Which checkpoints Orbax keeps: the newest ones, and the oldest of those with the lowest loss."""

    def __init__(self, keep: int, losses: Mapping[int, float]):
        self.keep, self.losses = keep, losses

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return True for each checkpoint that stays; they come oldest first."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = min((step for step in steps if step in self.losses), key=self.losses.__getitem__, default=None)
        return [step == best or step in steps[-self.keep :] for step in steps]


def _loss(step: int, meta: Mapping[str, Any]) -> float | None:
    """Loss of a checkpoint by its JSON object; None = not measured.

    Older ones do not hold it. It is known if their step is the run's best one so far.
    """
    progress = meta.get("progress", {})
    return meta.get("loss", progress.get("best_loss") if progress.get("best_step") == step else None)


def _drop_late_callbacks() -> None:
    """Silence the errors of TensorStore writes that end after the save they belong to has failed.

    Each calls an event loop that is closed by then, from a C++ thread, which can only print the error: one trace per
    array, before the one line that says what happened.
    """
    before = sys.unraisablehook
    if getattr(before, "drops_late_callbacks", False):
        return

    def hook(report: Any) -> None:
        is_late = report.exc_type is RuntimeError and str(report.exc_value) == "Event loop is closed"
        if not (is_late and threading.current_thread() is not threading.main_thread()):
            before(report)

    hook.drops_late_callbacks = True
    sys.unraisablehook = hook


def _copy(value: Any) -> Any:
    """Copy an array to the host; if other processes hold parts of it, Orbax copies this process's parts."""
    if getattr(value, "is_fully_addressable", True):
        return np.array(value)
    is_host = next(iter(value.sharding.device_set)).platform == "cpu"
    return value.copy() if is_host else value  # on a CPU, Orbax's copy is the array itself, which the step donates


def _differing(shapes: Mapping[str, list], wanted: Mapping[str, Any]) -> dict[str, list[str]]:
    """Differences in name, shape and type between a checkpoint's arrays and the wanted ones, by kind."""
    saved = {name: (tuple(shape), dtype) for name, (shape, dtype) in shapes.items()}
    needed = {name: (tuple(value.shape), str(value.dtype)) for name, value in wanted.items()}
    return {
        "missing in it": sorted(needed.keys() - saved.keys()),
        "unknown here": sorted(saved.keys() - needed.keys()),
        "different": [
            f"{name} is {saved[name][0]} {saved[name][1]}, wanted {needed[name][0]} {needed[name][1]}"
            for name in sorted(needed.keys() & saved.keys())
            if saved[name] != needed[name]
        ],
    }


def _differs(value: np.ndarray, wanted: Any) -> bool:
    """Return True if an array's CRC-32 is not the wanted one, in the form that `Checkpoints._sums` returns."""
    if isinstance(wanted, int):
        return _sum(value) != wanted
    return any(_sum(value[tuple(slice(*ends) for ends in bounds)]) != crc32 for bounds, crc32 in wanted)


def _sum(value: np.ndarray) -> int:
    """CRC-32 of an array's bytes in C order."""
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def _listed(names: list[str]) -> str:
    """Join names with commas; those past MAX_LISTED are only counted."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
