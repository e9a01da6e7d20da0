"""The processes of one training run: which one this is, and how they agree (S file: neither JAX nor PyTorch).

One process is the default (ALONE). For several, distributed.py makes the value; the first one (index 0) writes records,
metrics and the export for all.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LOCK = ".lock"  # in the folder of a run
MAX_PORT = 65535
VISIBLE_TRIES, VISIBLE_PAUSE = 50, 0.2  # attempts to see the first process's lock, and seconds between them


class Processes(NamedTuple):
    """This process within the processes of a run."""

    index: int  # from 0
    count: int
    gather: Callable[[np.ndarray], np.ndarray]  # all-gather: uint32 [n] of this process -> [count, n]; a barrier

    @property
    def is_first(self) -> bool:
        """True in the process that writes for all."""
        return self.index == 0

    def agree(self, is_good: bool) -> bool:
        """Logical AND of a flag over all processes; a barrier: every process must call."""
        return bool(self.gather(np.array([is_good], np.uint32)).all())

    def check_alike(self, content: Mapping[str, Any]) -> None:
        """Check that all processes were given the same JSON values, by name; a barrier: every process must call.

        Raises:
          ValueError: they were not; every process raises, and the message names the values that differ.
        """
        sums = [zlib.crc32(json.dumps(value, sort_keys=True).encode()) for value in content.values()]
        columns = self.gather(np.array(sums, np.uint32)).T
        differing = [name for name, column in zip(content, columns, strict=True) if len(set(column.tolist())) > 1]
        if differing:
            mine = ", ".join(str(content[name]) for name in differing)
            raise ValueError(
                f"train: the {self.count} processes were not given the same {', '.join(differing)} (process "
                f"{self.index} has {mine}); start all with one command and one text"
            )


ALONE = Processes(0, 1, lambda own: own[None])


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Lock a folder for this process; the system releases the lock however the process ends.

    A folder that was created for this and is empty after an error is removed again.

    Raises:
      ValueError: another live process holds it.
    """
    new_folders = [folder for folder in (workdir, *workdir.parents) if not folder.exists()]
    workdir.mkdir(parents=True, exist_ok=True)
    with open(workdir / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise ValueError(
                f"train: {workdir} is in use by process {file.read().strip() or 'unknown'}; wait for it, or name "
                "another folder with --workdir"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        except Exception:
            if new_folders and os.listdir(workdir) == [LOCK]:
                (workdir / LOCK).unlink()
                for folder in new_folders:
                    folder.rmdir()
            raise


@contextlib.contextmanager
def held(workdir: Path, processes: Processes) -> Iterator[None]:
    """Lock a folder for all processes of a run: the first one locks it, and all must see the lock.

    Raises:
      ValueError: another run holds it, or a process sees another folder there; every process raises.
    """
    with contextlib.ExitStack() as stack:
        refused = None
        try:
            if processes.is_first:
                stack.enter_context(locked(workdir))
        except (ValueError, OSError) as error:
            refused = error
        if not processes.agree(refused is None):
            raise refused or ValueError(f"train: process {processes.index} stops, the first one cannot use {workdir}")
        holder = processes.gather(np.array([os.getpid()], np.uint32))[0, 0]
        if not processes.agree(sees := _sees(workdir, f"{holder}\n")):
            which = "the" if sees else "not the"
            raise ValueError(
                f"train: {workdir.absolute()} of process {processes.index} is {which} folder that the first one holds, "
                f"wanted one that all {processes.count} processes see; name it with --workdir"
            )
        yield


def _sees(workdir: Path, holder: str) -> bool:
    """Return True if the folder's lock is that of this holder; a shared file system may show it late."""
    for _ in range(VISIBLE_TRIES):
        with contextlib.suppress(OSError):
            if (workdir / LOCK).read_text(encoding="utf-8") == holder:
                return True
        time.sleep(VISIBLE_PAUSE)
    return False


def check_place(coordinator: str | None, count: int | None, index: int | None) -> None:
    """Check the command line's coordinator, number of processes and index: all three or none.

    Raises:
      ValueError: some are missing, the coordinator is not host:port, or index is outside [0, count).
    """
    given = {"coordinator": coordinator, "num_processes": count, "process_id": index}
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        spelled = ", ".join(f"--{name}={value}" for name, value in given.items() if value is not None)
        raise ValueError(f"--{' and --'.join(missing)} are missing beside {spelled}; give all three or none")
    if missing:
        return
    host, colon, port = coordinator.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
        raise ValueError(
            f"--coordinator={coordinator} is not host:port of the first process, port from 1 to {MAX_PORT}"
        )
    if not 0 <= index < count:
        raise ValueError(f"--process_id={index} is not from 0 to num_processes - 1 = {count - 1}")
