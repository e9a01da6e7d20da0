"""A queue of bulk jobs in a folder: waiting, running, ended; nothing is lost when a process dies (S file).

Each job has its own folder: job.json (what to run), state.json (its progress), log.txt (its output). The process that
runs it holds a lock of the operating system, which is released when it dies: a job that is `running` without a lock has
lost its worker and is claimed again. The bulk commands of experiments/ resume where they stopped, so a job is run again
by the same command line.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic

from jaxbench import outputs, store
from jaxbench.config import Base

log = logging.getLogger("jaxbench.jobs")

COMMANDS = Path(__file__).resolve().parents[2] / "experiments"
HERE = "{job}"  # the folder of a job that runs in it: as its cwd, and in its words
ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{12}")
State = Literal["waiting", "running", "done", "failed", "cancelled"]
STATE = "state.json"  # file of a job's Progress
ENDED = ("done", "failed", "cancelled")
MOST_PAUSE_S = 600.0  # that a job waits before it is run again


class Job(Base):
    """What is run, as it was submitted."""

    id: str
    words: tuple[str, ...]  # of the command: a file of experiments/, then its arguments
    cwd: str  # folder that relative paths of the words are in
    kind: str = ""  # owner, where several share the queue: a server's own jobs have one
    title: str = ""
    submitted: float  # seconds since 1970
    priority: int = 0  # higher runs first
    most_attempts: int = pydantic.Field(default=3, ge=1)  # of a command that crashes, or whose worker dies

    @property
    def is_in_its_folder(self) -> bool:
        """True where the job runs in its own folder, and HERE in its words stands for that."""
        return self.cwd == HERE


class Progress(Base):
    """The state of a job."""

    state: State = "waiting"
    attempts: int = 0  # started
    not_before: float = 0.0  # seconds since 1970: a command that crashed is run again later
    started: float | None = None  # the last attempt
    ended: float | None = None
    exit_code: int | None = None
    note: str = ""  # why it ended as it did
    worker: str = ""  # which runs it, or did


class Entry(Base):
    """A job of a queue, with its folder."""

    job: Job
    progress: Progress
    folder: Path

    @property
    def log(self) -> Path:
        """Output of the command, of all attempts."""
        return self.folder / "log.txt"

    def as_dict(self) -> dict[str, Any]:
        """Return job and progress as a dictionary, for people and clients."""
        return self.job.model_dump(mode="json") | self.progress.model_dump(mode="json")


class Queue:
    """The jobs of a folder; any number of processes may use it at once, also on machines that share the folder."""

    def __init__(self, folder: str | Path):
        """Args: folder: created with the first job."""
        self.folder = Path(folder).absolute()
        self._ended: dict[str, tuple[int, ...]] = {}  # versions of the states of jobs that were seen to have ended
        self._denied: set[str] = set()  # ids of jobs that cannot be taken here, which is said once each

    def submit(
        self, words: Sequence[str], *, title: str = "", priority: int = 0, most_attempts: int = 3,
        fill: Callable[[Path], None] = lambda folder: None, cwd: str | None = None, kind: str = "",
    ) -> Entry:  # fmt: skip
        """Add a job.

        Args:
          words: of the command; HERE stands for the job's folder if cwd is HERE.
          fill: writes files into the job's folder before anybody sees it.
          cwd: folder that the command runs in, HERE = the job's own; None = this process's.

        Raises:
          ValueError: the command is not one of experiments/, or a text is not UTF-8.
        """
        cwd = os.getcwd() if cwd is None else cwd
        check_words(words)
        _check_utf8(cwd, title)
        now = time.time()
        moment = datetime.datetime.fromtimestamp(now, datetime.UTC)
        id = f"{moment:%Y%m%dT%H%M%S}-{secrets.token_hex(6)}"
        job = Job(
            id=id, words=tuple(words), cwd=cwd, title=title, submitted=now, priority=priority,
            most_attempts=most_attempts, kind=kind,
        )  # fmt: skip
        with outputs.whole_folder(self.folder / id) as made:
            fill(made)
            outputs.write_json(made / "job.json", job.model_dump(mode="json"))
            _write(made, Progress())
        return self.find(id)

    def ids(self) -> list[str]:
        """Return the ids of all jobs, damaged ones too, ordered by the second of their submission."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted(name for name in names if ID.fullmatch(name))

    def entries(self) -> list[Entry]:
        """Return all jobs, the oldest first; damaged ones, and folders without a job, are skipped."""
        found = []
        for name in self.ids():
            with contextlib.suppress(FileNotFoundError, ValueError):  # removed meanwhile, or damaged
                found.append(_read(self.folder / name))
        return sorted(found, key=lambda each: each.job.submitted)  # ids do not order jobs within a second

    def unfinished(self) -> list[Entry]:
        """Return the jobs that have not ended, as `entries` does; files of those that have are read once."""
        found = []
        for name in self.ids():
            with contextlib.suppress(OSError, ValueError):  # removed meanwhile, another user's, or damaged
                file = os.stat(self.folder / name / STATE)
                version = (file.st_ino, file.st_mtime_ns, file.st_size)  # every change is a new file
                if self._ended.get(name) == version:
                    continue
                if (entry := _read(self.folder / name)).progress.state in ENDED:
                    self._ended[name] = version
                else:
                    found.append(entry)
        return sorted(found, key=lambda each: each.job.submitted)

    def find(self, id: str) -> Entry:
        """Return a job.

        Raises:
          ValueError: there is none of that id, or its files are damaged.
        """
        return _read(self._folder(id))

    def _folder(self, id: str) -> Path:
        if not ID.fullmatch(id) or not (self.folder / id).is_dir():
            raise ValueError(f"jobs: {id[:60]!r} is none of {self.folder}")
        return self.folder / id

    def cancel(self, id: str) -> Entry:
        """Cancel a job: at once if it waits, soon if it runs.

        Raises:
          ValueError: as `find`; or it has ended.
        """
        entry = self.find(id)
        (entry.folder / "cancel").touch()
        with holding(entry.folder) as is_mine:
            entry = _read(entry.folder)
            if entry.progress.state in ENDED:
                (entry.folder / "cancel").unlink(missing_ok=True)
                raise ValueError(f"jobs: {id} is {entry.progress.state}; nothing is left to cancel")
            if is_mine:
                end(entry, "cancelled", note="cancelled before it ran on")
        return self.find(id)

    def retry(self, id: str) -> Entry:
        """Run a failed or cancelled job again, with its attempts counted anew.

        Raises:
          ValueError: as `find`; or the job has neither failed nor been cancelled.
        """
        entry = self.find(id)
        with holding(entry.folder) as is_mine:
            entry = _read(entry.folder)
            if not is_mine or entry.progress.state not in ("failed", "cancelled"):
                raise ValueError(f"jobs: {id} is {entry.progress.state}; wanted one that failed or was cancelled")
            (entry.folder / "cancel").unlink(missing_ok=True)
            _write(entry.folder, Progress())
        return self.find(id)

    def remove(self, id: str) -> None:
        """Remove a job that has ended, or is damaged and not running, with all its files.

        Raises:
          ValueError: there is none of that id, or it has not ended.
        """
        if not _removed(folder := self._folder(id)):
            raise ValueError(f"jobs: {id} is {_read(folder).progress.state}; cancel it first")

    def remove_older(self, seconds: float) -> list[str]:
        """Remove the jobs that ended more than `seconds` ago; return their ids."""
        limit = time.time() - seconds
        old = [each for each in self.entries() if each.progress.state in ENDED and (each.progress.ended or 0) < limit]
        return [entry.job.id for entry in old if _removed(entry.folder)]

    @contextlib.contextmanager
    def claimed(self, worker: str) -> Iterator[Entry | None]:
        """Claim the next job for the duration of the block, so that nobody else gets it; None = there is none.

        The highest priority goes first, then the oldest. Jobs whose worker died are included. If that was the last
        attempt, the job is marked as failed and handed out in that state: there is nothing to run. A job that cannot be
        taken, such as another user's, is passed over with a warning.
        """
        now = time.time()
        for entry in sorted(self.unfinished(), key=lambda each: (-each.job.priority, each.job.submitted)):
            # nobody is told to wait longer than MOST_PAUSE_S: beyond it, the clock has been set back meanwhile
            if now < entry.progress.not_before <= now + MOST_PAUSE_S:
                continue
            with self._tried(entry) as is_mine:
                if not is_mine or not entry.folder.is_dir():
                    continue
                entry = _read(entry.folder)  # it may have ended between the two
                if entry.progress.state in ENDED:
                    continue
                if (entry.folder / "cancel").exists():  # its worker ended before it saw that
                    end(entry, "cancelled", note="cancelled before it ran on")
                    continue
                if entry.progress.attempts >= entry.job.most_attempts:
                    end(entry, "failed", note=f"{entry.progress.attempts} attempts; the worker died in the last one")
                    yield _read(entry.folder)
                    return
                begun = entry.progress.attempts + 1
                _write(entry.folder, Progress(state="running", attempts=begun, started=now, worker=worker))
                yield _read(entry.folder)
                return
        yield None

    @contextlib.contextmanager
    def _tried(self, entry: Entry) -> Iterator[bool]:
        """Hold a job; also False, with one warning, where the system does not let this process."""
        with contextlib.ExitStack() as stack:
            try:
                is_mine = stack.enter_context(holding(entry.folder))
            except OSError as error:
                is_mine = False
                if entry.job.id not in self._denied:
                    self._denied.add(entry.job.id)
                    log.warning("job cannot be taken", extra={"fields": {"job": entry.job.id, "error": str(error)}})
            yield is_mine


