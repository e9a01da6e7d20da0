"""What a scheme does to logits, and how it reads texts, on a device: what its file leaves out. Twin: jaxbench.

A scheme names its file by its attribute `device` (schemes/contract.py); the class there is called `Mark`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jaxbench.watermark.schemes.contract import Scheme
from torch_ref.sample import OrdinaryDraw
from torch_ref.watermark import prf
from torch_ref.watermark.device import steps
from torch_ref.watermark.device.steps import KeyedStep, Position, State


class Mark:
    """One scheme on a device, for one vocabulary.

    A state has a row for each text: marked bool [B], keys int64 [B 4] (both halves of the first and of the second
    key), and what states.generation_state and `first_state` add. Logits [B V] are those of the next token.

    Attributes:
      shared: arrays that all rows read, only where the scheme has lists of its own; `apply` then gets (shared, state).
    """

    def __init__(self, scheme: Scheme, *, vocab_size: int, green_lists: Any = None, device: str = "cpu"):
        self.scheme, self.vocab_size = scheme, vocab_size

    def first_state(self, state: State) -> State:
        """State before the first token: with what this scheme carries from token to token."""
        return state

    def green_tokens(self, state: State, at: Position) -> Bool[Tensor, "B V"]:
        """Tokens that are green in rows that are marked here, none in other rows (schemes that do not draw)."""

    def apply(self, state: Any, logits: Float[Tensor, "B V"], at: Position) -> tuple[State, Float[Tensor, "B V"]]:
        """Next state, and logits with `delta` added to those of green tokens (schemes that do not draw)."""
        is_green = self.green_tokens(state, at)
        return state, logits + is_green.to(logits.dtype) * self.scheme.delta

    def draw(
        self, state: State, logits: Float[Tensor, "B V"], at: Position, sample: OrdinaryDraw
    ) -> tuple[State, Int[Tensor, " B"]]:
        """Next state, and tokens, -1 for rows that it leaves to others (schemes that draw)."""

    def reweight(self, state: State, logits: Float[Tensor, "B V"], at: Position) -> tuple[State, Float[Tensor, "B V"]]:
        """Next state, and logits whose ordinary draw is marked (schemes that draw)."""

    def text_words(self, key: prf.Halves, text: prf.Text) -> tuple[prf.Words, prf.Seeds]:
        """Words and seeds of the tokens of texts (schemes without lists of their own)."""
        return prf.text_words(self.scheme, key, text, vocab_size=self.vocab_size)


class ReweightingMark(Mark):
    """A scheme that draws from a distribution of its own, `reweighted`, unless the context was used before."""

    def first_state(self, state: State) -> State:
        """State before the first token, which remembers contexts."""
        return steps.with_history(state)

    def reweighted(self, state: State, keyed: KeyedStep, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Logarithm of the scheme's distribution, up to a constant in each row."""

    def reweight(self, state: State, logits: Float[Tensor, "B V"], at: Position) -> tuple[State, Float[Tensor, "B V"]]:
        """Next state, and logits, those of active rows reweighted."""
        state, keyed = steps.keyed_step(self.scheme, state, at)
        return state, torch.where(keyed.is_active[:, None], self.reweighted(state, keyed, logits), logits)

    def draw(
        self, state: State, logits: Float[Tensor, "B V"], at: Position, sample: OrdinaryDraw
    ) -> tuple[State, Int[Tensor, " B"]]:
        """Next state, and the ordinary draw from such logits for all rows with a key, -1 for others."""
        state, keyed = steps.keyed_step(self.scheme, state, at)

        def drawn_tokens() -> Int[Tensor, " B"]:
            changed = torch.where(keyed.is_active[:, None], self.reweighted(state, keyed, logits), logits)
            return sample(changed)

        drawn = steps.draw_if_any(keyed.is_active, drawn_tokens)
        return state, torch.where(state["marked"], drawn, -1)


def mark_of(scheme: Scheme, *, vocab_size: int, green_lists: Any = None, device: str = "cpu") -> Mark:
    """A scheme's Mark, from the file that the scheme names."""
    module = importlib.import_module(f"torch_ref.watermark.device.{scheme.device}")
    return module.Mark(scheme, vocab_size=vocab_size, green_lists=green_lists, device=device)
