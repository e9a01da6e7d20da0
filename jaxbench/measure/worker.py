"""A generic worker process: the loop that answers requests, clocks and memory readings (S file).

Started by process.py with its environment already set (malloc, platform, compile cache). The answers go to a private
copy of stdout; file descriptor 1 is redirected to stderr first, so that no library can break the protocol.

Standard library only: peers' workers run it in environments where jaxbench's dependencies are not installed.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


def serve(make: Callable[[str, int], Any]) -> None:
    """Answer requests until stdin closes.

    Args:
      make: (name, number of threads) from argv -> the session. Its public methods are the operations: they take a
        request's fields and return plain JSON.
    """
    name, threads = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    limit_cores(threads)
    session = make(name, threads)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = answer_to(session, request.pop("operation"), request)
        except Exception as error:  # noqa: BLE001 - the boundary of the process: every failure becomes an answer
            traceback.print_exc()
            message = " ".join(str(error).split()) or "no message"
            answer = {"error": f"{type(error).__name__}: {message[:300]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def answer_to(session: Any, operation: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run one operation of a session.

    Raises:
      ValueError: the session has no such operation.
    """
    known = [name for name, value in vars(type(session)).items() if callable(value) and not name.startswith("_")]
    if operation not in known:
        raise ValueError(f"worker: unknown operation {operation!r}, wanted one of {', '.join(known)}")
    return getattr(session, operation)(**request)


def timed(call: Callable[[], Any], repeats: int, *, warmup: int = 1) -> dict[str, list[float]]:
    """Return the wall and CPU seconds of every call, after `warmup` calls that are not counted."""
    for _ in range(warmup):
        call()
    wall, cpu = [], []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    return {"seconds": wall, "cpu_seconds": cpu}


def peaks(call: Callable[[], Any]) -> dict[str, int]:
    """Return the highest resident set of this process after a first call, and during a second one, in bytes.

    The first holds what came before too: imports, loading, compiling. Where the system cannot reset the peak, both are.
    """
    call()
    highest = peak_bytes()
    release_memory()
    reset_peak()
    call()
    return {"peak_bytes": max(highest, peak_bytes()), "steady_bytes": peak_bytes()}


def limit_cores(threads: int) -> None:
    """Bind this process to its first `threads` cores, so that XLA and PyTorch size their thread pools alike."""
    if not hasattr(os, "sched_getaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if threads < len(cores):
        os.sched_setaffinity(0, cores[:threads])


def resident_bytes() -> int:
    """Resident set size of this process."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Highest resident set size since `reset_peak` (since the start where the system cannot reset it)."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Reset the peak to the current resident set (Linux; elsewhere the peak stays that of the whole process)."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass  # peak_bytes then also covers earlier stages: an upper bound


def release_memory() -> None:
    """Return freed memory to the system (the malloc settings would keep it), so that stages do not add up."""
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
