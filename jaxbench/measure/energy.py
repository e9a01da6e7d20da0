"""Energy counters of the machine: processor packages (RAPL) and NVIDIA GPUs (S file).

Counters belong to the whole machine, so that a difference is one workload's energy only while nothing else runs. Where
there is no counter, or it may not be read, there is no figure: never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

RAPL = Path("/sys/class/powercap")  # Linux; its counters are root's alone on many systems
PLATFORM = "psys"  # Intel's name of the counter of processor, memory and board together


class Reading(NamedTuple):
    """One counter."""

    joules: float
    wraps_at: float  # joules at which it begins again at 0


def readings(rapl: Path = RAPL) -> dict[str, Reading]:
    """Every counter that can be read, by name; parts of a package (cores, memory controller) are in their package's.

    The whole platform's counter (psys), which some machines have, holds the packages and is left out; so is that of
    memory modules (dram), which some packages show among their parts though it is not in theirs.
    """
    found = {}
    for folder in sorted(rapl.glob("intel-rapl:*")):  # AMD's processors have this name too
        if folder.name.count(":") > 1:
            continue
        try:
            used, limit = (int((folder / name).read_text()) for name in ("energy_uj", "max_energy_range_uj"))
        except (OSError, ValueError):
            continue
        if _name(folder) == PLATFORM:
            continue
        found[folder.name] = Reading(used / 1e6, limit / 1e6)
    return found | _gpus()


def _name(folder: Path) -> str:
    """What the kernel calls a counter: package-0, psys; empty where it does not say."""
    try:
        return (folder / "name").read_text().strip()
    except OSError:
        return ""


def spent(before: Mapping[str, Reading], after: Mapping[str, Reading]) -> float | None:
    """Joules between two readings, over the counters that both have; None without any."""
    differences = [
        (after[name].joules - start.joules) % start.wraps_at for name, start in before.items() if name in after
    ]
    return sum(differences) if differences else None


def _gpus() -> dict[str, Reading]:
    """Energy of NVIDIA GPUs since their driver was loaded (Volta and newer)."""
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except Exception:  # noqa: BLE001 - no package, no driver or no GPU: there is no counter
        return {}
    found = {}
    for index in range(count):
        try:
            millijoules = pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(index))
        except pynvml.NVMLError:
            continue
        found[f"gpu:{index}"] = Reading(millijoules / 1e3, 2**64 / 1e3)
    return found
