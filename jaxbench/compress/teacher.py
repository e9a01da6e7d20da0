"""A teacher of continuations: the unchanged decoder, given the whole passage as plain text.

What follows a passage tells little about it: of 3.7 nats per token the passage is worth some 0.2, and the rest of the
loss is noise for its vectors. The most probable tokens after the whole passage tell the same without the noise.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxbench import transformer
from jaxbench.compress import rows
from jaxbench.compress.config import Arrays
from jaxbench.pretrained import weights


class Teacher:
    """The decoder of a checkpoint, which predicts its most probable tokens."""

    def __init__(self, checkpoint: weights.Checkpoint, count: int, *, precision: str, prefix: int = 1):
        """Args: count: tokens per target. prefix: vectors of a row's tag."""
        self._prefix = prefix
        self._model = transformer.build(checkpoint.config, checkpoint.params, dtype=precision)
        self._vocabulary = checkpoint.config
        self._program = jax.jit(functools.partial(_most_probable, count=count))

    def __call__(self, arrays: Arrays) -> Arrays:
        """Rows with the teacher's tokens and probabilities, which are 0 in rows that are not continuations."""
        num_vectors = arrays.groups[0].size
        lengths = (arrays.context >= 0).sum(axis=(1, 2))
        tokens, positions = in_clear(arrays, self._prefix)
        behind = arrays.places - num_vectors - self._prefix  # tokens between the tag and the target, less one
        places = np.clip(behind + lengths[:, None], 0, tokens.shape[1] - 1)
        found, probs = map(np.asarray, self._program(self._model, tokens, positions, places.astype(np.int32)))
        tags = (arrays.inputs[:, num_vectors] - self._vocabulary.vocab_size - num_vectors) // self._prefix
        is_taught = (tags == rows.CONTINUE)[:, None] & arrays.mask
        return arrays._replace(teacher_tokens=found, teacher_probs=np.where(is_taught[:, :, None], probs, 0.0))


def in_clear(arrays: Arrays, prefix: int = 1) -> tuple[Int[np.ndarray, "B S"], Int[np.ndarray, "B S"]]:
    """Tokens and positions (-1 = padding) of rows with passages as plain text instead of vectors and tag.

    Args:
      prefix: vectors of a row's tag.
    """
    num_vectors, passages = arrays.groups[0].size, arrays.context.reshape(len(arrays.context), -1)
    following = np.where(arrays.positions >= 0, arrays.inputs, -1)[:, num_vectors + prefix :]
    parts = np.concatenate([passages, following], axis=1)
    order = np.argsort(parts < 0, axis=1, kind="stable")  # tokens first, in their order
    tokens = np.take_along_axis(parts, order, axis=1)
    positions = np.where(tokens >= 0, np.arange(tokens.shape[1]), -1)
    return np.maximum(tokens, 0).astype(np.int32), positions.astype(np.int32)


def _most_probable(
    model: Any, tokens: Int[Array, "B S"], positions: Int[Array, "B S"], places: Int[Array, "B U"], *, count: int
) -> tuple[Int[Array, "B U K"], Float[Array, "B U K"]]:
    hidden, _ = model.features(tokens, positions)
    hidden = jnp.take_along_axis(hidden, places[:, :, None], axis=1)
    probs = jax.nn.softmax(model.logits(hidden).astype(jnp.float32), axis=2)
    most, which = jax.lax.top_k(probs, count)
    return which, most
