"""Gumbel in JAX: sampling with keyed noise. Twin: torch_ref/watermark/device/gumbel.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, UInt32

from jaxbench import philox, prng
from jaxbench.sample import OrdinaryDraw, largest_sum
from jaxbench.watermark import prf, reference
from jaxbench.watermark.device import marks
from jaxbench.watermark.device.contract import KeyedStep, Position, State, active_rows, first_key
from jaxbench.watermark.schemes.gumbel import CONTEXT_DOMAIN, TOKEN_DOMAIN

ROUTE_SITE = philox.site_id("watermark/route")


class Mark(marks.Mark):
    """Gumbel on a device."""

    def first_state(self, state: State) -> State:
        """Return the state, with a history of contexts if the scheme deduplicates."""
        return marks.with_history(state) if self.scheme.deduplicate else state

    def draw(
        self, state: State, logits: Float[Array, "B V"], at: Position, sample: OrdinaryDraw
    ) -> tuple[State, Int[Array, " B"]]:
        """Return the next state and the token of each row with the largest sum of logit and keyed noise.

        Rows that have a key but are not marked at this step get their ordinary token from the same draw (vLLM's
        function: -1).
        """
        state, keyed = self._keyed_step(state, at)
        # Outside the branch: a branch's inputs are materialised, so that not every block recomputes this selection.
        stream = self._stream(state, keyed)
        stream = stream if self.scheme.is_vllm else stream.where(keyed.is_active, sample)
        noisy = marks.draw_if_any(keyed.is_active, lambda: largest_sum(logits, self._noise(stream, str(logits.dtype))))
        return state, jnp.where(keyed.is_active if self.scheme.is_vllm else state["marked"], noisy, -1)

    def reweight(self, state: State, logits: Float[Array, "B V"], at: Position) -> tuple[State, Float[Array, "B V"]]:
        """Return the next state, and logits that are -inf for all tokens but the drawn one in active rows."""
        state, keyed = self._keyed_step(state, at)
        drawn = largest_sum(logits, self._noise(self._stream(state, keyed), str(logits.dtype)))
        alone = jnp.where(jnp.arange(logits.shape[1])[None, :] == drawn[:, None], 0.0, -jnp.inf)
        return state, jnp.where(keyed.is_active[:, None], alone, logits)

    def text_words(self, key: prf.Halves, text: prf.Text) -> tuple[prf.Words, prf.Seeds]:
        """Return the words and seeds of the tokens; contexts of vLLM's function start with the continuation."""
        rule, tokens = self.scheme.context, text.tokens
        if not self.scheme.is_vllm:
            return super().text_words(key, text)
        place, distance = jnp.arange(tokens.shape[0], dtype=jnp.int32), jnp.arange(-rule.width, 0)
        places = place[:, None, None] + distance[None, None, :]
        is_inside = places >= jnp.maximum(text.prompt, 0)[None, :, None]
        contexts = jnp.where(is_inside, prf.earlier_tokens(tokens, rule.width), jnp.uint32(philox.MASK32))
        states = vllm_state(contexts, key)
        return vllm_token_words(states, tokens, key), states

    def _keyed_step(self, state: State, at: Position) -> tuple[State, KeyedStep]:
        """Return the next state and the step; a context is remembered by its seed under the first key."""
        key = self._key_of_step(state, at.step)
        seeds = self._context_seeds(key, at)
        is_active = active_rows(self.scheme, state, at)
        if self.scheme.deduplicate:
            is_dual = reference.is_dual_key(self.scheme)
            names = self._context_seeds(first_key(state), at) if is_dual else seeds
            state, is_active = marks.remember(state, names[:, :2], is_active, at.step)
        return state, KeyedStep(key, seeds, is_active)

    def _context_seeds(self, key: prf.Halves, at: Position) -> UInt32[Array, "B S"]:
        """Seed of each row's context; prompt tokens count as missing for vLLM's function."""
        rule, flat = self.scheme.context, (key[0][:, 0], key[1][:, 0])
        contexts = marks.last_tokens(at, rule.width)
        if not self.scheme.is_vllm:
            return prf.seeds_after(rule, flat, contexts, None)
        is_inside = marks.last_places(at.length, rule.width) >= (at.length - at.step)[:, None]
        return vllm_state(jnp.where(is_inside, contexts, -1), flat)

    def _key_of_step(self, state: State, step: Array) -> prf.Halves:
        """Key [B 1] of each row at this step: with two keys, the second in a share alpha of the steps."""
        keys = state["keys"]
        if not reference.is_dual_key(self.scheme):
            return first_key(state)
        low, high, row = state["route"].T
        counter = (jnp.zeros_like(row), row, jnp.full_like(row, step), jnp.full_like(row, ROUTE_SITE))
        word = prng.philox4x32(counter, (low, high))[0]
        share = min(int(self.scheme.dual_key_alpha * 2**32), philox.MASK32)
        use_second = (word < jnp.uint32(share))[:, None]
        return jnp.where(use_second, keys[:, 2:3], keys[:, :1]), jnp.where(use_second, keys[:, 3:], keys[:, 1:2])

    def _stream(self, state: State, keyed: KeyedStep) -> Stream:
        """Return where each row's keyed words come from."""
        site = jnp.full((keyed.seeds.shape[0], 1), reference.site_of(self.scheme), jnp.uint32)
        return Stream(keyed.key, keyed.seeds, site, state.get("payload"))

    def _noise(self, stream: Stream, dtype: str) -> prf.Lanes:
        """Keyed Gumbel noise -log(-log u) of every token, in lanes."""
        size = {"num_elements": self.vocab_size}
        if self.scheme.is_vllm:
            words = vllm_lanes(stream.seeds, stream.key, **size)
            return tuple(-jnp.log(_vllm_exponential(w, dtype)) for w in words)
        words = prf.lanes(stream.key, stream.seeds, site=stream.site, **size)
        noise = tuple(-jnp.log(prng.exponential(w, dtype=dtype)) for w in words)
        if stream.payload is None:
            return noise
        shifted = prf.shift(prf.interleave(noise, self.vocab_size), stream.payload)
        shifted = jnp.pad(shifted, ((0, 0), (0, -self.vocab_size % 4)))
        return tuple(shifted[:, j::4] for j in range(4))


