"""Rotary cosine and sine of every position as tables, the same bits for every backend (S file)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from jaxbench import rotary
from jaxbench.config import TransformerConfig


def tables(config: TransformerConfig) -> tuple[Float[np.ndarray, "S h"] | None, Float[np.ndarray, "S h"] | None]:
    """Cosine and sine of each position side by side, in float32 from float64: for global layers, and for layers with
    separate angles.
    """
    plain = local = None
    if config.position == "rotary":
        plain = _table(config, rotary.frequencies(config.head_dim, config.rope_theta, config.rope_scaling))
    if config.local_rope_theta is not None:
        local = _table(config, rotary.frequencies(config.head_dim, config.local_rope_theta, None))
    return plain, local


def _table(config: TransformerConfig, frequencies: tuple[float, ...]) -> Float[np.ndarray, "S h"]:
    angles = np.arange(config.max_seq_len)[:, None] * np.asarray(frequencies)[None]
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
