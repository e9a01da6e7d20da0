"""A worker process: reads responses twice in one way, the second time on the clock, and says what that took (S file).

Started as `python -m jaxbench.hallucination.study.reader_worker NAME THREADS`; the protocol is measure/worker.py's.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from typing import Any

from jaxbench.hallucination import extract
from jaxbench.hallucination.group import Group, read_group
from jaxbench.hallucination.reader_settings import ReaderSettings
from jaxbench.measure import worker


class Session:
    """One way of reading, in a process of its own."""

    def __init__(self, name: str, threads: int):
        self.name, self.threads = name, threads

    def read(
        self, *, settings: dict[str, Any], groups: Sequence[Sequence[Any]], model_sha256: str, folder: str
    ) -> dict:
        """What reading groups takes, once all programs are compiled; features that are not in the folder are kept.

        Seconds are of this process on all its threads (cpu), or of a clock (wall); peaks are of the resident set.
        """
        made = ReaderSettings(**settings)
        store = extract.Store(folder, made, model_sha256)
        work = [
            Group(context, question, tuple(responses), tuple(keys)) for context, question, responses, keys in groups
        ]
        started = time.process_time()
        loaded = extract.load_reader(made, package="jaxbench")
        found: dict[str, Any] = {"load_cpu_s": time.process_time() - started, "load_peak_bytes": worker.peak_bytes()}
        for group in work:
            for key, features in read_group(group, *loaded, made):
                if not store.has(key):
                    store.write(key, features)
        gc.collect()
        worker.release_memory()
        worker.reset_peak()
        found["held_bytes"] = worker.resident_bytes()
        tokens, wall, started = 0, time.perf_counter(), time.process_time()
        for group in work:
            tokens += sum(len(features["loss"]) for _, features in read_group(group, *loaded, made))
        found |= {"cpu_s": time.process_time() - started, "wall_s": time.perf_counter() - wall}
        found |= {"responses": sum(len(group.responses) for group in work), "tokens": tokens}
        found |= {"peak_bytes": worker.peak_bytes(), "weight_bytes": loaded[0].weight_bytes}
        return found | {"load_average": os.getloadavg()[0]}


if __name__ == "__main__":
    worker.serve(Session)
