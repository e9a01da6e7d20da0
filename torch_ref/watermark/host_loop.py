"""A watermark in a decoding loop that is not sample.Generator's. Twin: jaxbench/watermark/host_loop.py.

An instance is a LogitsProcessor of transformers: generate(..., logits_processor=[HostLoop(watermark, keys)]).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from jaxbench.watermark.reference import MAX_WIDTH
from jaxbench.watermark.watermark_base import HostLoopBase


class HostLoop(HostLoopBase):
    """Turns logits into logits whose ordinary draw is marked; HostLoopBase says how to use it."""

    def __call__(self, input_ids: Int[Tensor, "B T"], scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Return marked logits of the next token; input_ids are the prompt and the continuation so far."""
        state, step = self._begin(input_ids)
        recent = input_ids[:, -MAX_WIDTH:]  # no rule looks further back
        length = torch.full((recent.shape[0],), recent.shape[1], device=recent.device)
        scaled = scores.to(torch.promote_types(scores.dtype, torch.float32)) / self._scale  # as in sample.Generator
        self._state, marked = self._watermark.reweight_alone(state, scaled, recent, length, step)
        marked = torch.where(marked == scaled, scores, marked * self._scale)  # unchanged logits stay bit-identical
        return marked.to(scores.dtype)
