"""Monitor a running command: processor, memory, threads, GPUs, rates of the rows it writes, stragglers (S file).

Rates come from the JSON-lines files that the command writes: new lines per second, and numbers of the last line whose
names mark them as rates (`tokens_per_s`). A straggler is a worker process that computes while the others wait for it.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench.measure import gpu_use

INTERVAL_S = 5.0
BUSY, IDLE = 0.5, 0.25  # cores: above BUSY, a process computes; below IDLE, it waits
SHOWN_RATES = 3
TAIL_BYTES = 2**16


class Look(NamedTuple):
    """A process and its descendants, over one interval."""

    seconds: float  # since the first look
    cores: dict[int, float]  # process -> cores that it kept busy
    resident_bytes: int  # of all processes
    threads: int
    rows_per_s: dict[str, float]  # file -> lines per second
    rates: dict[str, float]  # from the last lines
    stragglers: list[int]
    gpus: list[gpu_use.GpuUse]  # of the machine


class Watched:
    """A process that is monitored at intervals.

    Args:
      pid: the process.
      rows: .jsonl files, or folders of them, in addition to those that the process has open. Lines of a file that is
        first seen open count only from then on: what an earlier run wrote into it is not part of the rate.

    Raises:
      ValueError: there is no such process, or it may not be read.
    """

    def __init__(self, pid: int, rows: Sequence[str] = ()):
        import psutil

        self._psutil, self.rows = psutil, [Path(row) for row in rows]
        try:
            self.process = psutil.Process(pid)
            self._known = {pid: _cpu_seconds(self.process)}
            for each in self.process.children(recursive=True):  # else the first look counts all their earlier work
                with contextlib.suppress(psutil.Error):
                    self._known[each.pid] = _cpu_seconds(each)
        except (psutil.Error, OSError) as error:
            raise ValueError(f"--pid={pid}: no process of this number can be read ({error})") from error
        self._started = self._last = time.monotonic()
        self._has_gpus = bool(gpu_use.readings())  # where there are none, each look would ask in vain
        self._ends = {file: _size(file) for file in self._files()}  # bytes whose lines do not count again

    def look(self) -> Look | None:
        """Return what happened since the last look; None once the process has ended."""
        now, psutil = time.monotonic(), self._psutil
        passed = max(now - self._last, 1e-6)
        try:
            if self.process.status() == psutil.STATUS_ZOMBIE:
                return None
            family = [self.process, *self.process.children(recursive=True)]
        except psutil.Error:
            return None
        spent, cores, resident, threads = {}, {}, 0, 0
        for each in family:
            with contextlib.suppress(psutil.Error):  # a process that ended meanwhile
                spent[each.pid] = _cpu_seconds(each)
                cores[each.pid] = self._share(each, spent[each.pid], passed)
                resident, threads = resident + each.memory_info().rss, threads + each.num_threads()
        workers = {pid: share for pid, share in cores.items() if pid != self.process.pid and pid in self._known}
        rows_per_s, rates = self._rates(passed)
        self._known, self._last = spent, now
        gpus = gpu_use.readings() if self._has_gpus else []
        return Look(now - self._started, cores, resident, threads, rows_per_s, rates, stragglers(workers), gpus)

    def _share(self, process: Any, seconds: float, passed: float) -> float:
        """Return the cores that a process kept busy since the last look, or its start if new; seconds: its CPU time."""
        if process.pid in self._known:
            return max(seconds - self._known[process.pid], 0.0) / passed  # below 0: a new process reuses the id
        return seconds / max(passed, time.time() - process.create_time())

    def _files(self) -> list[Path]:
        found = self._named()
        with contextlib.suppress(self._psutil.Error, OSError):
            found |= {Path(each.path).absolute() for each in self.process.open_files()}
        return sorted(file for file in found if file.suffix == ".jsonl" and file.is_file())

    def _named(self) -> set[Path]:
        found = [file for row in self.rows for file in (row.glob("*.jsonl") if row.is_dir() else [row])]
        return {file.absolute() for file in found}

    def _rates(self, passed: float) -> tuple[dict[str, float], dict[str, float]]:
        rows, rates = {}, {}
        files, named = self._files(), self._named()
        for file, label in zip(files, labels(files), strict=True):
            before = self._ends.get(file, 0 if file in named else _size(file))
            new, self._ends[file] = _new_lines(file, before)
            rows[label] = new / passed
            if new:
                rates |= rates_of(_last_line(file))
        return rows, rates


def stragglers(cores: Mapping[int, float]) -> list[int]:
    """Return the workers that compute while the median of the others waits; none among fewer than three workers."""
    if len(cores) < 3:
        return []
    found = []
    for pid, share in cores.items():
        others = statistics.median(value for other, value in cores.items() if other != pid)
        if share > BUSY and others < IDLE:
            found.append(pid)
    return sorted(found)


def labels(files: Sequence[Path]) -> list[str]:
    """Return names of files: with their folder if two share a name, whole paths if that is not enough."""
    short, long = ([name(file) for file in files] for name in (lambda f: f.name, lambda f: f"{f.parent.name}/{f.name}"))
    return [
        one if short.count(one) == 1 else two if long.count(two) == 1 else str(file)
        for one, two, file in zip(short, long, files, strict=True)
    ]


def rates_of(line: str) -> dict[str, float]:
    """Return the numbers of a JSON line whose names end in _per_s, and its step."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(row, dict):
        return {}
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if name == "step" or name.endswith("_per_s")}