class Stream(NamedTuple):
    """Where the words of each row come from: the arguments of prf.lanes, and the payload's shift."""

    key: prf.Halves  # [B 1]
    seeds: UInt32[Array, "B S"]
    site: UInt32[Array, "B 1"]
    payload: Int[Array, " B"] | None

    def where(self, is_active: Bool[Array, " B"], sample: OrdinaryDraw) -> Stream:
        """Return this stream for active rows, that of the ordinary draw for others."""
        rows, chosen = sample.row_ids.astype(jnp.uint32), is_active[:, None]
        plain = jnp.stack([rows, jnp.full_like(rows, sample.step)], axis=-1)
        return Stream(
            tuple(jnp.where(chosen, keyed, ordinary) for keyed, ordinary in zip(self.key, sample.key)),
            jnp.where(chosen, self.seeds, plain),
            jnp.where(chosen, self.site, jnp.uint32(philox.site_id("sample"))),
            None if self.payload is None else jnp.where(is_active, self.payload, 0),
        )


# vLLM's function


def vllm_state(contexts: Int[Array, "*shape h"], key: prf.Halves) -> UInt32[Array, "*shape 4"]:
    """Return the states of contexts, whose places before the text's start are -1 (see schemes/gumbel.py)."""
    contexts, width = contexts.astype(jnp.uint32), contexts.shape[-1]
    words: Any = tuple(jnp.full_like(key[0], word) for word in (CONTEXT_DOMAIN, width, 0, 0))
    for offset in range(0, width, 4):
        block = [
            contexts[..., offset + i] if offset + i < width else jnp.full_like(key[0], philox.MASK32 - i)
            for i in range(4)
        ]
        words = prf.random_blocks(tuple(w ^ b for w, b in zip(words, block)), (key[0] ^ offset, key[1]))
    return jnp.stack(jnp.broadcast_arrays(*words), axis=-1)


def vllm_token_words(
    states: UInt32[Array, "*shape 4"], tokens: Int[Array, "*shape"], key: prf.Halves
) -> UInt32[Array, "*shape"]:
    """Return the word of each token given its context's state."""
    tokens = tokens.astype(jnp.uint32)
    pair = (key[0] ^ states[..., 3], key[1] ^ jnp.uint32(TOKEN_DOMAIN))
    return prf.pick_word(prf.random_blocks((tokens >> 2, states[..., 0], states[..., 1], states[..., 2]), pair), tokens)


def vllm_lanes(states: UInt32[Array, "B 4"], key: prf.Halves, *, num_elements: int) -> prf.Lanes:
    """Return the words of tokens 0..num_elements-1 given each row's state, in lanes."""
    pair = (key[0] ^ states[:, 3:], key[1] ^ jnp.uint32(TOKEN_DOMAIN))
    counter = (prf.block_numbers(num_elements), states[:, :1], states[:, 1:2], states[:, 2:3])
    return prf.random_blocks(counter, pair)


def _vllm_exponential(words: UInt32[Array, "*shape"], dtype: str) -> Float[Array, "*shape"]:
    """-log u of vLLM's uniform u = ((w >> 8) + 1) / (2**24 + 1), by log1p of the complement above one half."""
    k, scale = (words >> 8) + 1, jnp.asarray(2.0**24 + 1.0, "float64" if dtype == "float64" else "float32")
    is_low = k < 2**23
    low = jnp.where(is_low, k, 1).astype(dtype) / scale
    complement = jnp.where(is_low, 0, 2**24 + 1 - k).astype(dtype) / scale
    return jnp.where(is_low, -jnp.log(low), -jnp.log1p(-complement))
