"""A watermark in a decoding loop that is not sample.Generator's. Twin: torch_ref/watermark/host_loop.py.

The twin is a LogitsProcessor of transformers; this one serves any loop that calls it once per token.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxbench.watermark.reference import MAX_WIDTH
from jaxbench.watermark.watermark_base import HostLoopBase


class HostLoop(HostLoopBase):
    """Turns logits into logits whose ordinary draw is marked; HostLoopBase says how to use it."""

    def __call__(self, input_ids: Int[Array, "B T"], scores: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Return marked logits of the next token; input_ids are the prompt and the continuation so far."""
        state, step = self._begin(input_ids)
        recent = input_ids[:, -MAX_WIDTH:]  # no rule looks further back; one shape for all steps
        length = jnp.full((recent.shape[0],), recent.shape[1], jnp.int32)
        recent = jnp.pad(recent, ((0, 0), (0, MAX_WIDTH - recent.shape[1])))
        scaled = scores.astype(jnp.promote_types(scores.dtype, jnp.float32)) / self._scale  # as in sample.Generator
        self._state, marked = self._watermark.reweight_alone(state, scaled, recent, length, jnp.int32(step))
        marked = jnp.where(marked == scaled, scores, marked * self._scale)  # unchanged logits stay bit-identical
        return marked.astype(scores.dtype)
