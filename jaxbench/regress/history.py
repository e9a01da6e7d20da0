"""History of runs: one JSON file per run, and an index that can be rebuilt from them (S file).

    HISTORY/runs/2026-11/20261126T084900Z-1f0c3a9b.json      a run; changed only by `tag` and `prune`
    HISTORY/qualified/HOST-cpu-quick-SUITE_ID.json           how reliable a suite's verdicts are on a machine
    HISTORY/alerts.jsonl                                     events of alerts on regressions (alerts.py)
    HISTORY/index.sqlite                                     index for frequent queries, rebuilt if missing or stale

Raw launches are kept for 90 days, runs for twelve months, tagged runs for ever. Loading a file of a newer schema raises
an error that names it; `verify` reports truncated files. Neither prevents the other runs from being read.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench import outputs
from jaxbench.regress import history_index
from jaxbench.regress.run_file import has_raw, read, text, without_raw

RAW_DAYS, DAYS = 90, 365
RUNS, INDEX, QUALIFIED, EVENTS = "runs", "index.sqlite", "qualified", "alerts.jsonl"
SAME = ("time_utc", "host", "device", "suite_id", "sides", "series")  # equal in two judgements of the same launches


class Row(NamedTuple):
    """A run as a list shows it."""

    id: str
    time_utc: str
    host: str
    device: str
    suite_id: str
    head: str  # commits
    base: str  # "" = none
    tag: str


class Point(NamedTuple):
    """A series in one run."""

    run: str
    time_utc: str
    commit: str
    median: float
    work: str  # hash of what was run (work_of): points with different hashes are different series


class Change(NamedTuple):
    """A change that `prune` makes to a run."""

    id: str
    what: str  # "removed" or "raw launches removed"


class Copied(NamedTuple):
    """Result of `backup` or `restore`."""

    count: int  # files that were copied
    damaged: tuple[str, ...]  # files unreadable here: not copied by `backup`, put aside by `restore`


class History:
    """The runs in a folder."""

    def __init__(self, folder: Path):
        """Args: folder: created by the first run.

        Raises:
          ValueError: it is a file.
        """
        if folder.is_file():
            raise ValueError(f"--history={folder} is a file; wanted a folder")
        self.folder, self.runs = folder, folder / RUNS

    def add(self, record: Mapping[str, Any]) -> str:
        """Store a run and return its id. The same run is stored once; a new judgement of its launches replaces it."""
        time = record["time_utc"][:19].replace("-", "").replace(":", "")
        name = f"{time}Z-{hashlib.sha256(text(record).encode()).hexdigest()[:8]}"
        path = self.runs / record["time_utc"][:7] / f"{name}.json"
        if path.exists():
            return name
        before = self._same_launches(record, f"{time}Z-")
        tag = {} if before is None else {key: value for key, value in read(before).items() if key == "tag"}
        outputs.write_text(path, text(dict(record) | tag))
        if before is not None:
            before.unlink()
        return name

    def _same_launches(self, record: Mapping[str, Any], beginning: str) -> Path | None:
        """Return the file of a stored run with the same launches; None if there is none."""
        wanted = outputs.finite([record.get(name) for name in SAME])
        for path in self.runs.glob(f"*/{beginning}*.json"):
            with contextlib.suppress(ValueError):
                if [read(path).get(name) for name in SAME] == wanted:
                    return path
        return None

    def files(self) -> list[Path]:
        """Return the files of all runs, oldest first."""
        return sorted(self.runs.glob("*/*.json"), key=lambda path: path.name)

    def load(self, id: str) -> dict[str, Any]:
        """Load a run by its id or a prefix of it, its tag, or `latest`.

        Raises:
          ValueError: no run, or several, match, or its file is damaged or of a newer schema.
        """
        return read(self.find(id))

    def find(self, id: str) -> Path:
        """Find the file of a run, named as in `load`.

        Raises:
          ValueError: no run, or several, match.
        """
        if not id:
            raise ValueError(f"history: {id!r} names no run; wanted an id or the beginning of one, a tag, or latest")
        files = self.files()
        if id == "latest" and files:
            return files[-1]
        if exact := [path for path in files if path.stem == id]:
            return exact[0]
        tagged = [row.id for row in self.list() if row.tag == id]
        found = [path for path in files if path.stem in tagged or (not tagged and path.stem.startswith(id))]
        if len(found) != 1:
            known = _few([path.stem for path in files])
            raise ValueError(f"history: {id!r} names {len(found)} runs of {self.folder}; wanted one of {known}")
        return found[0]

    def has(self, id: str) -> bool:
        """True if an id, a prefix of one, a tag or `latest` matches any run, including damaged ones."""
        if not id:  # the beginning of every id
            return False
        return (
            (id == "latest" and bool(self.files()))
            or any(path.stem.startswith(id) for path in self.files())
            or any(row.tag == id for row in self.list())
        )

    def list(self) -> list[Row]:
        """List all runs, oldest first."""
        with self._index() as index:
            columns = ", ".join(Row._fields)
            return [Row(*row) for row in index.execute(f"SELECT {columns} FROM runs ORDER BY time_utc, id")]

    def points(self, series: str, *, host: str, device: str, side: str = "head") -> list[Point]:
        """Return the points of a series on one machine, oldest first."""
        query = f"""SELECT runs.id, time_utc, {side}, median, work FROM points JOIN runs ON runs.id = points.run
                    WHERE series = ? AND side = ? AND host = ? AND device = ? ORDER BY time_utc, id"""
        with self._index() as index:
            return [Point(*row) for row in index.execute(query, (series, side, host, device))]

    def every_point(self) -> Iterator[dict[str, Any]]:
        """Yield every point of both sides, oldest run first."""
        columns = ("run", "time_utc", "host", "device", "series", "work", "side", "median", "launches")
        query = f"""SELECT {", ".join(columns)} FROM points JOIN runs ON runs.id = points.run
                    ORDER BY time_utc, run, series, side"""
        with self._index() as index:
            for row in index.execute(query):
                yield dict(zip(columns, row))

    def qualify(self, found: Mapping[str, Any]) -> Path:
        """Store how reliable a suite's verdicts are on a machine; the newest replaces the one before."""
        about = found["about"]
        name = "-".join([about["machine"]["host"], about["device"], about["suite"], about["suite_id"]])
        path = self.folder / QUALIFIED / f"{name}.json"
        outputs.write_json(path, found)
        return path

    def qualifications(self) -> list[dict[str, Any]]:
        """Return all that `qualify` stored, without files that cannot be read."""
        found = []
        for path in self._qualified_files():
            with contextlib.suppress(OSError, ValueError):
                found.append(_qualification(path))
        return found

    def qualification(self, host: str, device: str, suite_id: str) -> dict[str, Any] | None:
        """Return how reliable a suite's verdicts are on a machine; None if that was not measured.

        Older versions stored only the suite's name, whatever `--set` had changed: theirs are not used.
        """
        for each in self.qualifications():
            about = each["about"]
            if (about["machine"]["host"], about["device"], about.get("suite_id")) == (host, device, suite_id):
                return each
        return None

    def tag(self, id: str, tag: str) -> None:
        """Name a run, which is then kept for ever.

        Raises:
          ValueError: there is no such run, or the name is empty, `latest`, a prefix of an id or another run's tag.
        """
        if tag == "latest" or not tag.strip():
            said = "the newest run, whichever that is" if tag.strip() else "empty"
            raise ValueError(f"history: tag {tag!r} is {said}; wanted another name")
        path = self.find(id)
        if meant := [file.stem for file in self.files() if file.stem.startswith(tag)]:
            raise ValueError(f"history: tag {tag!r} is the id of run {meant[0]}, or its beginning; wanted another name")
        other = [row.id for row in self.list() if row.tag == tag and row.id != path.stem]
        if other:
            raise ValueError(f"history: tag {tag!r} is run {other[0]}; wanted another name")
        record = read(path)
        outputs.write_text(path, text(record | {"tag": tag}))

    def verify(self) -> dict[str, str]:
        """Return unreadable files of runs and qualifications, by path relative to the folder, with the reason."""
        damaged = {}
        checks = [(path, read) for path in self.files()]
        checks += [(path, _qualification) for path in self._qualified_files()]
        for path, check in checks:
            try:
                check(path)
            except (OSError, ValueError) as error:
                damaged[str(path.relative_to(self.folder))] = str(error)
        return damaged

    def prune(self, *, now: datetime.datetime, dry_run: bool) -> list[Change]:
        """Remove what is too old, or with dry_run only list it; runs that cannot be read stay."""
        changes = []
        for path in self.files():
            try:
                record = read(path)
            except ValueError:
                continue
            age = (now - datetime.datetime.fromisoformat(record["time_utc"])).days
            if record.get("tag"):
                continue
            if age > DAYS:
                changes.append(Change(path.stem, "removed"))
                if not dry_run:
                    path.unlink()
            elif age > RAW_DAYS and has_raw(record):
                changes.append(Change(path.stem, "raw launches removed"))
                if not dry_run:
                    outputs.write_text(path, text(without_raw(record)))
        return changes

    def backup(self, folder: Path) -> Copied:
        """Copy what another folder lacks, or has in an older version; what cannot be read here stays unchanged there.

        A copy with raw launches that were pruned here is kept as FILE.before.
        """
        copied, damaged = 0, list(self.verify())
        for path in self._every_file():
            name = str(path.relative_to(self.folder))
            target, content = folder / name, _content(path)
            old = _content(target) if target.exists() else None
            if name == EVENTS and old is not None and not content.startswith(old):
                damaged.append(name)  # it is append-only, so the one here has lost lines
            elif name not in damaged and content != old:
                if old is not None and _loses_raw(path, target):
                    target.replace(target.with_name(f"{target.name}.before"))
                _copy(path, target)
                copied += 1
        return Copied(copied, tuple(damaged))

    def restore(self, folder: Path) -> Copied:
        """Copy from a backup what is missing or cannot be read here; unreadable files become FILE.damaged.

        Raises:
          ValueError: the folder holds no runs.
        """
        other, copied, put_aside = History(folder), 0, []
        if not other.files():
            raise ValueError(f"history: {folder} holds no runs; wanted a folder that `history backup` wrote")
        damaged, unusable = list(self.verify()), list(other.verify())
        for path in other._every_file():
            name = str(path.relative_to(folder))
            target = self.folder / name
            is_shorter = name == EVENTS and target.exists() and _is_start(target, path)
            if name in unusable or (target.exists() and name not in damaged and not is_shorter):
                continue
            if name in damaged:
                target.replace(target.with_name(f"{target.name}.damaged"))
                put_aside.append(name)
            _copy(path, target)
            copied += 1
        return Copied(copied, tuple(put_aside))

    def _every_file(self) -> list[Path]:
        """Return all files that a backup contains: runs, qualifications, and the alerts' events."""
        return [
            *self.files(), *self._qualified_files(), *self.folder.glob(EVENTS),
        ]  # fmt: skip

    def _qualified_files(self) -> list[Path]:
        return sorted((self.folder / QUALIFIED).glob("*.json"))

    def _index(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        return history_index.opened(self.folder / INDEX, self.files())


def _content(path: Path) -> bytes:
    """Return what a backup has of a file: of events only complete lines, as the next event replaces a torn one."""
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1] if path.name == EVENTS else content


