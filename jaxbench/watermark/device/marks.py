"""What a scheme's file in this folder offers: the contract of its class `Mark`. Twin: torch_ref.

A scheme names its file by its attribute `device` (schemes/contract.py).
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from jax import Array
from jaxtyping import Float, Int

from jaxbench.sample import OrdinaryDraw
from jaxbench.watermark import prf
from jaxbench.watermark.device.steps import Position, State
from jaxbench.watermark.schemes.contract import Scheme


class Mark(Protocol):
    """One scheme on a device, for one vocabulary.

    A state has a row for each text: marked bool [B], keys uint32 [B 4] (both halves of the first and of the second
    key), and what states.generation_state and `first_state` add. Logits [B V] are those of the next token.

    Attributes:
      shared: arrays that all rows read, only where the scheme has lists of its own; `apply` then gets (shared, state).
    """

    def __init__(self, scheme: Scheme, *, vocab_size: int, green_lists: Any = None): ...

    def first_state(self, state: State) -> State:
        """Return the state before the first token: with what this scheme carries from token to token."""

    def apply(self, state: Any, logits: Float[Array, "B V"], at: Position) -> tuple[State, Float[Array, "B V"]]:
        """Return the next state and logits that make green tokens more likely (schemes that do not draw)."""

    def draw(
        self, state: State, logits: Float[Array, "B V"], at: Position, sample: OrdinaryDraw
    ) -> tuple[State, Int[Array, " B"]]:
        """Return the next state and tokens, -1 for rows that it leaves to others (schemes that draw)."""

    def reweight(self, state: State, logits: Float[Array, "B V"], at: Position) -> tuple[State, Float[Array, "B V"]]:
        """Return the next state and logits whose ordinary draw is marked (schemes that draw)."""

    def text_words(self, key: prf.Halves, text: prf.Text) -> tuple[prf.Words, prf.Seeds]:
        """Return words and seeds of the tokens of texts (schemes without lists of their own)."""


def mark_of(scheme: Scheme, *, vocab_size: int, green_lists: Any = None) -> Mark:
    """Return a scheme's Mark, from the file that the scheme names."""
    module = importlib.import_module(f"jaxbench.watermark.device.{scheme.device}")
    return module.Mark(scheme, vocab_size=vocab_size, green_lists=green_lists)
