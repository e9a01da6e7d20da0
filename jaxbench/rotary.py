"""Rotary frequencies in numpy float64, equal for every backend (S file)."""

from __future__ import annotations

import math

import numpy as np

from jaxbench.config import RotaryScaling


def frequencies(head_dim: int, theta: float, scaling: RotaryScaling | None) -> tuple[float, ...]:
    """Rotary angular frequencies, head_dim / 2 of them, in radians per token.

    Sources: Su et al. 2021, arXiv:2104.09864, section 3.2.2; linear scaling, Chen et al. 2023, arXiv:2306.15595;
    llama3 scaling, the rope code of Meta's Llama 3.1 release (wavelengths between the two limits are interpolated);
    yarn, Peng et al. 2023, arXiv:2309.00071, section 3.2, its ramp over pairs of a head as in its reference code.
    """
    base = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return tuple(base.tolist())
    if scaling.kind == "linear":
        return tuple((base / scaling.factor).tolist())
    if scaling.kind == "yarn":
        kept_share = _yarn_kept_share(head_dim, theta, scaling)
        return tuple((kept_share * base + (1.0 - kept_share) * base / scaling.factor).tolist())
    wavelength = 2.0 * math.pi / base
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = np.clip((scaling.original_max_seq_len / wavelength - low) / (high - low), 0.0, 1.0)
    return tuple((kept_share * base + (1.0 - kept_share) * base / scaling.factor).tolist())


def _yarn_kept_share(head_dim: int, theta: float, scaling: RotaryScaling) -> np.ndarray:
    """Unscaled share of each frequency: 1 for pairs of many turns in the trained context, 0 for those of few."""

    def pair_of(turns: float) -> float:
        return head_dim * math.log(scaling.original_max_seq_len / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # as the reference code does if the two limits coincide
    return 1.0 - np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
