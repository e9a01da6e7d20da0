"""The index of a history: runs and points in SQLite; rebuilt if it is missing, stale or damaged (S file)."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxbench import outputs
from jaxbench.regress.run_file import read, work_of

INDEX_VERSION = 3  # of its tables; an index of another version is rebuilt
TABLES = f"""
CREATE TABLE runs (id TEXT PRIMARY KEY, time_utc TEXT, host TEXT, device TEXT, suite_id TEXT, head TEXT, base TEXT,
                   tag TEXT, state TEXT);
CREATE TABLE points (run TEXT, series TEXT, work TEXT, side TEXT, median REAL, launches INTEGER);
CREATE INDEX by_series ON points (series, side);
PRAGMA user_version = {INDEX_VERSION};
"""


@contextlib.contextmanager
def opened(path: Path, files: Sequence[Path]) -> Iterator[sqlite3.Connection]:
    """Open the index of these files, rebuilt if some were added, changed or removed; in memory if it cannot be kept."""
    states = {file.stem: _state(file) for file in files}
    is_kept = bool(states) and (_is_current(path, states) or _is_rebuilt(path, files, states))
    with contextlib.closing(sqlite3.connect(path if is_kept else ":memory:")) as index:
        if not is_kept:  # no run yet, or a folder without write permission
            _fill(index, files, states)
        yield index


def _state(file: Path) -> str:
    """Return a value that changes with a file's content even if its size does not, as with a tag of equal length."""
    found = file.stat()
    return f"{found.st_size} {found.st_mtime_ns}"


def _is_rebuilt(path: Path, files: Sequence[Path], states: Mapping[str, str]) -> bool:
    """Rebuild the index; False if it cannot be written."""
    try:
        with outputs.whole(path) as temporary:
            temporary.unlink(missing_ok=True)
            with contextlib.closing(sqlite3.connect(temporary)) as index:
                _fill(index, files, states)
    except (OSError, sqlite3.OperationalError):
        return False
    return True


def _fill(index: sqlite3.Connection, files: Sequence[Path], states: Mapping[str, str]) -> None:
    index.executescript(TABLES)
    for file in files:
        with contextlib.suppress(ValueError):  # `verify` reports the file
            _insert(index, file.stem, read(file), states[file.stem])
    index.commit()


def _is_current(path: Path, states: Mapping[str, str]) -> bool:
    """True if an index covers exactly these files."""
    if not path.is_file():
        return False
    try:
        with contextlib.closing(sqlite3.connect(path)) as index:
            [(version,)] = index.execute("PRAGMA user_version")
            return version == INDEX_VERSION and dict(index.execute("SELECT id, state FROM runs")) == states
    except sqlite3.DatabaseError:
        return False  # damaged: it is rebuilt


def _insert(index: sqlite3.Connection, id: str, record: Mapping[str, Any], state: str) -> None:
    sides = record["sides"]
    head, base = (sides.get(name, {}).get("commit", "") for name in ("head", "base"))
    row = (
        id, record["time_utc"], record["host"], record["device"], record.get("suite_id", ""), head, base,
        record.get("tag", ""), state,
    )  # fmt: skip
    index.execute(f"INSERT INTO runs VALUES ({', '.join('?' * len(row))})", row)
    points = [
        (id, name, work_of(record, name), side, each["median"], len(each.get("launches", ())))
        for name, both in record["series"].items()
        for side, each in both.items()
    ]
    index.executemany("INSERT INTO points VALUES (?, ?, ?, ?, ?, ?)", points)
