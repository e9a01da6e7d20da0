"""The transposed convolution of flax.linen and of torch.nn (as in jax issue 11252).

Command: python -m jaxbench pair experiments/pairs/linen_conv_transpose.py
Expected: 10 seconds, exit code 1: Flax convolves with the kernel where PyTorch correlates, and "flipped" is named.
With names={"kernel": lambda tensors: tensors["weight"].transpose((2, 3, 0, 1))[::-1, ::-1]} they are the same function.
"""

import numpy as np
import torch
from flax import linen

import jaxbench


def pair() -> jaxbench.Pair:
    """Pair both layers on one batch of images [2 4 5 5]."""
    layer = linen.ConvTranspose(3, (4, 4), strides=(2, 2), padding="VALID")
    twin = torch.nn.ConvTranspose2d(4, 3, 4, stride=2)
    image = np.random.default_rng(0).standard_normal((2, 4, 5, 5))
    return jaxbench.Pair(layer, twin, image, jax_inputs=lambda x: (x.transpose(0, 2, 3, 1),))
