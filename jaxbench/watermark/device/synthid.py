"""SynthID in JAX: a tournament among the likeliest tokens. Twin: torch_ref/watermark/device/synthid.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, UInt32

from jaxbench.watermark import prf, reference
from jaxbench.watermark.device.contract import KeyedStep, State
from jaxbench.watermark.device.marks import ReweightingMark
from jaxbench.watermark.schemes.synthid import HEAD_BLOCK

LAYERS = 5  # layers per loop iteration, all computed from one materialised distribution


class Mark(ReweightingMark):
    """SynthID on a device."""

    def reweighted(self, state: State, keyed: KeyedStep, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Logarithm of the distribution after the tournament, up to a constant in each row."""
        candidates, site = self.scheme.candidates, reference.site_of(self.scheme)
        if candidates is not None and candidates < self.vocab_size:
            return self._played_by_head(keyed, logits, candidates)
        size = {"num_elements": self.vocab_size}
        words = _stored(state, lambda: prf.lanes(keyed.key, keyed.seeds, site=site, **size))
        return _play(logits, prf.interleave(words, self.vocab_size), self.scheme.depth)

    def _played_by_head(self, keyed: KeyedStep, logits: Float[Array, "B V"], candidates: int) -> Float[Array, "B V"]:
        """Return logits after a tournament among the tokens of schemes.synthid.head."""
        size, rows = HEAD_BLOCK, jnp.arange(logits.shape[0])[:, None]
        padded = jnp.pad(logits, ((0, 0), (0, -self.vocab_size % size)), constant_values=-jnp.inf)
        blocks = padded.reshape(logits.shape[0], -1, size)
        chosen = lax.top_k(jnp.max(blocks, axis=-1), candidates // size)[1]
        words = block_words(keyed.key, keyed.seeds, chosen, size=size, site=reference.site_of(self.scheme))
        played = _play(blocks[rows, chosen].reshape(logits.shape[0], -1), words, self.scheme.depth)
        changed = blocks.at[rows, chosen].set(played.reshape(logits.shape[0], -1, size), unique_indices=True)
        return changed.reshape(logits.shape[0], -1)[:, : self.vocab_size]


def block_words(
    key: prf.Halves, seeds: UInt32[Array, "B 2"], blocks: Int[Array, "B n"], *, size: int, site: int
) -> UInt32[Array, "B C"]:
    """Return the words of tokens size * b .. size * b + size - 1 of each block b, in order; size is a multiple of 4."""
    counters = blocks.astype(jnp.uint32)[:, :, None] * jnp.uint32(size // 4) + prf.block_numbers(size)[:, None, :]
    words = prf.random_blocks((counters.reshape(blocks.shape[0], -1), seeds[:, :1], seeds[:, 1:], site), key)
    return prf.interleave(words, blocks.shape[1] * size)


def _stored(state: State, compute: Callable[[], Any]) -> Any:
    """Materialise the result of `compute` by returning it from a branch, so that its readers do not recompute it."""
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute))
    return lax.cond(jnp.any(state["marked"]), compute, lambda: empty)


def _play(logits: Float[Array, "B C"], words: UInt32[Array, "B C"], depth: int) -> Float[Array, "B C"]:
    """Return logits after a tournament among all of them; their logsumexp stays the same."""
    p = jax.nn.softmax(logits, axis=-1)
    return logits + jnp.log(jnp.where(p > 0, _tournament(p, words, depth) / jnp.where(p > 0, p, 1), 1))


def _tournament(p: Float[Array, "B V"], words: UInt32[Array, "B V"], depth: int) -> Float[Array, "B V"]:
    """Compute schemes.synthid.tournament of each row."""

    def layers(p: Array, bits: Array, count: int) -> Array:
        for i in range(count):
            is_one = (bits >> i) & 1 != 0
            # p is materialised before this sum: XLA:CPU vectorises a lone sum, but not one that is fused with more.
            share = jnp.minimum(jnp.sum(jnp.where(is_one, p, 0), axis=-1, keepdims=True), 1)
            p = p * jnp.where(is_one, 2 - share, 1 - share)
        return p

    whole = depth // LAYERS * LAYERS
    p = lax.fori_loop(0, depth // LAYERS, lambda i, p: layers(p, words >> (LAYERS * i).astype(jnp.uint32), LAYERS), p)
    return layers(p, words >> whole, depth - whole) if depth > whole else p
