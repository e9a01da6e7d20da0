"""What is measured on a GPU, in order of worth: the model of configs/gpu/*.yaml (S file: neither JAX nor PyTorch).

And how the command of one stage is run: inside its limit, to the end of what it started, its output in a log.
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
GRACE_S = 10.0  # between asking a stage to end and ending it
LOOK_S = 5.0  # between two looks at what a stage has measured so far: what a killed call loses at most
CLOCK_S = 2.0  # by which two processes may read the start of a third apart
LOG_BYTES = 2**20  # that log.txt keeps of what a stage printed, half of them its first ones
INTERRUPTED = "interrupted"  # reason of the stage that ran then

# Where a package is imported by another name than its own.
IMPORTED_AS = {"orbax-checkpoint": "orbax", "scikit-learn": "sklearn"}


class Stage(Base):
    """One command and what is kept of it."""

    name: str = pydantic.Field(pattern=r"^[a-z0-9_]+$")
    about: str  # the figures it gives
    # Words of a shell; {work} is its folder, {device} gpu, or cpu in a rehearsal, {data} the folder of --data.
    command: str
    rehearsal: str = ""  # words that make it tiny, behind the command
    limit_s: float = pydantic.Field(gt=0)  # it is ended behind so many seconds
    least_s: float = pydantic.Field(default=0.0, ge=0)  # not begun with less left: before that it has no figure
    needs: tuple[str, ...] = ()  # packages beside those that every stage needs
    # Settings of its environment; words in values as in command.
    environment: dict[str, str] = {}
    repeats: bool = False  # a resumed call runs it again, as what it reads may be newer
    returned: tuple[str, ...] = ()  # files of its folder that come back beside its records

    @property
    def reads_data(self) -> bool:
        """True where it needs the folder of --data, which a rehearsal replaces."""
        return "{data}" in self.command

    def words(self, *, work: str, device: str, is_rehearsal: bool, python: str, data: str = "") -> list[str]:
        """Command line of the stage.

        Raises:
          ValueError: a place in braces that is not known.
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
        """Settings of its environment.

        Raises:
          ValueError: a place in braces that is not known.
        """
        places = {"work": work, "device": device, "data": data}
        return {name: self._filled(value, **places) for name, value in self.environment.items()}

    def configurations(self, *, is_rehearsal: bool) -> dict[str, str]:
        """Name and sha256 of each YAML file that its command names, and of those that such a file names in turn."""
        text = f"{self.command} {self.rehearsal}" if is_rehearsal else self.command
        names, found = [word.rpartition("=")[2] for word in shlex.split(text)], {}
        while names:
            name = names.pop()
            if name in found or not name.endswith((".yaml", ".yml")) or not (ROOT / name).is_file():
                continue
            content = (ROOT / name).read_bytes()
            found[name] = hashlib.sha256(content).hexdigest()
            for value in _strings(content):
                names += [value, *re.findall(r"[\w./-]+\.ya?ml", value)]  # also where a command stands in it
        return found

    def _filled(self, word: str, **places: str) -> str:
        try:
            return word.format(**places)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"stage {self.name}: {word!r}: {error} is no place; {{work}}, {{device}} and {{data}} are known"
            ) from error

    def missing(self) -> list[str]:
        """Packages it needs that are not installed."""
        return missing(self.needs)


def _strings(content: bytes) -> list[str]:
    """Strings of a YAML file; none where it is damaged, which the command itself will say."""
    import yaml

    try:
        left, found = [yaml.safe_load(content)], []
    except (yaml.YAMLError, ValueError):  # ValueError: no UTF-8, a date that Python does not take
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
    """Stages in order of worth."""

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
        """Stages of these names, in the order of the file; None = all.

        Raises:
          ValueError: a name that no stage has, or no name.
        """
        known = [stage.name for stage in self.stages]
        for name in [""] if names is not None and not names else names or ():
            if name not in known:
                raise ValueError(f"--stage={name!r} is unknown, wanted some of {', '.join(known)}")
        return [stage for stage in self.stages if names is None or stage.name in names]


def missing(packages: Sequence[str]) -> list[str]:
    """Those of the packages that cannot be imported here."""

    def spec(name: str) -> Any:
        try:
            return importlib.util.find_spec(IMPORTED_AS.get(name, name.replace("-", "_")))
        except (ImportError, ValueError):  # no name of a module, or what holds it is missing
            return None

    return [name for name in packages if spec(name) is None]


class Log:
    """What a stage prints, at the end of log.txt as it comes: nothing of it is lost with this process.

    As a context manager it is ended with the block, and `said` is what it says then.
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
        """What was printed: of more than LOG_BYTES the first and the last ones, what is between them counted."""
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
        """End the stage's part of the log, where it is too long shortened, and return what it says."""
        said, size = self.printed(), self.output.seek(0, os.SEEK_END) - self._start
        with self.output:
            if size > LOG_BYTES:
                self.output.truncate(self._start)
                self.output.write(said.encode(errors="replace"))
        return said


def call(
    words: Sequence[str], own: Mapping[str, str], limit_s: float, log: Log, look: Callable[[], None], mark: Path
) -> str:
    """Run the command of a stage; why it failed, empty where it did not.

    Args:
      own: settings of its environment.
      look: called while it runs, every LOOK_S.
      mark: file that names the command while it runs, for `end_left`.

    Raises:
      KeyboardInterrupt: another one came while the command was being ended, which it is.
    """
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    settings |= {"PYTHONUNBUFFERED": "1", process_environment.MARKER: ""} | dict(own)
    try:  # into a file: a pipe would stay open as long as anything that the command has started
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
    """End what a call that was killed has left running of a stage, with what it has started; False where nothing was.

    A process of the mark's number that began at another time is not the command, and one whose call runs is not left.
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
    """The process of this number and time of start (psutil.Process), None where it runs no more."""
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

    with contextlib.suppress(psutil.Error, OSError):  # without it a killed call's command is left running
        pids = {"command": process.pid, "call": os.getpid()}
        outputs.write_json(mark, {name: [pid, psutil.Process(pid).create_time()] for name, pid in pids.items()})


def _watched(process: subprocess.Popen, limit_s: float, look: Callable[[], None], mark: Path) -> str:
    """Wait for a command; why it was ended, empty where it has ended itself. What it started is ended with it.

    But for a process that has left the command's session, and whose parent has ended, between two looks.
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
        look()  # before it is waited for: who interrupts may not have the patience
        return INTERRUPTED
    finally:
        try:
            _end(process, started)
        finally:
            mark.unlink(missing_ok=True)
    return ""


def _started(process: subprocess.Popen) -> set[Any]:
    """What a command has started and still runs, in sessions of their own too (psutil.Process)."""
    import psutil

    try:
        return set(psutil.Process(process.pid).children(recursive=True))
    except psutil.Error:
        return set()


def _end(process: subprocess.Popen, started: set[Any]) -> None:
    """End a command that runs, and all that it started: what is left would keep the device's memory."""
    try:
        started |= _started(process)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
    finally:  # whoever interrupts again has waited long enough
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
