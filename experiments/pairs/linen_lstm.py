"""The LSTM cell of flax.linen and of torch.nn; given by hand: PyTorch has two biases where Flax has their sum.

Command: jaxbench pair experiments/pairs/linen_lstm.py
Expected: 5 seconds, the same function; the eight kernels are matched as parts of PyTorch's two tensors.
"""

import numpy as np
import torch
from flax import linen

import jaxbench

GATES = "ifgo"


class Cell(torch.nn.Module):
    """torch.nn.LSTMCell with its state as two arguments."""

    def __init__(self):
        super().__init__()
        self.cell = torch.nn.LSTMCell(8, 6)

    def forward(self, x, h, c):
        """Return the new (h, c)."""
        return self.cell(x, (h, c))


def bias(gate: int):
    """Return a function of PyTorch's tensors that gives the bias of one gate."""
    return lambda tensors: (tensors["cell.bias_ih"] + tensors["cell.bias_hh"])[6 * gate : 6 * gate + 6]


def pair() -> jaxbench.Pair:
    """Pair both cells on a batch of three."""
    random = np.random.default_rng(0)
    inputs = tuple(random.standard_normal((3, size)) for size in (8, 6, 6))
    names = {f"h{gate}.bias": bias(i) for i, gate in enumerate(GATES)}
    return jaxbench.Pair(
        linen.OptimizedLSTMCell(6), Cell(), inputs, names,
        jax_inputs=lambda x, h, c: ((c, h), x),
        jax_outputs=lambda result: (result[0][1], result[0][0]),
    )  # fmt: skip
