"""KGW with the lists of MarkLLM or transformers in JAX: a bias on lists from a bit table. Twin: torch_ref.

Detection reads the lists on the host (green_lists.py), so there is no `text_words` here.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxbench.watermark.device import marks
from jaxbench.watermark.device.contract import Position, State, active_rows
from jaxbench.watermark.green_lists import GreenLists
from jaxbench.watermark.schemes.contract import Scheme


class Mark(marks.Mark):
    """A scheme with a toolkit's lists on a device."""

    def __init__(self, scheme: Scheme, *, vocab_size: int, green_lists: GreenLists):
        self.scheme, self.vocab_size, self._lists = scheme, vocab_size, green_lists
        rule = green_lists.rule
        self.shared = {"bits": jnp.asarray(green_lists.bits()), "values": jnp.asarray(rule.values, jnp.int32)}
        self.shared["rows"] = jnp.asarray(rule.rows, jnp.int32)

    def apply(
        self, state: tuple[State, State], logits: Float[Array, "B V"], at: Position
    ) -> tuple[State, Float[Array, "B V"]]:
        """Return the state, and logits with the scheme's bias added to those of green tokens."""
        shared, state = state
        is_active = active_rows(self.scheme, state, at)
        is_green = self._green_tokens(shared, at) & is_active[:, None]
        return state, logits + is_green.astype(logits.dtype) * jnp.asarray(self._lists.rule.bias, logits.dtype)

    def _green_tokens(self, shared: State, at: Position) -> Bool[Array, "B V"]:
        """Return the green list that each row's context selects from the bit table."""
        rule, width = self._lists.rule, self._lists.width
        contexts = shared["values"][marks.last_tokens(at, width)]
        if rule.combine == "skip":
            combined = contexts[:, -rule.lag]
        elif rule.combine == "min":
            combined = jnp.min(contexts, axis=1)
        else:
            combined = contexts[:, 0].astype(jnp.uint32)
            for i in range(1, width):
                other = contexts[:, i].astype(jnp.uint32)
                product = combined * other if rule.combine == "time" else combined + other
                combined = product % self.vocab_size
        packed = shared["bits"][shared["rows"][combined]]
        green = (packed[:, :, None] >> jnp.arange(8, dtype=jnp.uint8)[None, None, :]) & 1
        return green.reshape(packed.shape[0], -1)[:, : self.vocab_size] != 0
