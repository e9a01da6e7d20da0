"""Stages to measure on a GPU, in order of priority: schema of configs/gpu/*.yaml (S file: neither JAX nor PyTorch).

Also runs the command of one stage: within its time limit, ending all that it started, with its output in a log.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from jaxbench import outputs, process_environment
from jaxbench.config import Base
from jaxbench.measure.process import last_line

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 10.0  # between interrupting a stage and killing it
LOOK_S = 5.0  # between two looks at what a stage has measured so far: the most that a killed call loses
CLOCK_S = 2.0  # largest difference between two processes' readings of a third one's start time
LOG_BYTES = 2**20  # of a stage's output that log.txt keeps: half from its start, half from its end
FLAGS = "XLA_FLAGS"
INTERRUPTED = "interrupted"  # reason of the stage that was interrupted

# Packages whose import name differs from their own.
IMPORTED_AS = {"orbax-checkpoint": "orbax", "scikit-learn": "sklearn"}


class Stage(Base):
    """One command and what is kept of it."""

    name: str = pydantic.Field(pattern=r"^[a-z0-9_]+$")
    about: str  # the figures it gives
    # Shell words; {work} is its folder, {device} gpu, or cpu in a rehearsal, {data} the folder of --data.
    command: str
    rehearsal: str = ""  # words appended to the command in a rehearsal, which make it tiny
    limit_s: float = pydantic.Field(gt=0)  # seconds after which it is ended
    least_s: float = pydantic.Field(default=0.0, ge=0)  # not started with less left, as it would give no figure
    needs: tuple[str, ...] = ()  # packages in addition to those that every stage needs
    # Environment variables; {work}, {device} and {data} in values as in command.
    environment: dict[str, str] = {}
    repeats: bool = False  # a resumed call runs it again, as its input may be newer
    returned: tuple[str, ...] = ()  # files of its folder that are returned in addition to its records

    @property
    def reads_data(self) -> bool:
        """True if it needs the folder of --data, which a rehearsal replaces."""
        return "{data}" in self.command

    def words(self, *, work: str, device: str, is_rehearsal: bool, python: str, data: str = "") -> list[str]:
        """Return the command line of the stage.

        Raises:
          ValueError: a placeholder in braces is unknown, the command cannot be split, or it has no words.
        """
        text = f"{self.command} {self.rehearsal}" if is_rehearsal else self.command
        try:
            words = [self._filled(word, work=work, device=device, data=data) for word in shlex.split(text)]
        except ValueError as error:
            raise ValueError(f"stage {self.name}: command {text!r}: {error}") from error
        if not words:
            raise ValueError(f"stage {self.name}: command {text!r} has no words")
        return [python, *words[1:]] if words[0] == "python" else words

    def settings(self, *, work: str, device: str, data: str = "") -> dict[str, str]:
        """Return its environment variables.

        Raises:
          ValueError: a placeholder in braces is unknown.
        """
        places = {"work": work, "device": device, "data": data}
        return {name: self._filled(value, **places) for name, value in self.environment.items()}

    def configurations(self, *, is_rehearsal: bool) -> dict[str, str]:
        """Return name -> sha256 of each YAML file that its command names, and of those that these name in turn."""
        text = f"{self.command} {self.rehearsal}" if is_rehearsal else self.command
        names, found = [word.rpartition("=")[2] for word in shlex.split(text)], {}
        while names:
            name = names.pop()
            if name in found or not name.endswith((".yaml", ".yml")) or not (ROOT / name).is_file():
                continue
            content = (ROOT / name).read_bytes()
            found[name] = hashlib.sha256(content).hexdigest()
            for value in _strings(content):
                names += [value, *re.findall(r"[\w./-]+\.ya?ml", value)]  # the string may be a whole command
        return found

    def _filled(self, word: str, **places: str) -> str:
        try:
            return word.format(**places)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"stage {self.name}: {word!r}: {error} is no place; {{work}}, {{device}} and {{data}} are known"
            ) from error

    def missing(self) -> list[str]:
        """Return the packages that it needs and that are not installed."""
        return missing(self.needs)


def _strings(content: bytes) -> list[str]:
    """Return the strings of a YAML file; none if it is damaged, which the command itself will report."""
    import yaml

    try:
        left, found = [yaml.safe_load(content)], []
    except (yaml.YAMLError, ValueError):  # ValueError: not UTF-8, or a date that Python rejects
        return []
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            left += value
        elif isinstance(value, str):
            found.append(value)
    return found


class Stages(Base):
    """Stages in order of priority."""

    needs: tuple[str, ...] = ()  # packages that every stage needs
    stages: tuple[Stage, ...] = pydantic.Field(min_length=1)

    @pydantic.model_validator(mode="after")
    def _check(self) -> Stages:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages: a name stands twice among {', '.join(names)}")
        for stage in self.stages:
            stage.words(work="", device="", is_rehearsal=True, python="")
            stage.settings(work="", device="")
            for name in stage.returned:
                if not name or "/" in name or name.startswith("."):
                    raise ValueError(f"stage {stage.name}: returned: {name!r} is no name of a file of its folder")
        return self

    def chosen(self, names: Sequence[str] | None) -> list[Stage]:
        """Return the stages of these names, in the order of the file; None = all.

        Raises:
          ValueError: no stage has one of the names, or there is no name.
        """
        known = [stage.name for stage in self.stages]
        for name in [""] if names is not None and not names else names or ():
            if name not in known:
                raise ValueError(f"--stage={name!r} is unknown, wanted some of {', '.join(known)}")
        return [stage for stage in self.stages if names is None or stage.name in names]


def missing(packages: Sequence[str]) -> list[str]:
    """Return those of the packages that cannot be imported here."""

    def spec(name: str) -> Any:
        try:
            return importlib.util.find_spec(IMPORTED_AS.get(name, name.replace("-", "_")))
        except (ImportError, ValueError):  # not a module's name, or its parent package is missing
            return None

    return [name for name in packages if spec(name) is None]


class Log:
    """A stage's output, appended to log.txt as it comes, so that it survives the death of this process.

    As a context manager it closes the log on exit, and `said` is then the kept output.
    """

    def __init__(self, path: Path, title: str):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.output, self.said = path, open(path, "ab"), ""
        self.output.write((("\n" if self.output.tell() else "") + title).encode(errors="backslashreplace"))
        self.output.flush()
        self._start = self.output.tell()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.said = self.close()

    def printed(self) -> str:
        """Return the output; of more than LOG_BYTES, its start and end with a note of the bytes left out."""
        with open(self.path, "rb") as file:
            size = file.seek(0, os.SEEK_END) - self._start
            file.seek(self._start)
            if size <= LOG_BYTES:
                return file.read().decode(errors="replace")
            first = file.read(LOG_BYTES // 2)
            file.seek(-(LOG_BYTES // 2), os.SEEK_END)
            note = f"\n[{size - 2 * (LOG_BYTES // 2)} bytes left out]\n"
            return first.decode(errors="replace") + note + file.read().decode(errors="replace")

    def close(self) -> str:
        """End the stage's part of the log, shorten it if it is too long, and return it."""
        said, size = self.printed(), self.output.seek(0, os.SEEK_END) - self._start
        with self.output:
            if size > LOG_BYTES:
                self.output.truncate(self._start)
                self.output.write(said.encode(errors="replace"))
        return said


