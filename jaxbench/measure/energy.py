"""Energy counters of the machine: processor packages (RAPL) and NVIDIA GPUs (S file).

Counters cover the whole machine, so a difference is one workload's energy only while nothing else runs. A counter that
is missing or unreadable yields no figure, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

RAPL = Path("/sys/class/powercap")  # Linux; on many systems only root may read its counters
PLATFORM = "psys"  # Intel's name for the counter of processor, memory and board together


class Reading(NamedTuple):
    """One counter."""

    joules: float
    wraps_at: float  # joules at which it wraps around to 0


def readings(rapl: Path = RAPL) -> dict[str, Reading]:
    """Return every readable counter by name; a package's counter includes its parts (cores, memory controller).

    The platform counter (psys), which some machines have, includes the packages and is left out. So is the counter of
    the memory modules (dram): some packages list it among their parts, but their own counter does not include it.
    """
    found = {}
    for folder in sorted(rapl.glob("intel-rapl:*")):  # AMD processors use this name too
        if folder.name.count(":") > 1:
            continue
        try:
            used, limit = (int((folder / name).read_text()) for name in ("energy_uj", "max_energy_range_uj"))
        except (OSError, ValueError):
            continue
        if _name(folder) == PLATFORM or limit <= 0:  # without a range, it cannot be told where it begins anew
            continue
        found[folder.name] = Reading(used / 1e6, limit / 1e6)
    return found | _gpus()


def _name(folder: Path) -> str:
    """Return the kernel's name of a counter, such as package-0 or psys; empty if it has none."""
    try:
        return (folder / "name").read_text().strip()
    except OSError:
        return ""


def spent(before: Mapping[str, Reading], after: Mapping[str, Reading]) -> float | None:
    """Return the joules between two readings, summed over the counters in both; None if they share none."""
    differences = [
        (after[name].joules - start.joules) % start.wraps_at for name, start in before.items() if name in after
    ]
    return sum(differences) if differences else None


def _gpus() -> dict[str, Reading]:
    """Return the energy of NVIDIA GPUs since their driver was loaded (Volta and newer)."""
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
