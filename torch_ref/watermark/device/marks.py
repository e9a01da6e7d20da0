"""What a scheme's file in this folder offers: the contract of its class `Mark`. Twin: jaxbench.

A scheme names its file by its attribute `device` (schemes/contract.py).
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from jaxbench.watermark.schemes.contract import Scheme
from torch_ref.sample import OrdinaryDraw
from torch_ref.watermark import prf
from torch_ref.watermark.device.steps import Position, State


class Mark(Protocol):
    """One scheme on a device, for one vocabulary.

    A state has a row for each text: marked bool [B], keys int64 [B 4] (both halves of the first and of the second
    key), and what states.generation_state and `first_state` add. Logits [B V] are those of the next token.

    Attributes:
      shared: arrays that all rows read, only where the scheme has lists of its own; `apply` then gets (shared, state).
    """

    def __init__(self, scheme: Scheme, *, vocab_size: int, green_lists: Any = None, device: str = "cpu"): ...

    def first_state(self, state: State) -> State:
        """Return the state before the first token: with what this scheme carries from token to token."""

    def apply(self, state: Any, logits: Float[Tensor, "B V"], at: Position) -> tuple[State, Float[Tensor, "B V"]]:
        """Return the next state and logits that make green tokens more likely (schemes that do not draw)."""

    def draw(
        self, state: State, logits: Float[Tensor, "B V"], at: Position, sample: OrdinaryDraw
    ) -> tuple[State, Int[Tensor, " B"]]:
        """Return the next state and tokens, -1 for rows that it leaves to others (schemes that draw)."""

    def reweight(self, state: State, logits: Float[Tensor, "B V"], at: Position) -> tuple[State, Float[Tensor, "B V"]]:
        """Return the next state and logits whose ordinary draw is marked (schemes that draw)."""

    def text_words(self, key: prf.Halves, text: prf.Text) -> tuple[prf.Words, prf.Seeds]:
        """Return words and seeds of the tokens of texts (schemes without lists of their own)."""


def mark_of(scheme: Scheme, *, vocab_size: int, green_lists: Any = None, device: str = "cpu") -> Mark:
    """Return a scheme's Mark, from the file that the scheme names."""
    module = importlib.import_module(f"torch_ref.watermark.device.{scheme.device}")
    return module.Mark(scheme, vocab_size=vocab_size, green_lists=green_lists, device=device)
