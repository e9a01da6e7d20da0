"""Where a command's Python spends time and memory, by line (S file).

Time: py-spy where it is installed (threads that run), else a sampling thread inside the command (waiting threads count
too). Memory: memray where it is installed (every allocation, also of native code), else tracemalloc (of Python and
numpy alone, neither XLA's nor PyTorch's). Either way stacks with weights, samples or bytes, of which the table by line
is made. A line's own weight is that of stacks that end there, its total that of stacks that pass through it.
"""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench import process_environment

ROOT = Path(__file__).resolve().parents[2]
FOLDED = re.compile(r"^(?P<function>.*) \((?P<file>.*?)(?::(?P<line>\d+))?\)$")
Frame = tuple[str, str, int]  # function, file, line
Stacks = list[tuple[tuple[Frame, ...], float]]  # the outermost frame first


class Profile(NamedTuple):
    """Stacks of one command."""

    tool: str
    stacks: Stacks
    exit_code: int


class Line(NamedTuple):
    """A line of code."""

    place: str  # file:line
    function: str
    own: float  # share of all weight
    total: float
    own_weight: float


def words_of(command: str, *, flag: str = "--command") -> list[str]:
    """Words of a command: a Python script or `-m MODULE`, then its arguments.

    Raises:
      ValueError: it is none, or its script is not there.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"{flag}={command!a} cannot be split into words ({error})") from error
    words = words[1:] if words and re.fullmatch(r"(.*/)?python[\d.]*", words[0]) else words
    if words[:1] == ["-m"]:
        if len(words) < 2 or not re.fullmatch(r"\w+(\.\w+)*", words[1]):
            raise ValueError(f"{flag}={command!a}: -m wants the name of a module")
        return words
    if not words or not words[0].endswith(".py"):
        raise ValueError(f"{flag}={command!a} is no Python script; wanted experiments/NAME.py or -m MODULE, then flags")
    if not Path(words[0]).is_file():
        raise ValueError(f"{flag}={command!a}: {words[0]} is no file")
    return words


def environment(words: Sequence[str]) -> dict[str, str]:
    """Variables under which a command does not start itself anew, which a profiler would lose."""
    device, library = (
        flag_value(words, "device") or "cpu",
        "PyTorch" if flag_value(words, "backend") == "torch" else "XLA",
    )
    device = device if device in process_environment.PLATFORMS else "cpu"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return os.environ | process_environment.environment(device, library=library) | {"PYTHONPATH": path}


def cpu(words: Sequence[str], *, rate: int, use: str | None = None) -> Profile:
    """Run a command and sample its stacks; use: "py-spy" or "thread" (unset: the first that is there)."""
    tool = use or ("py-spy" if py_spy() else "thread")
    with tempfile.TemporaryDirectory(prefix="jaxbench-profile-") as folder:
        output = Path(folder, "stacks")
        if tool != "py-spy":
            return _inside("cpu", words, output, rate, tool)
        tracer = [
            str(py_spy()), "record", "--format=raw", "--full-filenames", f"--rate={rate}", "--output", str(output),
        ]  # fmt: skip
        done = subprocess.run(
            [*tracer, "--", sys.executable, *words], env=environment(words), stderr=subprocess.PIPE, text=True
        )
        said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("py-spy>")]
        if not output.exists():
            raise ValueError(f"py-spy wrote no samples: {' '.join(said)[-300:] or done.returncode}")
        print("\n".join(said), file=sys.stderr)
        return Profile(tool, list(folded(output.read_text(encoding="utf-8"))), done.returncode)


def memory(words: Sequence[str], *, use: str | None = None) -> Profile:
    """Run a command and see what was allocated when it was most; use: "memray" or "tracemalloc" (unset: as `cpu`)."""
    tool = use or ("memray" if importlib.util.find_spec("memray") else "tracemalloc")
    with tempfile.TemporaryDirectory(prefix="jaxbench-profile-") as folder:
        output = Path(folder, "allocations")
        if tool != "memray":
            return _inside("memory", words, output, 1, tool)
        tracer = [sys.executable, "-m", "memray", "run", "--quiet", "--force", "--output", str(output)]
        done = subprocess.run([*tracer, *words], env=environment(words))
        return Profile(tool, _memray(output), done.returncode)


def by_line(stacks: Stacks) -> list[Line]:
    """Lines by their own weight, the heaviest first."""
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
    """Stacks of py-spy's raw format: frames between semicolons, the outermost first, then the samples."""
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [FOLDED.match(frame) for frame in stack.split(";")]
        yield tuple((each["function"], each["file"], int(each["line"] or 0)) for each in frames if each), float(count)


def py_spy() -> str | None:
    """Path of py-spy, beside this interpreter or in PATH."""
    own = Path(sys.executable).with_name("py-spy")
    return str(own) if own.is_file() else shutil.which("py-spy")


def picture(lines: Sequence[Line], *, top: int, unit: str, scale: float) -> Any:
    """The first `top` lines for a terminal; weights are shown times `scale`, in `unit`."""
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


def _inside(mode: str, words: Sequence[str], output: Path, rate: int, tool: str) -> Profile:
    tracer = [sys.executable, "-m", "jaxbench.profiling.child", mode, str(output), str(rate)]
    done = subprocess.run([*tracer, *words], env=environment(words))
    if not output.exists():
        raise ValueError(f"{words[0]}: the process ended with exit code {done.returncode} before its profile was kept")
    found = json.loads(output.read_text(encoding="utf-8"))["stacks"]
    return Profile(tool, [(tuple(map(tuple, stack)), weight) for stack, weight in found], done.returncode)


def _memray(output: Path) -> Stacks:
    from memray import FileReader

    with FileReader(str(output)) as reader:
        records = reader.get_high_watermark_allocation_records(merge_threads=True)
        return [(tuple(tuple(frame) for frame in reversed(each.stack_trace())), each.size) for each in records]


def flag_value(words: Sequence[str], flag: str) -> str | None:
    """What a command line gives a flag."""
    for place, word in enumerate(words):
        name, has_value, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name == flag:
            return value if has_value else next(iter(words[place + 1 :]), None)
    return None


def _shown(file: str) -> str:
    """A path as the reader knows it: below the project, or below site-packages."""
    path = Path(file)
    if "site-packages" in path.parts:
        return "/".join(path.parts[path.parts.index("site-packages") + 1 :])
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else file
