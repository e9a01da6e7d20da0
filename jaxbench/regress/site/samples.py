"""Sample this machine's current state: processor, memory, devices, power, and active runs (S file)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil

from jaxbench import store
from jaxbench.measure import energy, environment, gpu_use
from jaxbench.measure.records import now_utc
from jaxbench.regress import pairs

FRESH_S = 120.0  # a run whose file changed within this time is active
MAIN = ("experiments/", "case_worker.py", "jaxbench")  # in a process's command line: one of ours


class Sampler:
    """Takes samples one after another; rates are computed between two of them."""

    def __init__(self, runs: Path):
        """Args: runs: folder of the active runs."""
        self._runs, self._host, self._cores = runs, environment.fingerprint(), environment.usable_cores()
        self._before, self._at, self._times = energy.readings(), time.monotonic(), psutil.cpu_times()

    def sample(self) -> dict[str, Any]:
        """Sample the machine since the last sample, as JSON values. Power is None if no counter can be read."""
        memory, now = psutil.virtual_memory(), time.monotonic()
        readings = energy.readings()
        joules = energy.spent(self._before, readings) if self._before else None
        watts = None if joules is None or now <= self._at else joules / (now - self._at)
        times = psutil.cpu_times()
        busy = busy_percent(self._times, times)
        self._before, self._at, self._times = readings, now, times
        return {
            "time_utc": now_utc(), "host": self._host,
            "cores": self._cores, "cpu_percent": busy, "load": os.getloadavg()[0],
            "memory_bytes": memory.total - memory.available, "memory_total_bytes": memory.total,
            "own_bytes": own_bytes(), "devices": devices(), "watts": watts, "work": at_work(self._runs),
        }  # fmt: skip


def busy_percent(before: Any, after: Any) -> float:
    """Return the percentage of CPU time that was not idle between two values of psutil.cpu_times, 0 to 100."""
    total = sum(after) - sum(before)
    idle = sum(getattr(after, name, 0.0) - getattr(before, name, 0.0) for name in ("idle", "iowait"))
    # Sums are rounded and iowait may decrease on Linux: idle time may appear above the total or below zero.
    return min(max(100 * (1 - idle / total), 0.0), 100.0) if total > 0 else 0.0


def own_bytes() -> int:
    """Return the resident memory of jaxbench's processes in bytes."""
    total = 0
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if len(command) > 1 and any(each in word for word in command[1:3] for each in MAIN):
                total += process.memory_info().rss
        except psutil.Error:
            continue  # it has ended, or belongs to another user
    return total


def devices() -> list[dict[str, Any]]:
    """Return NVIDIA GPUs with utilisation, memory in use and power; empty if there is no driver.

    A GPU whose utilisation or memory the driver does not tell is left out.
    """
    return [
        {
            "name": f"GPU {gpu.index}", "utilisation_percent": gpu.busy_percent, "memory_bytes": gpu.used_bytes,
            "watts": gpu.watts,
        }
        for gpu in gpu_use.readings() if None not in (gpu.busy_percent, gpu.used_bytes)
    ]  # fmt: skip


def at_work(runs: Path) -> list[str]:
    """Return a line, from its last row, for each run whose file is still being written."""
    found = []
    for path in sorted(runs.glob(f"*/{pairs.SAMPLES}")):
        try:
            if time.time() - path.stat().st_mtime > FRESH_S:
                continue
            last = json.loads(store.rows(path)[-1])
            found.append(f"{path.parent.name}: launch {last['launch']}, {last['series']} of {last['side']}")
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            continue  # just started, or not a run's file
    return found