def call(
    words: Sequence[str], own: Mapping[str, str], limit_s: float, log: Log, look: Callable[[], None], mark: Path
) -> str:
    """Run the command of a stage; return why it failed, or an empty string.

    Args:
      own: its environment variables.
      look: called every LOOK_S while it runs.
      mark: file that names the command while it runs, for `end_left`.

    Raises:
      KeyboardInterrupt: a second interrupt came while the command was being ended; the command is ended nevertheless.
    """
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    settings |= {"PYTHONUNBUFFERED": "1", process_environment.MARKER: ""} | dict(own)
    if FLAGS in own and FLAGS in os.environ:  # the user's apply too; of a flag that stands twice, XLA takes the last
        settings[FLAGS] = f"{os.environ[FLAGS]} {own[FLAGS]}"
    try:  # output goes to a file: a pipe would stay open as long as anything that the command has started
        process = subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log.output, stderr=subprocess.STDOUT, env=settings,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"cannot be started: {error.strerror}: {words[0]}"
    if reason := _watched(process, limit_s, look, mark):
        return reason
    if process.returncode < 0:
        number = -process.returncode
        name = {each.value: each.name for each in signal.Signals}.get(number, f"signal {number}")
        why = ", as where memory runs out" if number == signal.SIGKILL else ""
        return f"ended by {name}{why}: {last_line(log.printed(), 'nothing printed')}"
    code = process.returncode
    return f"exit code {code}: {last_line(log.printed(), 'nothing printed')}" if code else ""


