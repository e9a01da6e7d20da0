"""A process that profiles one script from inside: `python -m jaxbench.profiling.child MODE OUTPUT RATE SCRIPT ...`.

MODE is `cpu` (a thread that reads every thread's stack RATE times a second, waiting ones too) or `memory` (tracemalloc:
the lines that had allocated what was there when it was most). Written as JSON: stacks, the outermost frame first, with
weights, samples or bytes. It stands in for py-spy and memray where they are not installed (S file).
"""

from __future__ import annotations

import collections
import contextlib
import json
import runpy
import sys
import threading
import time
import traceback
import tracemalloc
from pathlib import Path
from typing import Any

HIGHER = 1.5  # a snapshot is taken when this many times the last one's bytes are allocated
LOOK_S = 0.05


class Stacks:
    """Samples of all threads' stacks, RATE a second."""

    def __init__(self, rate: int):
        self.interval_s, self.found = 1 / rate, collections.Counter()

    def look(self) -> None:
        """Take one sample."""
        own = threading.get_ident()
        for thread, frame in sys._current_frames().items():
            if thread != own:
                stack = traceback.extract_stack(frame)
                self.found[tuple((each.name, each.filename, each.lineno or 0) for each in stack)] += 1

    def end(self) -> None:
        """Do nothing more: every sample counts."""


class Allocations:
    """Lines that had allocated what was there when it was most."""

    def __init__(self):
        self.interval_s, self.found, self._most = LOOK_S, collections.Counter(), 0
        self._next_s = 0.0
        tracemalloc.start()  # a frame a trace: what snapshots keep is traced memory itself, and has to stay small

    def look(self) -> None:
        """Take a snapshot where clearly more is allocated than at the last one; a tenth of the time at most."""
        if time.monotonic() >= self._next_s and tracemalloc.get_traced_memory()[0] > HIGHER * self._most + 2**20:
            started = time.monotonic()
            self._take()
            self._next_s = time.monotonic() + 10 * (time.monotonic() - started)

    def end(self) -> None:
        """Take a last snapshot, which is kept where it is the largest."""
        self._take()
        tracemalloc.stop()

    def _take(self) -> None:
        statistics = tracemalloc.take_snapshot().statistics("lineno")
        total = sum(each.size for each in statistics)
        if total > self._most:
            self._most, self.found = total, collections.Counter()
            for each in statistics:
                self.found[(("", each.traceback[0].filename, each.traceback[0].lineno),)] += each.size


def main(mode: str, output: str, rate: int, words: list[str]) -> None:
    """Run a script (or `-m MODULE`) under a profile and write it; the script's exit code is this process's."""
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
        names = _run(words)  # held, so that what the script keeps to its end is in the last snapshot
    finally:
        seconds = time.monotonic() - started
        ended.set()
        thread.join()
        profile.end()
        names.clear()
        stacks = [[list(stack), weight] for stack, weight in profile.found.items()]
        Path(output).write_text(json.dumps({"seconds": seconds, "stacks": stacks}), encoding="utf-8")


def _run(words: list[str]) -> dict[str, Any]:
    """Names of the script when it has ended."""
    if words[0] == "-m":
        sys.argv = words[1:]
        return runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    sys.argv = list(words)
    sys.path[0] = str(Path(words[0]).resolve().parent)
    return runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
