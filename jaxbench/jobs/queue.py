"""A queue of bulk work in a folder: what is waiting, running, ended; nothing is lost with a process (S file).

A job is a folder of its own: job.json (what to run), state.json (how far it is), log.txt (what it said). Who runs it
holds a lock of the operating system, which goes with the process: a job that is `running` without one has lost its
worker and is claimed again. What is run can go on where it stopped (the bulk commands of experiments/), so it is run by
the same words.
"""

from __future__ import annotations

import contextlib
import datetime
import json
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

COMMANDS = Path(__file__).resolve().parents[2] / "experiments"
HERE = "{job}"  # in a job's words: its own folder
ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{12}")
State = Literal["waiting", "running", "done", "failed", "cancelled"]
ENDED = ("done", "failed", "cancelled")


class Job(Base):
    """What is run, as it was submitted."""

    id: str
    words: tuple[str, ...]  # of the command: a file of experiments/, then its arguments
    cwd: str  # folder that relative paths of the words are in
    kind: str = ""  # whose it is, where several share the queue: a server's own jobs have one
    title: str = ""
    submitted: float  # seconds since 1970
    priority: int = 0  # higher is run first
    most_attempts: int = pydantic.Field(default=3, ge=1)  # of a command that breaks, or whose worker dies


class Progress(Base):
    """How far a job is."""

    state: State = "waiting"
    attempts: int = 0  # begun
    not_before: float = 0.0  # seconds since 1970: a command that broke is run again later
    started: float | None = None  # the last attempt
    ended: float | None = None
    exit_code: int | None = None
    note: str = ""  # why it ended as it did
    worker: str = ""  # who runs it, or did


class Entry(Base):
    """A job of a queue, and where it is."""

    job: Job
    progress: Progress
    folder: Path

    @property
    def log(self) -> Path:
        """What the command wrote, of all attempts."""
        return self.folder / "log.txt"

    def as_dict(self) -> dict[str, Any]:
        """For people and clients: what it is, and how far."""
        return self.job.model_dump(mode="json") | self.progress.model_dump(mode="json")


