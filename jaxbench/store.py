"""Finished work of a run that may be interrupted: parts as files, rows as JSON lines, and its config's id (S file).

A part is a file, whole or absent. Rows are lines of one file: anything after the last newline was cut short and is not
a row. No run continues the work of another: `claim` stores its configuration's id with the work.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxbench import outputs


def claim(folder: Path, config_id: str) -> None:
    """Write a configuration's id into the folder of its finished work.

    Raises:
      ValueError: the folder has another id.
    """
    path = folder / "config_id"
    if path.is_file() and (known := path.read_text(encoding="utf-8", errors="replace").strip()) != config_id:
        raise ValueError(
            f"{folder} holds the work of configuration {known[:40]}, this is {config_id}; use another --workdir"
        )
    outputs.write_text(path, config_id + "\n")


def kept(
    path: Path,
    compute: Callable[[], Any],
    *,
    read: Callable[[Path], Any] = outputs.read_json,
    write: Callable[[Path, Any], None] | None = None,
) -> tuple[Any, bool]:
    """Part of a run, read from its file if that exists, else computed and written; and whether the file existed.

    The file is JSON on one line unless read and write (which writes it whole or not at all) say otherwise.
    """
    is_there = path.exists()
    if not is_there:
        (write or _write_json)(path, compute())
    return read(path), is_there


def rows(path: Path) -> list[bytes]:
    """Complete lines of a file, without newlines; a last line that was cut short is left out. No file = no lines.

    Raises:
      OSError: it cannot be read, or is a folder.
    """
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def lines(new: Iterable[Mapping[str, Any]]) -> str:
    """Rows of JSON values as lines of text, NaN and infinities as null (`outputs.finite`)."""
    return "".join(json.dumps(outputs.finite(row)) + "\n" for row in new)


def cut_short(path: Path) -> None:
    """Truncate a file after its last newline, so that the next row starts on its own line."""
    if not path.is_file():
        return
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file for this process, for code that reads it and then writes it; a killed process releases the lock.

    On a system without such locks, nothing is locked.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def taken(path: Path) -> Iterator[bool]:
    """Create and lock a file, unless it is locked already: yield True, or False at once; children do not inherit it.

    Also False if the process that had locked it has just removed it.

    Raises:
      FileNotFoundError: its folder does not exist.
    """
    import fcntl

    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
        except (BlockingIOError, FileNotFoundError):
            is_there = False
        yield is_there


@contextlib.contextmanager
def alone(*paths: Path) -> Iterator[None]:
    """Be the only process that writes some outputs: `.NAME.writing` next to each is a lock, removed at the end.

    A killed process releases the lock and leaves the empty file. On a system without such locks, nothing is locked.

    Raises:
      ValueError: another process is writing one of them.
    """
    try:
        import fcntl  # noqa: F401
    except ImportError:  # Windows
        yield
        return
    with contextlib.ExitStack() as stack:
        for path in map(Path.absolute, paths):  # `.` has no name of its own
            stack.callback(_remove_empty, [folder for folder in path.parents if not folder.exists()])
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.with_name(f".{path.name}.writing")
            if not stack.enter_context(taken(lock)):
                raise ValueError(f"another process writes {path}; wait for its end, or name another output")
            stack.callback(lock.unlink, missing_ok=True)  # while locked, so that no other process's file is removed
        yield


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # not empty: the outputs are there
            folder.rmdir()


def append(path: Path, new: Iterable[Mapping[str, Any]]) -> None:
    """Append rows (see `lines`) after the last complete line of a file, all or none, and wait for the disk.

    Raises:
      OSError: the disk is full; earlier rows are kept.
    """
    append_text(path, lines(new))


def append_text(path: Path, text: str) -> None:
    """Append whole lines, as `append` does."""
    data = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_short(path)
    with open(path, "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            if (written := file.write(data)) != len(data):
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} after {written} of {len(data)} bytes")
            os.fsync(file.fileno())
        except BaseException as error:
            if isinstance(error, OSError):
                error.filename = str(path)
            file.truncate(size)
            raise


def _write_json(path: Path, value: Any) -> None:
    outputs.write_text(path, json.dumps(value, ensure_ascii=False))
