"""flax.linen.Dense and torch.nn.Linear at the sizes where users saw differences of 1e-3 (flax issues 963, 3128).

Command: python -m jaxbench pair experiments/pairs/linen_dense.py
Expected: 5 seconds, the same function: 1e-15 in float64, and in float32 both have similar errors. The differences on
accelerators come from their default precision of float32 products (TF32, bfloat16); here both sides use the highest.
"""

import numpy as np
import torch
from flax import linen

import jaxbench


def pair() -> jaxbench.Pair:
    """Pair both layers on one batch [2 768]."""
    x = np.random.default_rng(0).standard_normal((2, 768))
    return jaxbench.Pair(linen.Dense(512), torch.nn.Linear(768, 512), x)
