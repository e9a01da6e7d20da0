"""Unigram in JAX: a bias on the logits of one fixed list. Twin: torch_ref/watermark/device/unigram.py."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool

from jaxbench.watermark import prf, reference
from jaxbench.watermark.device import marks
from jaxbench.watermark.device.contract import Position, State, active_rows


class Mark(marks.Mark):
    """Unigram on a device."""

    def green_tokens(self, state: State, at: Position) -> Bool[Array, "B V"]:
        """Return the tokens on the list of each row marked at this step, none in other rows."""
        return state["green"] & active_rows(self.scheme, state, at)[:, None]

    def text_words(self, key: prf.Halves, text: prf.Text) -> tuple[prf.Words, prf.Seeds]:
        """Return the words of the tokens of texts, and empty seeds: one list serves all contexts."""
        lists, index = text.fixed_lists
        words = jnp.where(lists[index[None], text.tokens], jnp.uint32(0), jnp.uint32(reference.RED))
        return words, jnp.zeros((*text.tokens.shape, 0), jnp.uint32)
