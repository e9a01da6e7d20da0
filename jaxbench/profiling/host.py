"""Profile a command's Python by line: time and memory (S file).

Time: py-spy if it is installed (running threads only), else a sampling thread inside the command (waiting threads count
too). Memory: memray if it is installed (every allocation, also of native code), else tracemalloc (allocations of Python
and numpy alone, neither XLA's nor PyTorch's). Either way the result is stacks with weights, in samples or bytes, from
which the table by line is made. A line's own weight is that of stacks that end there, its total that of stacks that
pass through it.

The profilers run outside or inside the command and pass on its exit code. An interrupt ends the command and leaves a
profile of what ran until then.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench import cli, process_environment
from jaxbench.measure import process

ROOT = Path(__file__).resolve().parents[2]
CHILD = "jaxbench.profiling.child"
CHILD_FILE = str(Path(__file__).with_name("child.py"))
STARTERS = (CHILD_FILE, "<frozen runpy>", "/runpy.py")  # files of the code that starts a command
GRACE_S = 30.0  # seconds that an interrupted command has to end
FOLDED = re.compile(r"^(?P<function>.*) \((?P<file>.*?)(?::(?P<line>\d+))?\)$")
Frame = tuple[str, str, int]  # function, file, line
Stacks = list[tuple[tuple[Frame, ...], float]]  # the outermost frame first


class Profile(NamedTuple):
    """Stacks of one command."""

    tool: str
    stacks: Stacks
    exit_code: int | None  # None: unknown, the command was killed or bypassed Python's exit (os._exit)
    scale: float  # seconds per sample; 1 for bytes
    peak: float | None = None  # peak bytes; the stacks may sum to slightly less if snapshots missed the peak
    interrupted: bool = False  # True: the profile covers what ran until the interrupt


class Line(NamedTuple):
    """A line of code."""

    place: str  # file:line
    function: str
    own: float  # share of all weight
    total: float
    own_weight: float


def words_of(command: str) -> list[str]:
    """Split a command into words: a Python script or `-m MODULE`, then its arguments.

    Raises:
      ValueError: it is not such a command, or its script does not exist.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"--command={command!a} cannot be split into words ({error})") from error
    words = words[1:] if words and re.fullmatch(r"(.*/)?python[\d.]*", words[0]) else words
    if words[:1] == ["-m"]:
        if len(words) < 2 or not re.fullmatch(r"\w+(\.\w+)*", words[1]):
            raise ValueError(f"--command={command!a}: -m wants the name of a module")
        return words
    if not words or not words[0].endswith(".py"):
        raise ValueError(
            f"--command={command!a} is no Python script; wanted experiments/NAME.py or -m MODULE, then flags"
        )
    if not Path(words[0]).is_file():
        raise ValueError(f"--command={command!a}: {words[0]} is no file")
    return words


def environment(words: Sequence[str]) -> dict[str, str]:
    """Return variables under which a command does not restart itself, as a profiler would lose it."""
    device, library = (
        flag_value(words, "device") or "cpu",
        "PyTorch" if flag_value(words, "backend") == "torch" else "XLA",
    )
    device = device if device in process_environment.PLATFORMS else "cpu"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return os.environ | process_environment.environment(device, library=library) | {"PYTHONPATH": path}


def cpu(words: Sequence[str], *, rate: int, use: str | None = None) -> Profile:
    """Run a command and sample its stacks; use: "py-spy" or "thread" (unset: the first that is available).

    Raises:
      ValueError: py-spy cannot sample.
      GateFailed: the command ended before its profile was written.
      KeyboardInterrupt: an interrupt ended it before its profile was written.
    """
    tool = use or ("py-spy" if py_spy() else "thread")
    with tempfile.TemporaryDirectory(prefix="jaxbench-profile-") as folder:
        if tool == "py-spy":
            return _py_spy(words, Path(folder), rate)
        found, code, interrupted = _inside("cpu", words, Path(folder, "stacks"), rate)
        return Profile(tool, _own(_stacks(found)), code, found["seconds"] / max(found["looks"], 1), None, interrupted)


