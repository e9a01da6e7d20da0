"""What this machine does now: processor, memory, devices, power, and which runs are at work (S file)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil

from jaxbench import store
from jaxbench.measure import energy, environment
from jaxbench.measure.records import now_utc
from jaxbench.regress import pairs

FRESH_S = 120.0  # a run whose file changed since is at work
MAIN = ("experiments/", "case_worker.py", "jaxbench")  # in a process' command: one of ours


class Sampler:
    """Samples one after another; rates are between two of them."""

    def __init__(self, runs: Path):
        """Args: runs: folder of the runs at work."""
        self._runs, self._host, self._cores = runs, environment.fingerprint(), environment.usable_cores()
        self._before, self._at, self._times = energy.readings(), time.monotonic(), psutil.cpu_times()

    def sample(self) -> dict[str, Any]:
        """The machine since the last sample; JSON. Power is None where no counter can be read."""
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
    """Share of the processor's time between two counts of psutil.cpu_times that was not idle, 0 to 100."""
    total = sum(after) - sum(before)
    idle = sum(getattr(after, name, 0.0) - getattr(before, name, 0.0) for name in ("idle", "iowait"))
    # The sums round, and Linux lets iowait fall: what is idle may seem more than all, or less than nothing.
    return min(max(100 * (1 - idle / total), 0.0), 100.0) if total > 0 else 0.0


def own_bytes() -> int:
    """Resident memory of jaxbench's processes."""
    total = 0
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if len(command) > 1 and any(each in word for word in command[1:3] for each in MAIN):
                total += process.memory_info().rss
        except psutil.Error:
            continue  # it ended meanwhile, or is another user's
    return total


def devices() -> list[dict[str, Any]]:
    """NVIDIA GPUs: utilisation and memory in use; none where there is no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            {
                "name": f"GPU {index}", "utilisation_percent": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).used,
            }
            for index, handle in enumerate(handles)
        ]  # fmt: skip
    except Exception:  # noqa: BLE001 - no package, no driver or no GPU: there are none
        return []


def at_work(runs: Path) -> list[str]:
    """A line for each run whose file is still written: its last row."""
    found = []
    for path in sorted(runs.glob(f"*/{pairs.SAMPLES}")):
        try:
            if time.time() - path.stat().st_mtime > FRESH_S:
                continue
            last = json.loads(store.rows(path)[-1])
            found.append(f"{path.parent.name}: launch {last['launch']}, {last['series']} of {last['side']}")
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            continue  # it is only just begun, or no run's
    return found
