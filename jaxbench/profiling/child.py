"""A process that runs one script under a profiler: `python -m jaxbench.profiling.child MODE OUTPUT VALUE SCRIPT ...`.

MODE is `cpu` (a thread reads every thread's stack, waiting ones too, at most VALUE times a second) or `memory`
(tracemalloc: allocations by line at their peak). Both write JSON: stacks, the outermost frame first, with weights in
samples or bytes. They replace py-spy and memray where these are not installed. With MODE `exit`, py-spy samples the
script, and only its exit code is written, which py-spy does not report. VALUE then names the descriptors of its
standard output and error, which keeps py-spy's own messages out of them (S file).
"""

from __future__ import annotations

import collections
import json
import os
import runpy
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from types import FrameType
from typing import Any

HIGHER = 1.02  # a snapshot is taken when allocated bytes exceed this many times the largest one's, plus MORE
MORE = 2**20
DOUBLED = 2.0  # used instead of HIGHER during the pause after a snapshot: growth by so much is rare
PAUSE = 10  # length of the pause, in durations of the snapshot: snapshots then cost at most an eleventh of the time
LOOK_S = 0.05
EXIT_INTERRUPT, EXIT_PIPE = 130, 141  # a shell's exit codes for SIGINT and SIGPIPE


class Stacks:
    """Samples of all threads' stacks, `rate` a second if the machine keeps up."""

    def __init__(self, rate: int):
        self.interval_s, self.found, self.looks = 1 / rate, collections.Counter(), 0

    def look(self) -> None:
        """Take one sample."""
        own = threading.get_ident()
        self.looks += 1
        for thread, frame in sys._current_frames().items():
            if thread != own:
                self.found[_stack(frame)] += 1

    def end(self) -> dict[str, Any]:
        """Return the number of looks: a sample's weight is the total time over this number, not 1 / rate."""
        return {"looks": self.looks}


class Allocations:
    """Allocated bytes by line, when they were most."""

    def __init__(self):
        self.interval_s, self.found, self._most = LOOK_S, collections.Counter(), 0
        self._next_s = 0.0
        tracemalloc.start()  # one frame per trace: snapshots are traced memory themselves and must stay small

    def look(self) -> None:
        """Take a snapshot if more is allocated than at the largest one; during a pause, only if it is twice as much."""
        higher = HIGHER if time.monotonic() >= self._next_s else DOUBLED
        if tracemalloc.get_traced_memory()[0] > higher * self._most + MORE:
            started = time.monotonic()
            self._take()
            self._next_s = time.monotonic() + PAUSE * (time.monotonic() - started)

    def end(self) -> dict[str, Any]:
        """Take a last snapshot, kept if it is the largest; return the true peak, which snapshots may have missed."""
        peak = tracemalloc.get_traced_memory()[1]
        self._take()
        tracemalloc.stop()
        return {"peak": peak}

    def _take(self) -> None:
        statistics = tracemalloc.take_snapshot().statistics("lineno")
        total = sum(each.size for each in statistics)
        if total > self._most:
            self._most, self.found = total, collections.Counter()
            for each in statistics:
                self.found[(("", each.traceback[0].filename, each.traceback[0].lineno),)] += each.size


def main(mode: str, output: str, rate: int, words: list[str]) -> None:
    """Run a script (or `-m MODULE`) under a profiler and write the profile; this process exits as the script does."""
    ended = threading.Event()
    profile = Stacks(rate) if mode == "cpu" else Allocations()

    def sample() -> None:
        while not ended.wait(profile.interval_s):
            profile.look()

    thread = threading.Thread(target=sample, daemon=True)
    started = time.monotonic()
    thread.start()
    names: dict[str, Any] = {}
    try:
        names = _run(words)  # kept alive, so that what the script holds at its end is in the last snapshot
        _join_threads()
    except SystemExit:
        _join_threads()
        raise
    finally:
        seconds = time.monotonic() - started
        ended.set()
        thread.join()
        about = profile.end()
        names.clear()
        stacks = [[list(stack), weight] for stack, weight in profile.found.items()]
        Path(output).write_text(json.dumps(about | {"seconds": seconds, "stacks": stacks}), encoding="utf-8")


def _join_threads() -> None:
    """Wait for the script's threads, as Python itself does before it ends."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def hand_on(output: str, streams: str, words: list[str]) -> None:
    """Run a script with these output streams and write its exit code as a shell would give it."""
    for number, stream in enumerate(streams.split(","), 1):
        os.dup2(int(stream), number)
    code = 1
    try:
        _run(words)
        code = 0
    except SystemExit as ended:
        code = ended.code & 255 if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    except (KeyboardInterrupt, BrokenPipeError) as error:
        code = EXIT_INTERRUPT if isinstance(error, KeyboardInterrupt) else EXIT_PIPE
        raise
    finally:
        Path(output).write_text(str(code), encoding="utf-8")


def _stack(frame: FrameType | None) -> tuple[tuple[str, str, int], ...]:
    """Return a thread's frames, without reading source text, so that a sample is short."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno or 0))
        frame = frame.f_back
    return tuple(reversed(found))


def _run(words: list[str]) -> dict[str, Any]:
    """Run a script or module to its end and return its global names."""
    if words[0] == "-m":
        sys.argv = words[1:]
        return runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    sys.argv = list(words)
    sys.path[0] = str(Path(words[0]).resolve().parent)
    return runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    try:
        if sys.argv[1] == "exit":
            hand_on(sys.argv[2], sys.argv[3], sys.argv[4:])
        else:
            main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    except BrokenPipeError:  # the reader of the command's output closed it: no traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(EXIT_PIPE) from None
