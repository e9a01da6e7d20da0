"""Rotary frequencies in numpy float64, equal for every backend (S file)."""

from __future__ import annotations

import math

import numpy as np

from jaxbench.config import RotaryScaling


def frequencies(head_dim: int, theta: float, scaling: RotaryScaling | None) -> tuple[float, ...]:
    """Rotary angular frequencies, head_dim / 2 of them, in radians per token.

    Sources: Su et al. 2021, arXiv:2104.09864, section 3.2.2; linear scaling, Chen et al. 2023, arXiv:2306.15595;
    llama3 scaling, the rope code of Meta's Llama 3.1 release (wavelengths between the two limits are interpolated).
    """
    base = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return tuple(base.tolist())
    if scaling.kind == "linear":
        return tuple((base / scaling.factor).tolist())
    wavelength = 2.0 * math.pi / base
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = np.clip((scaling.original_max_seq_len / wavelength - low) / (high - low), 0.0, 1.0)
    return tuple((kept_share * base + (1.0 - kept_share) * base / scaling.factor).tolist())
