"""A worker: one process that holds one arm for one launch and answers requests (`python -m jaxbench.bench.worker`).

Started by measure/process.py with its environment already set (malloc, platform, compile cache). The answers go to a
private copy of stdout; file descriptor 1 is pointed at stderr first, so that no library can break the protocol.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Answer requests until stdin closes: argv is the arm and the number of threads."""
    serve(lambda arm_name, threads: Session(arm_name, threads).answer)


def serve(make: Callable[[str, int], Callable[[str, dict], dict]]) -> None:
    """Answer requests until stdin closes; argv is a name and the number of threads, make returns what answers."""
    name, threads = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    limit_cores(threads)
    answer_to = make(name, threads)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = answer_to(request.pop("operation"), request)
        except Exception as error:  # noqa: BLE001 - the boundary of the process: every failure becomes an answer
            traceback.print_exc()
            message = " ".join(str(error).split()) or "no message"
            answer = {"error": f"{type(error).__name__}: {message[:300]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def timed(call: Callable[[], Any], repeats: int) -> dict:
    """Return wall and CPU seconds of every call, after one that is not counted."""
    call()
    wall, cpu = [], []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    return {"seconds": wall, "cpu_seconds": cpu}


class Session:
    """The state of one worker: its arm and the memory level after imports."""

    def __init__(self, arm_name: str, threads: int):
        self.arm_name, self.threads = arm_name, threads
        self.arm = None
        self.level_bytes = 0

    def answer(self, operation: str, request: dict) -> dict:
        """Run one request; the answer is plain JSON."""
        if operation not in _OPERATIONS:
            raise ValueError(f"worker: unknown operation {operation!r}, wanted one of {', '.join(_OPERATIONS)}")
        return getattr(self, f"_{operation}")(**request)

    def _start(self, *, device: str, checkpoint: str) -> dict:
        """Import everything the arm needs, then take the resident set as the level that memory counts from."""
        from jaxbench.bench.arms import contract
        from jaxbench.measure import environment

        start = time.perf_counter()
        self.arm = contract.create(self.arm_name, device=device, threads=self.threads, checkpoint=checkpoint)
        reason = self.arm.start()
        seconds = time.perf_counter() - start
        self.level_bytes = resident_bytes()
        used = {name: version for name, version in environment.versions().items() if name in self.arm.packages}
        return {"seconds": seconds, "level_bytes": self.level_bytes, "skip": reason, "versions": used}

    def _load(self, *, dtype: str, num_layers: int | None = None, train: dict | None = None) -> dict:
        reset_peak()
        start = time.perf_counter()
        self.arm.load(dtype, num_layers=num_layers, train=train)
        return {"seconds": time.perf_counter() - start}

    def _prepare(self, *, workload: dict) -> dict:
        from jaxbench.measure.records import Workload

        return self.arm.prepare(Workload(**workload))

    def _measure(self, *, workload: dict, inputs: list) -> dict:
        from jaxbench.measure.records import Workload

        return self.arm.measure(Workload(**workload), inputs)

    def _warm(self, *, workload: dict, inputs: list) -> dict:
        from jaxbench.measure.records import Workload

        return self.arm.warm(Workload(**workload), inputs)

    def _logits(self, *, tokens: list) -> dict:
        return {"logits": [float(value) for value in self.arm.logits(tokens)]}

    def _memory(self) -> dict:
        answer = {"peak_bytes": max(peak_bytes() - self.level_bytes, 0)}
        device = self.arm.device_memory()
        return answer | ({} if device is None else {"device_peak_bytes": device})

    def _unload(self) -> dict:
        import gc

        self.arm.unload()
        gc.collect()
        release_memory()
        return {"resident_bytes": resident_bytes()}

    def _read(self, *, size: int, repeats: int) -> dict:
        return {"seconds": self.arm.read_seconds(size, repeats)}

    def _gemm(self, *, shape: list[int], dtype: str, repeats: int) -> dict:
        return {"seconds": self.arm.gemm_seconds(tuple(shape), dtype, repeats)}

    def _profile(self, *, workload: dict, inputs: list, folder: str) -> dict:
        from jaxbench.measure.records import Workload

        return {"path": self.arm.profile(Workload(**workload), inputs, folder)}


_OPERATIONS = ("start", "load", "prepare", "warm", "measure", "logits", "memory", "unload", "read", "gemm", "profile")


def limit_cores(threads: int) -> None:
    """Bind this process to its first `threads` cores, so that XLA and PyTorch size their pools alike."""
    if not hasattr(os, "sched_getaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if threads < len(cores):
        os.sched_setaffinity(0, cores[:threads])


def resident_bytes() -> int:
    """Return the resident set of this process."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Return the highest resident set since `reset_peak` (since the start where the system cannot reset it)."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Set the peak back to the present resident set (Linux; elsewhere the peak stays that of the whole process)."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass  # peak_bytes then also covers earlier stages: an upper bound


def release_memory() -> None:
    """Hand freed memory back to the system (the malloc settings keep it otherwise), so that stages do not add up."""
    import ctypes

    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass  # not glibc


def _status_bytes(field: str) -> int:
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the portable peak below
    import resource

    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


if __name__ == "__main__":
    main()