def memory(words: Sequence[str], *, use: str | None = None) -> Profile:
    """Run a command and get its allocations at their peak; use: "memray" or "tracemalloc" (unset: as `cpu`).

    Raises:
      GateFailed: the command ended before its profile was written.
      KeyboardInterrupt: an interrupt ended it before its profile was written.
    """
    tool = use or ("memray" if importlib.util.find_spec("memray") else "tracemalloc")
    with tempfile.TemporaryDirectory(prefix="jaxbench-profile-") as folder:
        output = Path(folder, "allocations")
        if tool != "memray":
            found, code, interrupted = _inside("memory", words, output, 1)
            return Profile(tool, _stacks(found), code, 1, found["peak"], interrupted)
        tracer = [sys.executable, "-m", "memray", "run", "--quiet", "--force", "--output", str(output)]
        code, interrupted = run([*tracer, *words], env=environment(words))
        _check_kept(output, code, interrupted)
        return Profile(tool, *_memray(output, code, interrupted))


def run(
    words: Sequence[str], *, command_of: Callable[[int], Iterable[int]] | None = None, grace_s: float = GRACE_S,
    **options: Any,
) -> tuple[int, bool]:  # fmt: skip
    """Run a process to its end; return its exit code, and whether an interrupt ended it.

    The process has its own session, so Ctrl-C reaches only the caller, which then sends SIGINT to one process after
    another until the started one has ended. So a profiler survives to write what it saw. What remains after that, or at
    a second interrupt, is killed. A closed terminal (SIGHUP) interrupts too.

    Args:
      command_of: the started process's id -> ids of the processes that must end before it.
      grace_s: seconds to wait after each SIGINT.
      options: options of subprocess.Popen.
    """
    with _hangups_interrupt():
        started = subprocess.Popen(words, start_new_session=True, **options)
        try:
            return started.wait(), False
        except KeyboardInterrupt:
            try:
                for pid in [*(command_of(started.pid) if command_of else ()), started.pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGINT)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        return started.wait(grace_s), True
            finally:
                process.end(started, grace_s=process.END_S)
            return started.returncode, True


@contextlib.contextmanager
def _hangups_interrupt() -> Iterator[None]:
    """Handle SIGHUP like SIGINT in the block, unless its default was changed (nohup)."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _check_kept(output: Path, code: int, interrupted: bool) -> None:
    if output.exists():
        return
    if interrupted:
        raise KeyboardInterrupt(f"exit code {code} before a profile was kept")
    raise cli.GateFailed(f"the command ended with exit code {code} before its profile was kept")


def by_line(stacks: Stacks) -> list[Line]:
    """Sum stacks by line and return the lines by their own weight, the heaviest first."""
    own: collections.Counter[Frame] = collections.Counter()
    total: collections.Counter[Frame] = collections.Counter()
    for stack, weight in stacks:
        if stack:
            own[stack[-1]] += weight
        for frame in set(stack):
            total[frame] += weight
    whole = sum(weight for _, weight in stacks) or 1.0
    lines = [
        Line(f"{_shown(file)}:{line}", function, own[frame] / whole, total[frame] / whole, own[frame])
        for frame in total
        for function, file, line in [frame]
    ]
    return sorted(lines, key=lambda each: (-each.own, -each.total))


def folded(text: str) -> Iterable[tuple[tuple[Frame, ...], float]]:
    """Parse stacks of py-spy's raw format: frames between semicolons, the outermost first, then the sample count."""
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [FOLDED.match(frame) for frame in stack.split(";")]
        yield tuple((each["function"], each["file"], int(each["line"] or 0)) for each in frames if each), float(count)


def py_spy() -> str | None:
    """Path of py-spy, next to this interpreter or in PATH; None if there is none."""
    own = Path(sys.executable).with_name("py-spy")
    return str(own) if own.is_file() else shutil.which("py-spy")


