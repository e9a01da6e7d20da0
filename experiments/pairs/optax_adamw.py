"""AdamW of optax and of PyTorch, both with their defaults, on one linear layer.

Command: jaxbench pair experiments/pairs/optax_adamw.py
Expected: 5 seconds, exit code 1: outputs and gradients are equal, the parameters after five steps are not, because the
default decay is 1e-4 in optax and 1e-2 in PyTorch. With weight_decay=1e-2 in both they are.
"""

import numpy as np
import optax
import torch
from flax import nnx

import jaxbench


def pair() -> jaxbench.Pair:
    """Pair both optimisers on one batch [4 8]."""
    optimizers = (optax.adamw(1e-2), lambda params: torch.optim.AdamW(params, 1e-2))
    x = np.random.default_rng(0).standard_normal((4, 8))
    return jaxbench.Pair(nnx.Linear(8, 3, rngs=nnx.Rngs(0)), torch.nn.Linear(8, 3), x, optimizers=optimizers)