def sentence(look: Look) -> str:
    """Format a look as one line."""
    parts = [f"{look.seconds:.0f} s", f"{sum(look.cores.values()):.2f} cores", f"{look.resident_bytes / 2**20:.0f} MiB",
             f"{look.threads} threads"]  # fmt: skip
    if len(look.cores) > 1:
        parts.append(f"{len(look.cores)} processes")
    if gpus := gpu_use.sentence(look.gpus):
        parts.append(gpus)
    parts += [f"{name} {rate:.3g} rows/s" for name, rate in list(look.rows_per_s.items())[:SHOWN_RATES]]
    parts += [f"{name} {value:.4g}" for name, value in list(look.rates.items())[:SHOWN_RATES]]
    if look.stragglers:
        parts.append(f"others wait for {', '.join(map(str, look.stragglers))}")
    return "monitor: " + ", ".join(parts)


@contextlib.contextmanager
def running(rows: Sequence[str], *, interval_s: float = INTERVAL_S, say: Callable[[str], None] | None = None,
            ) -> Iterator[None]:  # fmt: skip
    """Print every `interval_s` seconds what this process does, while the block runs."""
    import os

    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    ended, watched = threading.Event(), Watched(os.getpid(), rows)

    def tell() -> None:
        while not ended.wait(interval_s):
            if (look := watched.look()) is not None:
                say(sentence(look))

    thread = threading.Thread(target=tell, name="jaxbench-monitor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _cpu_seconds(process: Any) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _size(file: Path) -> int:
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return 0


def _new_lines(file: Path, start: int) -> tuple[int, int]:
    """Count the line ends from a byte on; return them and the file's end. A file that has become shorter has none.

    What was there before is not read again: files may be of gigabytes.
    """
    count, end = 0, _size(file)
    if end > start:
        with contextlib.suppress(OSError), open(file, "rb") as opened:
            opened.seek(start)
            for block in iter(lambda: opened.read(2**20), b""):
                count += block.count(b"\n")
            end = opened.tell()
    return count, end


def _last_line(file: Path) -> str:
    """Return the last complete line of a file, "" if it has none: what follows is still being written."""
    with contextlib.suppress(OSError), open(file, "rb") as opened:
        opened.seek(max(file.stat().st_size - TAIL_BYTES, 0))
        *_, last, _ = [b"", b"", *opened.read().split(b"\n")]  # not splitlines: a text may hold U+2028
        return last.decode(errors="replace")
    return ""
