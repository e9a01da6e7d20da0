"""What a scheme does to logits, and how it reads texts, on a device: what its file leaves out. Twin: torch_ref.

A scheme names its file by its attribute `device` (schemes/contract.py); the class there is called `Mark`.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxbench.sample import OrdinaryDraw
from jaxbench.watermark import prf
from jaxbench.watermark.device import steps
from jaxbench.watermark.device.steps import KeyedStep, Position, State
from jaxbench.watermark.schemes.contract import Scheme


class Mark:
    """One scheme on a device, for one vocabulary.

    A state has a row for each text: marked bool [B], keys uint32 [B 4] (both halves of the first and of the second
    key), and what states.generation_state and `first_state` add. Logits [B V] are those of the next token.

    Attributes:
      shared: arrays that all rows read, only where the scheme has lists of its own; `apply` then gets (shared, state).
    """

    def __init__(self, scheme: Scheme, *, vocab_size: int, green_lists: Any = None):
        self.scheme, self.vocab_size = scheme, vocab_size

    def first_state(self, state: State) -> State:
        """State before the first token: with what this scheme carries from token to token."""
        return state

    def green_tokens(self, state: State, at: Position) -> Bool[Array, "B V"]:
        """Tokens that are green in rows that are marked here, none in other rows (schemes that do not draw)."""

    def apply(self, state: Any, logits: Float[Array, "B V"], at: Position) -> tuple[State, Float[Array, "B V"]]:
        """Next state, and logits with `delta` added to those of green tokens (schemes that do not draw)."""
        is_green = self.green_tokens(state, at)
        return state, logits + is_green.astype(logits.dtype) * jnp.asarray(self.scheme.delta, logits.dtype)

    def draw(
        self, state: State, logits: Float[Array, "B V"], at: Position, sample: OrdinaryDraw
    ) -> tuple[State, Int[Array, " B"]]:
        """Next state, and tokens, -1 for rows that it leaves to others (schemes that draw)."""

    def reweight(self, state: State, logits: Float[Array, "B V"], at: Position) -> tuple[State, Float[Array, "B V"]]:
        """Next state, and logits whose ordinary draw is marked (schemes that draw)."""

    def text_words(self, key: prf.Halves, text: prf.Text) -> tuple[prf.Words, prf.Seeds]:
        """Words and seeds of the tokens of texts (schemes without lists of their own)."""
        return prf.text_words(self.scheme, key, text, vocab_size=self.vocab_size)


class ReweightingMark(Mark):
    """A scheme that draws from a distribution of its own, `reweighted`, unless the context was used before."""

    def first_state(self, state: State) -> State:
        """State before the first token, which remembers contexts."""
        return steps.with_history(state)

    def reweighted(self, state: State, keyed: KeyedStep, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Logarithm of the scheme's distribution, up to a constant in each row."""

    def reweight(self, state: State, logits: Float[Array, "B V"], at: Position) -> tuple[State, Float[Array, "B V"]]:
        """Next state, and logits, those of active rows reweighted."""
        state, keyed = steps.keyed_step(self.scheme, state, at)
        return state, jnp.where(keyed.is_active[:, None], self.reweighted(state, keyed, logits), logits)

    def draw(
        self, state: State, logits: Float[Array, "B V"], at: Position, sample: OrdinaryDraw
    ) -> tuple[State, Int[Array, " B"]]:
        """Next state, and the ordinary draw from such logits for all rows with a key, -1 for others."""
        state, keyed = steps.keyed_step(self.scheme, state, at)

        def drawn_tokens() -> Int[Array, " B"]:
            changed = jnp.where(keyed.is_active[:, None], self.reweighted(state, keyed, logits), logits)
            return sample(changed).astype(jnp.int32)

        drawn = steps.draw_if_any(keyed.is_active, drawn_tokens)
        return state, jnp.where(state["marked"], drawn, -1)


def mark_of(scheme: Scheme, *, vocab_size: int, green_lists: Any = None) -> Mark:
    """A scheme's Mark, from the file that the scheme names."""
    module = importlib.import_module(f"jaxbench.watermark.device.{scheme.device}")
    return module.Mark(scheme, vocab_size=vocab_size, green_lists=green_lists)
