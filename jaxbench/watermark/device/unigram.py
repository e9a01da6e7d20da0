"""Unigram in JAX: a bias on the logits of one fixed list. Twin: torch_ref/watermark/device/unigram.py."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxbench.watermark import prf, reference
from jaxbench.watermark.device import steps
from jaxbench.watermark.device.steps import Position, State


class Mark:
    """Unigram on a device; a Mark (marks.py)."""

    def __init__(self, scheme: Any, *, vocab_size: int, green_lists: Any = None):
        self.scheme, self.vocab_size = scheme, vocab_size

    def first_state(self, state: State) -> State:
        """Return the state, which holds each row's list."""
        return state

    def apply(self, state: State, logits: Float[Array, "B V"], at: Position) -> tuple[State, Float[Array, "B V"]]:
        """Return the state and the logits with `delta` added to those on the list."""
        is_green = state["green"] & steps.active_rows(self.scheme, state, at)[:, None]
        return state, logits + is_green.astype(logits.dtype) * jnp.asarray(self.scheme.delta, logits.dtype)

    def text_words(self, key: prf.Halves, text: prf.Text) -> tuple[prf.Words, prf.Seeds]:
        """Return words of the tokens of texts; there is one seed for all, so none is named."""
        lists, index = text.fixed_lists
        words = jnp.where(lists[index[None], text.tokens], jnp.uint32(0), jnp.uint32(reference.RED))
        return words, jnp.zeros((*text.tokens.shape, 0), jnp.uint32)
