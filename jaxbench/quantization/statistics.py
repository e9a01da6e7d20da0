"""Statistics of a matrix's inputs that calibration keeps, for GPTQ, AWQ, SmoothQuant and static scales (S file).

They are sums over tokens, so that batches can be added and nothing grows with their number.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

# Bins of |x| from 2^-24 on, eight per octave, smaller values in the first: a percentile is known within 9 %.
LOWEST, PER_OCTAVE, BINS = -24, 8, 384
LARGEST = {"int": 127, "e4m3": 448}  # code of an input, by type
# Matrices of a block, by the one whose inputs they share.
SOURCES = {
    "attention.q_proj": "attention.q_proj",
    "attention.k_proj": "attention.q_proj",
    "attention.v_proj": "attention.q_proj",
    "attention.o_proj": "attention.o_proj",
    "mlp.gate_proj": "mlp.up_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}


class InputStatistics(NamedTuple):
    """Statistics of a matrix's inputs x [tokens, I]."""

    count: int  # tokens
    second_moment: Float[np.ndarray, "I I"]  # sum of x x^T, float32
    absolute: Float[np.ndarray, " I"]  # sum of |x|
    largest: Float[np.ndarray, " I"]  # max of |x|
    histogram: Int[np.ndarray, " bins"]  # of |x|, all inputs together

    def __add__(self, other: InputStatistics) -> InputStatistics:  # type: ignore[override]  # a sum, not a longer tuple
        """The statistics of both sets of tokens."""
        largest = np.maximum(self.largest, other.largest)
        sums = (getattr(self, name) + getattr(other, name) for name in ("count", "second_moment", "absolute"))
        counts = self.histogram.astype(np.int64) + other.histogram  # 32 bits overflow after 2e9 inputs in one bin
        return InputStatistics(*sums, largest, counts)


def edges() -> Float[np.ndarray, " bins"]:
    """Upper end of each bin."""
    return 2.0 ** (LOWEST + (np.arange(BINS) + 1) / PER_OCTAVE)


def static_range(
    statistics: InputStatistics, rule: str, *, type: Literal["int", "e4m3"] = "int", percentile: float = 0.9999
) -> float:
    """Return the |x| that maps to the largest code of a static activation scale.

    Args:
      rule: minmax, percentile, or mse (the least squared error, from the histogram).
      type: of the codes, as grids.Grid has it: how far apart they are decides that error.

    Raises:
      ValueError: no tokens, or an unknown rule.
    """
    largest = float(statistics.largest.max())
    if not statistics.count or not np.isfinite(largest):
        raise ValueError(f"calibration: {statistics.count} tokens with inputs up to {largest} give no activation scale")
    if rule == "minmax" or largest == 0:
        return largest
    upper, counts = np.minimum(edges(), largest), statistics.histogram
    if rule == "percentile":
        return float(upper[np.searchsorted(np.cumsum(counts), percentile * counts.sum())])
    if rule != "mse":
        raise ValueError(f"calibration: rule={rule!r} is not one of minmax, percentile, mse")
    middle = upper * 2 ** (-0.5 / PER_OCTAVE)
    candidates = np.unique(upper[counts > 0])
    errors = []
    for limit in candidates:
        step = limit / LARGEST[type]
        if type == "e4m3":  # eight codes per octave; below 2^-6 as far apart as in its octave
            step = step * 2.0 ** (np.maximum(np.floor(np.log2(middle / step)), -6) - 3)
        inside = np.where(middle < step / 2, middle**2, step**2 / 12)  # values that round to 0 are lost entirely
        errors.append((counts * np.where(middle > limit, (middle - limit) ** 2, inside)).sum())
    return float(candidates[int(np.argmin(errors))])
