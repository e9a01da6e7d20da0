"""Published rates of TPU chips, and the topologies that a program can be compiled for without a TPU (S file).

Rates are peak rates per chip. Sources, read in November 2026: the "key specifications" tables of the Cloud TPU
documentation (docs.cloud.google.com/tpu/docs/<page>). Where a page was revised, its latest value is used.
`ici_bytes_per_s` is what one chip can send over all its links at once: half of the published bidirectional figure.
"""

from __future__ import annotations

import difflib
import math
import re
from typing import NamedTuple


class Chip(NamedTuple):
    """Peak rates of one TPU chip."""

    name: str
    flops_per_s: float  # bfloat16 FLOP/s
    hbm_bytes_per_s: float
    hbm_bytes: int  # capacity
    ici_bytes_per_s: float  # sent by one chip over all links
    num_dims: int  # dims of a topology name: 2 for v5e and v6e, 3 for the others
    source: str
    options: dict[str, str] = {}  # compiler options that make one device of one chip


GIB = 2**30
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "v4", 275e12, 1200e9, 32 * GIB, 300e9, 3,
            "docs.cloud.google.com/tpu/docs/v4; ICI 6 links x 50 GB/s: Jouppi et al. 2023, arXiv:2304.01433, table 4",
            {"chip_config_name": "megacore"},
        ),
        Chip("v5e", 197e12, 819e9, 16 * GIB, 200e9, 2, "docs.cloud.google.com/tpu/docs/v5e"),
        Chip("v5p", 459e12, 2765e9, 95 * GIB, 600e9, 3, "docs.cloud.google.com/tpu/docs/v5p"),
        Chip("v6e", 918e12, 1638e9, 32 * GIB, 400e9, 2, "docs.cloud.google.com/tpu/docs/v6e"),
    )
}  # fmt: skip
# Slices that Cloud TPU offers of up to 256 chips (same pages); any of these can be compiled for.
FLAT_SLICES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBE_SLICES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")
TOPOLOGIES = tuple(
    f"{chip.name}:{shape}" for chip in CHIPS.values() for shape in (FLAT_SLICES if chip.num_dims == 2 else CUBE_SLICES)
)


def least_seconds(chip: Chip, *, flops: float, traffic: float, sent: float) -> tuple[dict[str, float], str]:
    """Return the least seconds of compute, memory and interconnect, each alone at its peak rate, and the bottleneck.

    Args:
      flops: FLOPs of one chip.
      traffic: bytes moved to and from its memory.
      sent: bytes that it sends to other chips.
    """
    times = {
        "compute_s": flops / chip.flops_per_s,
        "memory_s": traffic / chip.hbm_bytes_per_s,
        "interconnect_s": sent / chip.ici_bytes_per_s,
    }
    return times, max(times, key=times.get).removesuffix("_s")


class Topology(NamedTuple):
    """A named slice: its chip and shape."""

    name: str  # for example v5e:2x2
    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        """Number of chips of the slice."""
        return math.prod(self.shape)


def parse_topology(name: str) -> Topology:
    """Return the slice of this name.

    Raises:
      ValueError: the name is not in TOPOLOGIES; the message gives the nearest name and all of them.
    """
    if name not in TOPOLOGIES:
        near = difflib.get_close_matches(str(name).lower(), TOPOLOGIES, n=1, cutoff=0.5)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"tpu: unknown topology {name!r}{hint} (known: {', '.join(TOPOLOGIES)})")
    generation, shape = name.split(":")
    return Topology(name, CHIPS[generation], tuple(int(size) for size in re.findall(r"\d+", shape)))
