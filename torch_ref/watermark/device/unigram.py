"""Unigram in PyTorch: a bias on the logits of one fixed list. Twin: jaxbench/watermark/device/unigram.py."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from jaxbench.watermark import reference
from torch_ref.watermark import prf
from torch_ref.watermark.device import steps
from torch_ref.watermark.device.steps import Position, State


class Mark:
    """Unigram on a device; a Mark (marks.py)."""

    def __init__(self, scheme: Any, *, vocab_size: int, green_lists: Any = None, device: str = "cpu"):
        self.scheme, self.vocab_size = scheme, vocab_size

    def first_state(self, state: State) -> State:
        """Return the state, which holds each row's list."""
        return state

    def apply(self, state: State, logits: Float[Tensor, "B V"], at: Position) -> tuple[State, Float[Tensor, "B V"]]:
        """Return the state and the logits with `delta` added to those on the list."""
        is_green = state["green"] & steps.active_rows(self.scheme, state, at)[:, None]
        return state, logits + is_green.to(logits.dtype) * self.scheme.delta

    def text_words(self, key: prf.Halves, text: prf.Text) -> tuple[prf.Words, prf.Seeds]:
        """Return words of the tokens of texts; there is one seed for all, so none is named."""
        lists, index = text.fixed_lists
        words = torch.where(lists[index[:, None], text.tokens], 0, reference.RED)
        return words, text.tokens.new_zeros((*text.tokens.shape, 0))