def check_words(words: Sequence[str]) -> None:
    """Check that words are the command line of a command of experiments/.

    Raises:
      ValueError: they are not.
    """
    name = Path(words[0]).name if words else ""
    if not name.endswith(".py") or Path(words[0]).parent not in (Path("experiments"), Path(), COMMANDS):
        raise ValueError(f"jobs: {shlex.join(words)[:60]!r} is no command; wanted experiments/NAME.py and its flags")
    if not (COMMANDS / name).is_file():
        known = ", ".join(sorted(path.name for path in COMMANDS.glob("*.py")))
        raise ValueError(f"jobs: experiments/{name} is not there; wanted one of {known}")
    _check_utf8(*words)


def _check_utf8(*texts: str) -> None:
    """Raise ValueError if a text is no UTF-8, as the name of a file need not be: job.json could not hold it."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"jobs: {text[:60]!a} is not UTF-8 (place {error.start}); rename it") from error


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[bool]:
    """Lock a job for this process; False if another one holds it. The lock is released when the process dies."""
    with contextlib.ExitStack() as stack:
        try:
            is_mine = stack.enter_context(store.taken(folder / ".lock"))
        except FileNotFoundError:  # the job was removed
            is_mine = False
        yield is_mine


def end(entry: Entry, state: State, *, exit_code: int | None = None, note: str = "") -> None:
    """Record that a job has ended; only its holder may."""
    changed = {"state": state, "ended": time.time(), "exit_code": exit_code, "note": note}
    _write(entry.folder, entry.progress.model_copy(update=changed))


def postpone(entry: Entry, seconds: float, *, attempts: int, note: str = "") -> None:
    """Let a job wait for `seconds`, at most MOST_PAUSE_S; attempts: how many count. Only its holder may."""
    later = time.time() + min(seconds, MOST_PAUSE_S)
    _write(entry.folder, Progress(attempts=attempts, not_before=later, note=note))


def _removed(folder: Path) -> bool:
    """Remove the folder of a job that has ended, unless it was started again meanwhile; True if it is gone."""
    with holding(folder) as is_mine:
        if is_mine and not _may_run(folder):
            shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def _may_run(folder: Path) -> bool:
    """Return whether a job has not ended; one with damaged files is never run."""
    try:
        return _read(folder).progress.state not in ENDED
    except ValueError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            raise  # its state is unknown: a file that cannot be read now may be intact
        return False


def _read(folder: Path) -> Entry:
    """Read a job's files.

    Raises:
      ValueError: one is missing or damaged.
    """
    job, progress = _content(folder / "job.json", Job), _content(folder / STATE, Progress)
    return Entry(job=job, progress=progress, folder=folder)


def _content(path: Path, kind: type[Any]) -> Any:
    try:
        return kind(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        said = str(error).partition("\n")[0]
        raise ValueError(f"jobs: {path} is damaged ({said}); the job is never run, and can be removed") from error


def _write(folder: Path, progress: Progress) -> None:
    outputs.write_json(folder / STATE, progress.model_dump(mode="json"))
