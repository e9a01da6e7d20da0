"""KGW with the lists of MarkLLM or transformers in PyTorch: a bias on lists from a bit table. Twin: jaxbench.

Detection reads the lists on the host (green_lists.py), so there is no `text_words` here.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from jaxbench.watermark.device.contract import Position, State, active_rows
from jaxbench.watermark.green_lists import GreenLists
from jaxbench.watermark.schemes.contract import Scheme
from torch_ref.watermark.device import marks


class Mark(marks.Mark):
    """A scheme with a toolkit's lists on a device."""

    def __init__(self, scheme: Scheme, *, vocab_size: int, green_lists: GreenLists, device: str = "cpu"):
        self.scheme, self.vocab_size, self._lists = scheme, vocab_size, green_lists
        arrays = {"bits": green_lists.bits(), "values": green_lists.rule.values, "rows": green_lists.rule.rows}
        self.shared = {name: torch.tensor(array, device=device) for name, array in arrays.items()}

    def apply(
        self, state: tuple[State, State], logits: Float[Tensor, "B V"], at: Position
    ) -> tuple[State, Float[Tensor, "B V"]]:
        """Return the state, and logits with the scheme's bias added to those of green tokens."""
        shared, state = state
        is_active = active_rows(self.scheme, state, at)
        is_green = self._green_tokens(shared, at) & is_active[:, None]
        return state, logits + is_green.to(logits.dtype) * self._lists.rule.bias

    def _green_tokens(self, shared: State, at: Position) -> Bool[Tensor, "B V"]:
        """Return the green list that each row's context selects from the bit table."""
        rule, width = self._lists.rule, self._lists.width
        last = marks.last_tokens(at, width).clamp(
            max=self.vocab_size - 1
        )  # ids past the vocabulary stand for vectors; clamped as JAX's indexing does
        contexts = shared["values"][last]
        if rule.combine == "skip":
            combined = contexts[:, -rule.lag]
        elif rule.combine == "min":
            combined = torch.amin(contexts, dim=1)
        else:
            combined = contexts[:, 0]
            for i in range(1, width):
                other = contexts[:, i]
                product = combined * other if rule.combine == "time" else combined + other
                combined = product % self.vocab_size
        packed = shared["bits"][shared["rows"][combined]]
        green = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)[None, None, :]) & 1
        return green.reshape(packed.shape[0], -1)[:, : self.vocab_size] != 0