def picture(lines: Sequence[Line], *, top: int, unit: str, scale: float) -> Any:
    """Return the first `top` lines as a table for the terminal; weights are shown times `scale`, in `unit`."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for column in (unit, "own", "total"):
        table.add_column(column, justify="right")
    table.add_column("line", overflow="fold")
    table.add_column("function", overflow="fold")
    for line in lines[:top]:
        table.add_row(
            f"{line.own_weight * scale:.3g}", f"{100 * line.own:.1f} %", f"{100 * line.total:.1f} %",
            escape(line.place), escape(line.function),
        )  # fmt: skip
    return table


def _py_spy(words: Sequence[str], folder: Path, rate: int) -> Profile:
    """Profile a command that py-spy starts; the command writes to this process's output, py-spy to a log file."""
    output, code, log = folder / "stacks", folder / "exit_code", folder / "said"
    tracer = [
        str(py_spy()), "record", "--format=raw", "--full-filenames", f"--rate={rate}", "--output", str(output), "--",
    ]  # fmt: skip
    streams = [os.dup(number) for number in (1, 2)]
    try:
        with open(log, "wb") as file:
            child = [sys.executable, "-m", CHILD, "exit", str(code), ",".join(map(str, streams))]
            own, interrupted = run(
                [*tracer, *child, *words], env=environment(words), command_of=_children, stdout=file, stderr=file,
                pass_fds=streams,
            )  # fmt: skip
    finally:
        for stream in streams:
            os.close(stream)
    said = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    exit_code = int(code.read_text(encoding="utf-8")) if code.exists() else None
    if not output.exists():
        if interrupted:
            raise KeyboardInterrupt(f"exit code {own} before a profile was kept")
        if exit_code == cli.EXIT_PIPE:  # it ended before py-spy had found it
            raise BrokenPipeError(f"exit code {exit_code} before a profile was kept")
        raise ValueError(f"py-spy wrote no samples: {' '.join(said)[-300:] or own}")
    if late := [line for line in said if "behind in sampling" in line]:
        print(f"py-spy: {late[-1].removeprefix('py-spy> ')}", file=sys.stderr)
    stacks = _own(list(folded(output.read_text(encoding="utf-8"))))
    return Profile("py-spy", stacks, exit_code, 1 / rate, None, interrupted)


def _children(pid: int) -> list[int]:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return [each.pid for each in psutil.Process(pid).children()]
    return []


def _inside(mode: str, words: Sequence[str], output: Path, rate: int) -> tuple[dict[str, Any], int, bool]:
    """Run a command in child.py; return what child.py wrote, the exit code, and whether it was interrupted."""
    tracer = [sys.executable, "-m", CHILD, mode, str(output), str(rate)]
    code, interrupted = run([*tracer, *words], env=environment(words))
    _check_kept(output, code, interrupted)
    return json.loads(output.read_text(encoding="utf-8")), code, interrupted


def _stacks(found: dict[str, Any]) -> Stacks:
    return [(tuple(map(tuple, stack)), weight) for stack, weight in found["stacks"]]


def _own(stacks: Stacks) -> Stacks:
    """Return the command's own stacks, without the outer frames of child.py; child.py's own stacks are dropped."""
    found = []
    for stack, weight in stacks:
        if stack and stack[0][1].endswith(STARTERS):
            stack = tuple(itertools.dropwhile(lambda frame: frame[:2] != ("_run", CHILD_FILE), stack))
            stack = tuple(itertools.dropwhile(lambda frame: frame[1].endswith(STARTERS), stack))
        if stack:
            found.append((stack, weight))
    return found


def _memray(output: Path, code: int, interrupted: bool) -> tuple[Stacks, int, float, int, bool]:
    """Return the fields of a profile except its tool."""
    from memray import FileReader

    with FileReader(str(output)) as reader:
        records = reader.get_high_watermark_allocation_records(merge_threads=True)
        stacks = [(tuple(tuple(frame) for frame in reversed(each.stack_trace())), each.size) for each in records]
        return stacks, code, 1, reader.metadata.peak_memory, interrupted


def flag_value(words: Sequence[str], flag: str) -> str | None:
    """Return the value of a flag on a command line, or None."""
    for place, word in enumerate(words):
        name, has_value, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name == flag:
            return value if has_value else next(iter(words[place + 1 :]), None)
    return None


def _shown(file: str) -> str:
    """Return a path as shown to the reader: relative to the project, or to site-packages."""
    path = Path(file)
    if "site-packages" in path.parts:
        return "/".join(path.parts[path.parts.index("site-packages") + 1 :])
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else file
