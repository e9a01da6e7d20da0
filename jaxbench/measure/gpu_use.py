"""What the machine's NVIDIA GPUs are doing now, by nvidia-smi, which comes with the driver (S file).

Figures are of whole GPUs: of every process on them, and of GPUs that this process does not see.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

TOOL = "nvidia-smi"
FIELDS = ("index", "utilization.gpu", "memory.used", "memory.total", "power.draw")
TIMEOUT_S = 20.0  # without persistence mode the tool starts the driver at each call, seconds a GPU


class GpuUse(NamedTuple):
    """One GPU; None: the driver does not tell it of this GPU."""

    index: int
    busy_percent: float | None  # share of the last sampling period (1/6 to 1 s) in which a kernel ran
    used_bytes: int | None
    total_bytes: int | None
    watts: float | None


def readings() -> list[GpuUse]:
    """Return the GPUs; empty if there is no such tool, or it fails."""
    if shutil.which(TOOL) is None:
        return []
    command = [TOOL, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [] if done.returncode else parse(done.stdout)


def parse(text: str) -> list[GpuUse]:
    """Read the tool's lines of FIELDS (MiB, W); lines that are none, such as messages of the driver, are left out."""
    found = []
    for line in text.splitlines():
        values = [_number(value) for value in line.split(",")]
        if len(values) != len(FIELDS) or values[0] is None:
            continue
        index, busy, used, total, watts = values
        used_bytes, total_bytes = (None if each is None else int(each * 2**20) for each in (used, total))
        found.append(GpuUse(int(index), busy, used_bytes, total_bytes, watts))
    return found


def sentence(gpus: Sequence[GpuUse]) -> str:
    """Format GPUs as part of a line, the sums of several; empty if there are none.

    A figure that one of several GPUs does not tell is left out.
    """
    if not gpus:
        return ""
    parts = ["GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"]
    busy, used, total, watts = ([gpu[i] for gpu in gpus] for i in range(1, len(FIELDS)))
    if None not in busy:
        span = f" ({min(busy):.0f} to {max(busy):.0f})" if len(gpus) > 1 else ""
        parts.append(f"{sum(busy) / len(busy):.0f} % busy{span}")
    if None not in used:
        of = "" if None in total else f" of {sum(total) / 2**30:.1f}"
        parts.append(f"{sum(used) / 2**30:.1f}{of} GiB")
    if None not in watts:
        parts.append(f"{sum(watts):.0f} W")
    return " ".join(parts)


def _number(text: str) -> float | None:
    """Read a figure; "[N/A]", "[Not Supported]" and other words are None."""
    try:
        return float(text)
    except ValueError:
        return None
