"""flax.linen.Dense and torch.nn.Linear of the sizes that people found apart by 1e-3 (flax issues 963 and 3128).

Command: python -m jaxbench pair experiments/pairs/linen_dense.py
Expected: 5 seconds, the same function: 1e-15 in float64, and in float32 both err alike. What was seen on accelerators
is the default precision of float32 products there (TF32, bfloat16), which both sides pin to the highest here.
"""

import numpy as np
import torch
from flax import linen

import jaxbench


def pair() -> jaxbench.Pair:
    """Both layers on one batch [2 768]."""
    x = np.random.default_rng(0).standard_normal((2, 768))
    return jaxbench.Pair(linen.Dense(512), torch.nn.Linear(768, 512), x)
