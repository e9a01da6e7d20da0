"""A worker of the comparison: one process that holds one arm for one launch.

Started as `python -m jaxbench.bench.worker ARM THREADS`; the protocol is that of measure/worker.py.
"""

from __future__ import annotations

import gc
import time

from jaxbench.bench.arms import arm_table
from jaxbench.measure import worker


class Session:
    """One arm, and its memory level after imports. Workloads arrive as the fields of a records.Workload."""

    def __init__(self, arm_name: str, threads: int):
        self.arm_name, self.threads = arm_name, threads
        self.arm = None
        self.level_bytes = 0

    def start(self, *, device: str, checkpoint: str, programs: str = "", file: str = "") -> dict:
        """Import everything the arm needs, then take the resident set as the baseline of its memory figures."""
        from jaxbench.measure import environment

        start = time.perf_counter()
        places = {"checkpoint": checkpoint, "programs": programs, "file": file}
        self.arm = arm_table.create(self.arm_name, device=device, threads=self.threads, **places)
        reason = self.arm.start()
        seconds = time.perf_counter() - start
        self.level_bytes = worker.resident_bytes()
        used = {name: version for name, version in environment.versions().items() if name in self.arm.packages}
        return {"seconds": seconds, "level_bytes": self.level_bytes, "skip": reason, "versions": used}

    def load(self, *, dtype: str, num_layers: int | None = None, train: dict | None = None) -> dict:
        """Load the weights, with an optimiser if `train`, after resetting the memory peaks of earlier operations."""
        _release()
        worker.reset_peak()
        self.arm.reset_device_memory()
        start = time.perf_counter()
        self.arm.load(dtype, num_layers=num_layers, train=train)
        return {"seconds": time.perf_counter() - start} if self.arm.holds_model else {}

    def prepare(self, *, workload: dict) -> dict:
        """Compile what a workload needs, then return the compiler's freed memory to the system, for every arm."""
        facts = self.arm.prepare(_workload(workload))
        worker.release_memory()
        return facts

    def warm(self, *, workload: dict, inputs: list) -> dict:
        """Run a workload's programs once."""
        return self.arm.warm(_workload(workload), inputs)

    def measure(self, *, workload: dict, inputs: list) -> dict:
        """Run a workload once, timed."""
        return self.arm.measure(_workload(workload), inputs)

    def token_seconds(self, *, workload: dict, inputs: list) -> dict:
        """Run a decode workload once, one token at a time."""
        return {"seconds": self.arm.token_seconds(_workload(workload), inputs)}

    def logits(self, *, tokens: list) -> dict:
        """Next-token logits [V] after these tokens."""
        return {"logits": [float(value) for value in self.arm.logits(tokens)]}

    def memory(self) -> dict:
        """Peak memory in bytes, counted from before the weights were loaded; empty if other processes hold them."""
        if not self.arm.holds_model:
            return {}
        answer = {"peak_memory_bytes": max(worker.peak_bytes() - self.level_bytes, 0)}
        device = self.arm.device_memory()
        return answer | ({} if device is None else {"device_peak_bytes": device})

    def unload(self) -> dict:
        """Drop weights and programs."""
        self.arm.unload()
        _release()
        return {"resident_bytes": worker.resident_bytes()}

    def read(self, *, size: int, repeats: int) -> dict:
        """Seconds of summing an array of `size` bytes."""
        return {"seconds": self.arm.read_seconds(size, repeats)}

    def gemm(self, *, shape: list[int], dtype: str, repeats: int) -> dict:
        """Seconds of one matrix product (M, K) x (K, N)."""
        return {"seconds": self.arm.gemm_seconds(tuple(shape), dtype, repeats)}

    def profile(self, *, workload: dict, inputs: list, folder: str) -> dict:
        """Trace one run of a workload."""
        return {"path": self.arm.profile(_workload(workload), inputs, folder)}


def _release() -> None:
    gc.collect()
    worker.release_memory()


def _workload(fields: dict):
    from jaxbench.measure.records import Workload  # here, so that pydantic counts among the arm's imports

    return Workload(**fields)


if __name__ == "__main__":
    worker.serve(Session)