def end_left(mark: Path) -> bool:
    """End a stage's command, and all that it started, if a killed call left it running; return whether it did.

    A process with the mark's id but another start time is not the command. Nothing is ended while the call still runs.
    """
    import psutil

    try:
        found = json.loads(mark.read_text(encoding="utf-8"))
        command, caller = (_same(*found[name]) for name in ("command", "call"))
    except (OSError, ValueError, KeyError, TypeError):  # no mark, or half of one
        return False
    if caller is not None:
        return False
    if command is not None:
        with contextlib.suppress(psutil.Error):
            started = {command, *command.children(recursive=True)}
            _kill(command.pid, started)
            end = time.monotonic() + GRACE_S
            while any(_runs(each) for each in started) and time.monotonic() < end:
                time.sleep(0.05)
    mark.unlink(missing_ok=True)
    return command is not None


def _same(pid: int, begun: float) -> Any:
    """Return the process with this id and start time (psutil.Process); None if it no longer runs."""
    import psutil

    try:
        found = psutil.Process(pid)
        return found if abs(found.create_time() - begun) < CLOCK_S and _runs(found) else None
    except psutil.Error:
        return None


def _runs(process: Any) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _write_mark(mark: Path, process: subprocess.Popen) -> None:
    import psutil

    with contextlib.suppress(psutil.Error, OSError):  # without a mark, a killed call's command is left running
        pids = {"command": process.pid, "call": os.getpid()}
        outputs.write_json(mark, {name: [pid, psutil.Process(pid).create_time()] for name, pid in pids.items()})


def _watched(process: subprocess.Popen, limit_s: float, look: Callable[[], None], mark: Path) -> str:
    """Wait for a command; return why it was ended, empty if it ended by itself. What it started is ended with it.

    Exception: a process that left the command's session, and whose parent ended, between two looks.
    """
    end, started = time.monotonic() + limit_s, set()
    try:
        _write_mark(mark, process)
        while process.poll() is None:
            started |= _started(process)
            look()
            if (left := end - time.monotonic()) <= 0:
                return f"ended at its limit of {limit_s:.0f} s"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(LOOK_S, left))
    except KeyboardInterrupt:
        look()  # before waiting for the command to end, which a second interrupt may cut short
        return INTERRUPTED
    finally:
        try:
            _end(process, started)
        finally:
            mark.unlink(missing_ok=True)
    return ""


def _started(process: subprocess.Popen) -> set[Any]:
    """Return the running processes that a command has started, also in other sessions (psutil.Process)."""
    import psutil

    try:
        return set(psutil.Process(process.pid).children(recursive=True))
    except psutil.Error:
        return set()


def _end(process: subprocess.Popen, started: set[Any]) -> None:
    """End a running command and all that it started: any survivor would keep the device's memory."""
    try:
        started |= _started(process)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
    finally:  # also at a second interrupt
        _kill(process.pid, started)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def _kill(group: int, started: set[Any]) -> None:
    import psutil

    with contextlib.suppress(ProcessLookupError, PermissionError):  # also where the command itself has ended
        os.killpg(group, signal.SIGKILL)
    for each in started:
        with contextlib.suppress(psutil.Error):
            each.kill()
