"""The GRU cell of Equinox and of torch.nn; given by hand: how PyTorch's two biases map to Equinox's.

Command: jaxbench pair experiments/pairs/equinox_gru.py
Expected: 5 seconds, the same function.
"""

import equinox as eqx
import jax
import numpy as np
import torch

import jaxbench


def gate_bias(tensors):
    """Return Equinox's bias [3 H]: PyTorch's two added for reset and update gate, the input's for the candidate."""
    both = tensors["bias_ih"] + tensors["bias_hh"]
    return both.at[12:].set(tensors["bias_ih"][12:]) if hasattr(both, "at") else _numpy_bias(both, tensors)


def _numpy_bias(both, tensors):
    both[12:] = tensors["bias_ih"][12:]
    return both


def pair() -> jaxbench.Pair:
    """Pair both cells on a batch of three; Equinox's takes one example."""
    random = np.random.default_rng(0)
    inputs = (random.standard_normal((3, 8)), random.standard_normal((3, 6)))
    names = {"bias": gate_bias, "bias_n": lambda tensors: tensors["bias_hh"][12:]}
    cell = eqx.nn.GRUCell(8, 6, key=jax.random.key(0))
    return jaxbench.Pair(cell, torch.nn.GRUCell(8, 6), inputs, names, per_example=True)
