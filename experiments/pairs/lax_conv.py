"""jax.lax.conv_general_dilated and torch.nn.Conv2d, whose outputs people found slightly different (jax issue 11790).

Command: python -m jaxbench pair experiments/pairs/lax_conv.py
Expected: 5 seconds, the same function: 1e-15 in float64. In float32 the outputs do differ in their last bits, and JAX's
are no farther from the float64 result than PyTorch's own error allows.
"""

import numpy as np
import torch
from jax import lax

import jaxbench


def convolve(params, x):
    """Convolve images [N C H W] by a kernel (out, in, height, width), without padding, as in the issue."""
    out = lax.conv_general_dilated(x, params["weight"], window_strides=(1, 1), padding="VALID")
    return out + params["bias"][None, :, None, None]


def pair() -> jaxbench.Pair:
    """Pair the issue's convolution in both, on a smaller image [1 3 64 64]."""
    x = np.random.default_rng(0).random((1, 3, 64, 64))
    params = {"weight": np.zeros((3, 3, 3, 3)), "bias": np.zeros(3)}
    return jaxbench.Pair((convolve, params), torch.nn.Conv2d(3, 3, kernel_size=3), x)
