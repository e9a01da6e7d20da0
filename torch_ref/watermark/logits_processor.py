"""Watermarks as logits processors of sample.Generator. Twin: jaxbench/watermark/logits_processor.py.

One processor serves a batch in which every row has its own key, or none. Keys enter by `Watermark.state`. For several
schemes in one batch, chain one processor per scheme; each row is marked in one of them. device/ has what a scheme does
to logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jaxbench.watermark.green_lists import GreenLists
from jaxbench.watermark.schemes.contract import SchemeLike
from jaxbench.watermark.watermark_base import WatermarkBase
from torch_ref.watermark.device.marks import mark_of


class Watermark(WatermarkBase):
    """A logits processor that marks text with one scheme."""

    def __init__(
        self, scheme: SchemeLike, *, vocab_size: int, green_lists: GreenLists | None = None, device: str = "cpu"
    ):
        """Prepare a scheme as the twin does, for logits on a device."""
        self._device = device
        on_device = functools.partial(mark_of, device=device)
        super().__init__(scheme, vocab_size=vocab_size, green_lists=green_lists, mark_of=on_device)

    @property
    def reweight_alone(self) -> Callable[..., Any]:
        """`reweight` outside other programs: the method itself, as nothing is compiled."""
        return self.reweight

    def _on_device(self, array: np.ndarray) -> Tensor:
        is_word = array.dtype.kind == "u"
        return torch.from_numpy(array.astype("int64") if is_word else array).to(self._device)