def _copy(path: Path, target: Path) -> None:
    with outputs.whole(target) as temporary:
        temporary.write_bytes(_content(path))


def _is_start(path: Path, other: Path) -> bool:
    """True if a file is a proper prefix of another."""
    content, whole = _content(path), _content(other)
    return len(content) < len(whole) and whole.startswith(content)


def _loses_raw(path: Path, target: Path) -> bool:
    """True if a run's copy has raw launches that the run has no longer."""
    try:
        return has_raw(read(target)) and not has_raw(read(path))
    except ValueError:  # no run, or a damaged copy
        return False


def _qualification(path: Path) -> dict[str, Any]:
    """Read what `qualify` stored.

    Raises:
      ValueError: the file is damaged, or is not a qualification.
    """
    found = outputs.read_json(path)
    try:
        about = found["about"]
        known = (about["machine"]["host"], about["device"], about["suite"], found["real"], found["drawn"])
        whole = {name: math.inf if share is None else share for name, share in found["smallest"].items()}
        if not all(map(bool, known)) or not isinstance(found["power"], dict):
            raise ValueError(f"about={about}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no qualification ({error!r}); remove it, or restore a backup") from error
    return found | {"smallest": whole}  # an effect that no run decides is infinite, which JSON stores as null


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[-5:]) or "none: the folder is empty"
