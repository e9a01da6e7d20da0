"""Multi-head attention of flax.nnx and of torch.nn; nothing is given by hand.

Command: jaxbench pair experiments/pairs/nnx_attention.py
Expected: 10 seconds, exit code 1: jax.nn.dot_product_attention, which Flax calls, computes the softmax in float32 for
any input type, so in float64 the two agree only to 1e-8; the cause is named as a cast to float32. With widen=True they
are the same function, 4e-16.
"""

import numpy as np
import torch
from flax import nnx

import jaxbench


def pair() -> jaxbench.Pair:
    """Pair both layers on query, key and value [2 5 24]."""
    layer = nnx.MultiHeadAttention(num_heads=3, in_features=24, decode=False, rngs=nnx.Rngs(0))
    twin = torch.nn.MultiheadAttention(24, 3, batch_first=True)
    random = np.random.default_rng(0)
    inputs = tuple(random.standard_normal((2, 5, 24)) for _ in range(3))
    return jaxbench.Pair(layer, twin, inputs, torch_outputs=lambda result: result[0])
