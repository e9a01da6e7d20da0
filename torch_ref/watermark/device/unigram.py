"""Unigram in PyTorch: a bias on the logits of one fixed list. Twin: jaxbench/watermark/device/unigram.py."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from jaxbench.watermark import reference
from jaxbench.watermark.device.contract import Position, State, active_rows
from torch_ref.watermark import prf
from torch_ref.watermark.device import marks


class Mark(marks.Mark):
    """Unigram on a device."""

    def green_tokens(self, state: State, at: Position) -> Bool[Tensor, "B V"]:
        """Return the tokens on the list of each row marked at this step, none in other rows."""
        return state["green"] & active_rows(self.scheme, state, at)[:, None]

    def text_words(self, key: prf.Halves, text: prf.Text) -> tuple[prf.Words, prf.Seeds]:
        """Return the words of the tokens of texts, and empty seeds: one list serves all contexts."""
        lists, index = text.fixed_lists
        words = torch.where(lists[index[:, None], text.tokens], 0, reference.RED)
        return words, text.tokens.new_zeros((*text.tokens.shape, 0))
