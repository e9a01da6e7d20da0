"""Outputs that agree while the hidden states do not (as in transformers issue 15754): a norm hides a forgotten scale.

Command: python -m jaxbench pair experiments/pairs/inner_states.py
Expected: 5 seconds, exit code 1: the outputs agree to 1e-16, `embed` is blamed, and its output is 0.25 times PyTorch's.
"""

import numpy as np
import torch
from flax import nnx

import jaxbench


class Embed(torch.nn.Module):
    """Embedding times the square root of its width."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(11, 16)

    def forward(self, tokens):
        """Hidden states [B T D]."""
        return 4.0 * self.table(tokens)


class Twin(torch.nn.Module):
    """Embedding, norm without eps, readout."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = Embed(), torch.nn.LayerNorm(16, eps=0.0), torch.nn.Linear(16, 5)

    def forward(self, tokens):
        """Logits [B T V]."""
        return self.head(self.norm(self.embed(tokens)))


class Port(nnx.Module):
    """The same model, but its embedding omits the factor."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.norm = nnx.Embed(11, 16, rngs=rngs), nnx.LayerNorm(16, epsilon=0.0, rngs=rngs)
        self.head = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def pair() -> jaxbench.Pair:
    """Pair both models on token ids [2 6]."""
    return jaxbench.Pair(Port(nnx.Rngs(0)), Twin(), np.random.default_rng(0).integers(0, 11, (2, 6)))