class Queue:
    """The jobs of a folder; any number of processes may use one at a time, on machines that share it too."""

    def __init__(self, folder: str | Path):
        """Args: folder: is made with the first job."""
        self.folder = Path(folder).absolute()

    def submit(
        self, words: Sequence[str], *, title: str = "", priority: int = 0, most_attempts: int = 3,
        fill: Callable[[Path], None] = lambda folder: None, cwd: str | None = None, kind: str = "",
    ) -> Entry:  # fmt: skip
        """Add a job.

        Args:
          words: of the command; HERE stands for the job's folder.
          fill: writes files into the job's folder before anybody sees it.
          cwd: folder that the command runs in, HERE too; None = the one that this process is in.

        Raises:
          ValueError: the command is none of experiments/.
        """
        check_words(words)
        now = time.time()
        moment = datetime.datetime.fromtimestamp(now, datetime.UTC)
        id = f"{moment:%Y%m%dT%H%M%S}-{secrets.token_hex(6)}"
        job = Job(
            id=id, words=tuple(words), cwd=os.getcwd() if cwd is None else cwd, title=title, submitted=now,
            priority=priority, most_attempts=most_attempts, kind=kind,
        )  # fmt: skip
        with outputs.whole_folder(self.folder / id) as made:
            fill(made)
            outputs.write_json(made / "job.json", job.model_dump(mode="json"))
            _write(made, Progress())
        return self.find(id)

    def ids(self) -> list[str]:
        """Ids of all jobs, the damaged ones too, by the second that they were submitted in."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted(name for name in names if ID.fullmatch(name))

    def entries(self) -> list[Entry]:
        """All jobs, the oldest first; damaged ones, and folders that hold none, are passed over."""
        found = []
        for name in self.ids():
            with contextlib.suppress(FileNotFoundError, ValueError):  # removed meanwhile, or damaged
                found.append(_read(self.folder / name))
        return sorted(found, key=lambda each: each.job.submitted)  # ids are alike within a second

    def find(self, id: str) -> Entry:
        """A job.

        Raises:
          ValueError: there is none of that id, or its files are damaged.
        """
        return _read(self._folder(id))

    def _folder(self, id: str) -> Path:
        if not ID.fullmatch(id) or not (self.folder / id).is_dir():
            raise ValueError(f"jobs: {id[:60]!r} is none of {self.folder}")
        return self.folder / id

    def cancel(self, id: str) -> Entry:
        """End a job: at once where it waits, soon where it runs.

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
        """Run a job again that failed or was cancelled, its attempts counted anew.

        Raises:
          ValueError: as `find`; or it has done neither.
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
        """Remove a job that has ended, or is damaged and run by nobody, with all its files.

        Raises:
          ValueError: there is none of that id, or it has not ended.
        """
        if not _removed(folder := self._folder(id)):
            raise ValueError(f"jobs: {id} is {_read(folder).progress.state}; cancel it first")

    def remove_older(self, seconds: float) -> list[str]:
        """Remove the jobs that ended longer ago; their ids."""
        limit = time.time() - seconds
        old = [each for each in self.entries() if each.progress.state in ENDED and (each.progress.ended or 0) < limit]
        return [entry.job.id for entry in old if _removed(entry.folder)]

    @contextlib.contextmanager
    def claimed(self, worker: str) -> Iterator[Entry | None]:
        """The job to run next, which nobody else gets while the block lasts; None = there is none.

        First the highest priority, then the oldest. A job whose worker died is one of them; after its last attempt it
        has failed, which is written, and it is handed out in that state: there is nothing to run.
        """
        now = time.time()
        for entry in sorted(self.entries(), key=lambda each: (-each.job.priority, each.job.submitted)):
            if entry.progress.state in ENDED or entry.progress.not_before > now:
                continue
            with holding(entry.folder) as is_mine:
                if not is_mine or not entry.folder.is_dir():
                    continue
                entry = _read(entry.folder)  # it may have ended between the two
                if entry.progress.state in ENDED:
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


def check_words(words: Sequence[str]) -> None:
    """Check that words are a command of experiments/.

    Raises:
      ValueError: they are not.
    """
    name = Path(words[0]).name if words else ""
    if not name.endswith(".py") or Path(words[0]).parent not in (Path("experiments"), Path(), COMMANDS):
        raise ValueError(f"jobs: {shlex.join(words)[:60]!r} is no command; wanted experiments/NAME.py and its flags")
    if not (COMMANDS / name).is_file():
        known = ", ".join(sorted(path.name for path in COMMANDS.glob("*.py")))
        raise ValueError(f"jobs: experiments/{name} is not there; wanted one of {known}")


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[bool]:
    """Hold a job for this process, where nobody else does: True or False; a process that dies lets go."""
    with contextlib.ExitStack() as stack:
        try:
            is_mine = stack.enter_context(store.taken(folder / ".lock"))
        except FileNotFoundError:  # the job was removed
            is_mine = False
        yield is_mine


def end(entry: Entry, state: State, *, exit_code: int | None = None, note: str = "") -> None:
    """Write that a job has ended; only who holds it may."""
    changed = {"state": state, "ended": time.time(), "exit_code": exit_code, "note": note}
    _write(entry.folder, entry.progress.model_copy(update=changed))


def postpone(entry: Entry, seconds: float, *, attempts: int, note: str = "") -> None:
    """Let a job wait, so many attempts of which count; only who holds it may."""
    _write(entry.folder, Progress(attempts=attempts, not_before=time.time() + seconds, note=note))


def _removed(folder: Path) -> bool:
    """Remove the folder of a job that has ended, unless it was begun anew meanwhile; True where it is gone."""
    with holding(folder) as is_mine:
        if is_mine and not _may_run(folder):
            shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def _may_run(folder: Path) -> bool:
    """True where a job has not ended; one whose files are damaged is never run."""
    try:
        return _read(folder).progress.state not in ENDED
    except ValueError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            raise  # nothing is known of it: a file that cannot be read now may be well
        return False


def _read(folder: Path) -> Entry:
    """A job's files.

    Raises:
      ValueError: one is missing or damaged.
    """
    job, progress = _content(folder / "job.json", Job), _content(folder / "state.json", Progress)
    return Entry(job=job, progress=progress, folder=folder)


def _content(path: Path, kind: type[Any]) -> Any:
    try:
        return kind(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        said = str(error).partition("\n")[0]
        raise ValueError(f"jobs: {path} is damaged ({said}); the job is never run, and can be removed") from error


def _write(folder: Path, progress: Progress) -> None:
    outputs.write_json(folder / "state.json", progress.model_dump(mode="json"))
