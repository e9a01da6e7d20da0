"""The CTC loss of optax and of PyTorch: functions without weights.

Command: jaxbench pair experiments/pairs/optax_ctc.py
Expected: 15 seconds, the same function; PyTorch has no bfloat16 version, which the report says.
"""

import jax.numpy as jnp
import numpy as np
import optax
import torch

import jaxbench

PADDING = np.array([[0, 0, 0], [0, 0, 1]])  # of the labels: the second text has two


class Ctc(torch.nn.Module):
    """torch.nn.functional.ctc_loss per text."""

    def forward(self, logits, labels):
        """Return losses [B]."""
        log_probabilities = logits.log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(logits),), logits.shape[1]), torch.tensor(3 - PADDING.sum(1))
        return torch.nn.functional.ctc_loss(log_probabilities, labels, *lengths, reduction="none")


def ctc(logits, labels):
    """Return losses [B]."""
    return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, jnp.asarray(PADDING, logits.dtype))


def pair() -> jaxbench.Pair:
    """Pair both losses on two texts, six frames, five letters."""
    logits = np.random.default_rng(0).standard_normal((2, 6, 5))
    return jaxbench.Pair(ctc, Ctc(), (logits, np.array([[1, 2, 3], [2, 2, 0]])))
