"""An encoder layer of dm-haiku's modules and torch.nn.TransformerEncoderLayer; nothing is given by hand.

Command: jaxbench pair experiments/pairs/haiku_encoder.py     (needs dm-haiku)
Expected: 15 seconds, the same function; query, key and value are parts of PyTorch's fused tensor.
"""

import haiku as hk
import jax
import numpy as np
import torch

import jaxbench


def layer(x):
    """Return hidden states [B T 16] after attention and an MLP, both pre-norm."""
    norm = lambda: hk.LayerNorm(-1, create_scale=True, create_offset=True)
    h = norm()(x)
    x = x + hk.MultiHeadAttention(4, 4, model_size=16, w_init=hk.initializers.VarianceScaling())(h, h, h)
    return x + hk.Linear(16)(jax.nn.relu(hk.Linear(32)(norm()(x))))


def pair() -> jaxbench.Pair:
    """Pair both layers on one batch [2 5 16]."""
    twin = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
    return jaxbench.Pair(hk.transform(layer), twin, np.random.default_rng(0).standard_normal((2, 5, 16)))
