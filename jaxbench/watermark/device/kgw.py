"""KGW in JAX: a bias on green logits, whose words lie below a threshold. Twin: torch_ref/watermark/device/kgw.py."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int, UInt32

from jaxbench.watermark import prf, reference
from jaxbench.watermark.device import marks
from jaxbench.watermark.device.contract import Position, State, active_rows, first_key
from jaxbench.watermark.reference import SELF_SITE
from jaxbench.watermark.schemes import green_count


class Mark(marks.Mark):
    """KGW on a device."""

    def first_state(self, state: State) -> State:
        """Return the state; under the rule `self` with the words P(v, v), which depend only on the key."""
        if self.scheme.context.kind != "self":
            return state
        return state | {"own": own_lanes(first_key(state), num_elements=self.vocab_size)}

    def green_tokens(self, state: State, at: Position) -> Bool[Array, "B V"]:
        """Return the green tokens, given their contexts, of rows marked at this step; none in other rows."""
        threshold = jnp.uint32(green_count.threshold(self.scheme.gamma))
        rule, key = self.scheme.context, first_key(state)
        contexts = marks.last_tokens(at, rule.length)
        is_active = active_rows(self.scheme, state, at)

        def bits() -> Array:
            if rule.kind == "self":
                words = self._candidate_lanes(state, contexts, key)
            else:
                seeds = prf.seeds_after(rule, (key[0][:, 0], key[1][:, 0]), contexts, None)
                words = prf.lanes(key, seeds, site=reference.site_of(self.scheme), num_elements=self.vocab_size)
            green = ((word < threshold).astype(jnp.uint32) << j for j, word in enumerate(words))
            return jnp.where(is_active[:, None], sum(green), 0).astype(jnp.uint8)

        # A branch materialises its result: fused into the sum with the logits, each block would be computed four times.
        shape = (at.tokens.shape[0], -(-self.vocab_size // 4))
        packed = lax.cond(jnp.any(is_active), bits, lambda: jnp.zeros(shape, jnp.uint8))
        green = (packed[:, :, None] >> jnp.arange(4, dtype=jnp.uint8)[None, None, :]) & 1
        green = green.reshape(shape[0], -1)[:, : self.vocab_size] != 0
        if rule.kind == "self" or "payload" not in state:
            return green
        return prf.shift(green, state["payload"])

    def _candidate_lanes(self, state: State, contexts: Int[Array, "B n"], key: prf.Halves) -> prf.Lanes:
        """Return the words of all candidates under the rule `self`, in lanes."""
        if "payload" not in state:
            site = reference.site_of(self.scheme)
            return self_lanes(key, contexts, state["own"], site=site, num_elements=self.vocab_size)
        candidates = jnp.arange(4 * -(-self.vocab_size // 4), dtype=jnp.uint32)[None, :]
        seeds = prf.self_seeds(contexts[:, None, :], candidates, key)
        options = {"vocab_size": self.vocab_size, "payload": state["payload"][:, None]}
        words = prf.token_words(self.scheme, key, seeds, candidates, **options)
        return tuple(jnp.moveaxis(words.reshape(words.shape[0], -1, 4), 2, 0))


def self_lanes(
    key: prf.Halves, contexts: Int[Array, "B n"], own: UInt32[Array, "B 4 C"], *, site: int, num_elements: int
) -> prf.Lanes:
    """Return the words of all candidates under the rule `self`, in lanes; own[:, j] is lane j of P(v, v)."""
    blocks, least = prf.block_numbers(num_elements), [own[:, j] for j in range(4)]
    for i in range(contexts.shape[1]):
        pairs = prf.random_blocks((blocks, contexts[:, i : i + 1].astype(jnp.uint32), 0, SELF_SITE), key)
        least = [jnp.minimum(one, other) for one, other in zip(least, pairs)]
    words = (prf.random_blocks((blocks, least[j], 0, site), key)[j] for j in range(4))
    return tuple(words)


def own_lanes(key: prf.Halves, *, num_elements: int) -> UInt32[Array, "B 4 C"]:
    """Return P(v, v) of all tokens v in lanes: the part of self_lanes that does not depend on the context."""
    tokens = jnp.arange(4 * -(-num_elements // 4), dtype=jnp.uint32)[None, :]
    return prf.pair_words(tokens, tokens, key).reshape(-1, tokens.shape[1] // 4, 4).swapaxes(1, 2)
