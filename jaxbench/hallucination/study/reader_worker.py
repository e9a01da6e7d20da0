"""A worker process that reads responses twice with one reader, and reports the cost of the second time (S file).

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
    """One reader in its own process."""

    def __init__(self, name: str, threads: int):
        self.name, self.threads = name, threads

    def read(
        self, *, settings: dict[str, Any], groups: Sequence[Sequence[Any]], model_sha256: str, folder: str
    ) -> dict:
        """Measure the cost of reading groups once all programs are compiled; write features missing from the folder.

        Seconds are the process's CPU time on all threads (cpu) or wall-clock time (wall); peaks: of the resident set.
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
        found |= {"peak_bytes": worker.peak_bytes(), "weight_bytes": loaded.feature_reader.weight_bytes}
        return found | {"load_average": os.getloadavg()[0]}


if __name__ == "__main__":
    worker.serve(Session)
