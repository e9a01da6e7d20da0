"""The watermarks' pseudo-random functions in JAX, bit for bit those of definition.py. Twin: torch_ref/watermark/prf.py.

A key is the pair (low, high) of uint32 arrays that broadcast with the rows, in the rank of what they meet. Words of the
whole vocabulary come as four lanes [B ceil(V / 4)]: lane j holds tokens j, j + 4, j + 8, .. (one block serves four).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int, UInt32

from jaxbench import philox, prng
from jaxbench.sample import OrdinaryDraw
from jaxbench.watermark import definition, vllm_prf
from jaxbench.watermark.config import ContextRule
from jaxbench.watermark.definition import CONTEXT_SITE, FEISTEL_ROUNDS, MIN_SITE, MIX_MULTIPLIERS, NO_TOKEN, SELF_SITE

Halves = tuple[Array, Array]
Lanes = tuple[Array, Array, Array, Array]


def halves(key: UInt32[Array, "B 2"], ndim: int) -> Halves:
    """Return the low and the high word of each row's key, shaped [B 1 ..] with ndim axes."""
    shape = (key.shape[0],) + (1,) * (ndim - 1)
    return key[:, 0].reshape(shape), key[:, 1].reshape(shape)


def _philox(counter: tuple[Any, ...], key: Halves) -> Lanes:
    """Return the four words of each counter, whose arrays have the key's rank and whose constants are integers."""
    ones = (1,) * key[0].ndim
    words = (c if isinstance(c, Array) else jnp.full(ones, c, jnp.uint32) for c in counter)
    return prng.philox4x32(tuple(words), key)


def _pick(words: Lanes, tokens: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Return word token & 3 of each block."""
    place = tokens & 3
    lower = jnp.where(place == 1, words[1], words[0])
    return jnp.where(place >= 2, jnp.where(place == 3, words[3], words[2]), lower)


# Contexts to seeds


def seed_of_context(contexts: Int[Array, "*shape n"], key: Halves) -> UInt32[Array, "*shape 2"]:
    """Return the seed of contexts, oldest token first: a chain of Philox blocks over four tokens each."""
    contexts = contexts.astype(jnp.uint32)
    key = (key[0], key[1] ^ CONTEXT_SITE)
    words: Any = (jnp.zeros_like(key[0]),) * 4
    for start in range(0, contexts.shape[-1], 4):
        block = [
            contexts[..., start + i] if start + i < contexts.shape[-1] else jnp.full_like(key[0], NO_TOKEN)
            for i in range(4)
        ]
        words = _philox(tuple(b ^ w for b, w in zip(block, words)), key)
    return jnp.stack(jnp.broadcast_arrays(words[0], words[1]), axis=-1)


def minimum_token(contexts: Int[Array, "*shape n"], key: Halves) -> UInt32[Array, "*shape"]:
    """Return the one token of each context whose (hash, id) is the smallest."""
    contexts = contexts.astype(jnp.uint32)
    hashes = _philox((contexts, 0, 0, MIN_SITE), (key[0][..., None], key[1][..., None]))[0]
    least = jnp.min(hashes, axis=-1, keepdims=True)
    return jnp.min(jnp.where(hashes == least, contexts, jnp.uint32(NO_TOKEN)), axis=-1)


def pair_words(context_tokens: Array, candidates: Array, key: Halves) -> UInt32[Array, "*shape"]:
    """Return P(x, v), the word of context token x and candidate v (arrays that broadcast), of the rule `self`."""
    candidates = candidates.astype(jnp.uint32)
    return _pick(_philox((candidates >> 2, context_tokens.astype(jnp.uint32), 0, SELF_SITE), key), candidates)


def self_seeds(contexts: Array, candidates: Array, key: Halves) -> UInt32[Array, "*shape 2"]:
    """Return the seed of each candidate [..] after its context [.. h - 1]: the least P over both, and 0."""
    least = pair_words(candidates, candidates, key)
    for i in range(contexts.shape[-1]):
        least = jnp.minimum(least, pair_words(contexts[..., i], candidates, key))
    return jnp.stack([least, jnp.zeros_like(least)], axis=-1)


def windows(tokens: Int[Array, "B T"], length: int, *, fill: int = 0) -> Int[Array, "B T n"]:
    """Return the `length` tokens before every position; places before the text hold `fill`."""
    padded = jnp.pad(tokens, ((0, 0), (length, 0)), constant_values=fill)
    return jnp.stack([padded[:, i : i + tokens.shape[1]] for i in range(length)], axis=-1)


def seeds_after(
    rule: ContextRule, key: Halves, contexts: Int[Array, "*shape n"], candidates: Int[Array, "*shape"]
) -> UInt32[Array, "*shape 2"]:
    """Return the seed that contexts give; only the rule `self` looks at the candidates."""
    if rule.kind == "self":
        return self_seeds(contexts, candidates, key)
    if rule.kind == "skip":
        contexts = contexts[..., :1]
    if rule.kind == "min":
        contexts = minimum_token(contexts, key)[..., None]
    return seed_of_context(contexts, key)


def context_seeds(rule: ContextRule, key: Halves, tokens: Int[Array, "B T"]) -> UInt32[Array, "B T 2"]:
    """Return the seed at every position; with fewer than rule.length tokens before it, it has no meaning."""
    if rule.length == 0:
        return self_seeds(jnp.zeros((*tokens.shape, 0), jnp.uint32), tokens, key)
    return seeds_after(rule, key, windows(tokens, rule.length), tokens)


# Seeds to words


def token_words(
    scheme: Any, key: Halves, seeds: UInt32[Array, "*shape 2"], tokens: Array, *, vocab_size: int, payload: Any = 0
) -> UInt32[Array, "*shape"]:
    """Return the word of each token at its seed; dip: its position in the keyed order, on top."""
    if scheme.scheme == "dip":
        bits = definition.order_bits(vocab_size)
        keys = round_keys(key, seeds)
        return permute(tokens.astype(jnp.uint32), keys, bits) << (32 - bits)
    shifted = tokens.astype(jnp.uint32)
    if not isinstance(payload, int) or payload:
        shifted = (shifted + jnp.asarray(payload).astype(jnp.uint32)) % vocab_size
    return _pick(_philox((shifted >> 2, seeds[..., 0], seeds[..., 1], definition.site_of(scheme)), key), shifted)


def lanes(key: Halves, seeds: UInt32[Array, "B 2"], *, site: int, num_elements: int) -> Lanes:
    """Return the words of tokens 0..num_elements-1 at each row's seed, in lanes."""
    return _philox((_blocks(num_elements), seeds[:, :1], seeds[:, 1:], site), key)


class Stream(NamedTuple):
    """Where the words of each row come from: the arguments of lanes, and by how far they are shifted."""

    key: Halves  # [B 1]
    seeds: UInt32[Array, "B S"]
    site: UInt32[Array, "B 1"]
    payload: Int[Array, " B"] | None

    def where(self, is_active: Bool[Array, " B"], sample: OrdinaryDraw) -> Stream:
        """Return this stream for active rows, that of their ordinary draw for others."""
        rows, chosen = sample.row_ids.astype(jnp.uint32), is_active[:, None]
        plain = jnp.stack([rows, jnp.full_like(rows, sample.step)], axis=-1)
        return Stream(
            tuple(jnp.where(chosen, keyed, ordinary) for keyed, ordinary in zip(self.key, sample.key)),
            jnp.where(chosen, self.seeds, plain),
            jnp.where(chosen, self.site, jnp.uint32(philox.site_id("sample"))),
            None if self.payload is None else jnp.where(is_active, self.payload, 0),
        )


def block_words(
    key: Halves, seeds: UInt32[Array, "B 2"], blocks: Int[Array, "B n"], *, size: int, site: int
) -> UInt32[Array, "B C"]:
    """Return the words of the tokens size b .. size b + size - 1 of each block b in turn; size is a multiple of 4."""
    counters = blocks.astype(jnp.uint32)[:, :, None] * jnp.uint32(size // 4) + _blocks(size)[:, None, :]
    words = _philox((counters.reshape(blocks.shape[0], -1), seeds[:, :1], seeds[:, 1:], site), key)
    return interleave(words, blocks.shape[1] * size)


def self_lanes(
    key: Halves, contexts: Int[Array, "B n"], own: UInt32[Array, "B 4 C"], *, site: int, num_elements: int
) -> Lanes:
    """Return the words of all candidates under the rule `self`, in lanes; own[:, j] is lane j of P(v, v)."""
    blocks, least = _blocks(num_elements), [own[:, j] for j in range(4)]
    for i in range(contexts.shape[1]):
        pairs = _philox((blocks, contexts[:, i : i + 1].astype(jnp.uint32), 0, SELF_SITE), key)
        least = [jnp.minimum(one, other) for one, other in zip(least, pairs)]
    words = (_philox((blocks, least[j], 0, site), key)[j] for j in range(4))
    return tuple(words)


def own_lanes(key: Halves, *, num_elements: int) -> UInt32[Array, "B 4 C"]:
    """Return P(v, v) of all tokens v in lanes: what self_lanes needs of a key, whatever the context."""
    tokens = jnp.arange(4 * -(-num_elements // 4), dtype=jnp.uint32)[None, :]
    return pair_words(tokens, tokens, key).reshape(-1, tokens.shape[1] // 4, 4).swapaxes(1, 2)


def interleave(words: tuple[Array, ...], num_elements: int) -> Array:
    """Return lanes as one array [B V]."""
    stacked = jnp.stack(words, axis=-1)
    return stacked.reshape(stacked.shape[0], -1)[:, :num_elements]


def _blocks(num_elements: int) -> UInt32[Array, "1 C"]:
    return jnp.arange(-(-num_elements // 4), dtype=jnp.uint32)[None, :]


# vLLM's function


def vllm_state(contexts: Int[Array, "*shape h"], key: Halves) -> UInt32[Array, "*shape 4"]:
    """Return the state of contexts, -1 where the text has not started (see vllm_prf.py)."""
    contexts, width = contexts.astype(jnp.uint32), contexts.shape[-1]
    words: Any = tuple(jnp.full_like(key[0], word) for word in (vllm_prf.CONTEXT_DOMAIN, width, 0, 0))
    for offset in range(0, width, 4):
        block = [
            contexts[..., offset + i] if offset + i < width else jnp.full_like(key[0], philox.MASK32 - i)
            for i in range(4)
        ]
        words = _philox(tuple(w ^ b for w, b in zip(words, block)), (key[0] ^ offset, key[1]))
    return jnp.stack(jnp.broadcast_arrays(*words), axis=-1)


def vllm_token_words(states: UInt32[Array, "*shape 4"], tokens: Array, key: Halves) -> UInt32[Array, "*shape"]:
    """Return the word of each token at its context's state."""
    tokens = tokens.astype(jnp.uint32)
    pair = (key[0] ^ states[..., 3], key[1] ^ jnp.uint32(vllm_prf.TOKEN_DOMAIN))
    return _pick(_philox((tokens >> 2, states[..., 0], states[..., 1], states[..., 2]), pair), tokens)


def vllm_lanes(states: UInt32[Array, "B 4"], key: Halves, *, num_elements: int) -> Lanes:
    """Return the words of tokens 0..num_elements-1 at each row's state, in lanes."""
    pair = (key[0] ^ states[:, 3:], key[1] ^ jnp.uint32(vllm_prf.TOKEN_DOMAIN))
    return _philox((_blocks(num_elements), states[:, :1], states[:, 1:2], states[:, 2:3]), pair)


# The keyed order of dip


def round_keys(key: Halves, seeds: UInt32[Array, "*shape 2"]) -> UInt32[Array, "*shape 8"]:
    """Return the round keys of seeds: two Philox blocks."""
    site = philox.site_id("watermark/dip")
    blocks = [_philox((i, seeds[..., 0], seeds[..., 1], site), key) for i in range(2)]
    return jnp.stack(jnp.broadcast_arrays(*blocks[0], *blocks[1]), axis=-1)


def mix(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Return the 32-bit finaliser of MurmurHash3 (Appleby 2011), a bijection."""
    x = (x ^ (x >> 16)) * jnp.uint32(MIX_MULTIPLIERS[0])
    x = (x ^ (x >> 13)) * jnp.uint32(MIX_MULTIPLIERS[1])
    return x ^ (x >> 16)


def permute(values: Array, keys: UInt32[Array, "*shape 8"], bits: int) -> UInt32[Array, "*shape"]:
    """Return the image of values in [0, 2**bits) under the Feistel network with these round keys."""
    half, mask = bits // 2, 2 ** (bits // 2) - 1
    left, right = values >> half, values & mask
    for i in range(FEISTEL_ROUNDS):
        left, right = right, left ^ (mix(right ^ keys[..., i]) >> (32 - half))
    return (left << half) | right


def unpermute(values: Array, keys: UInt32[Array, "*shape 8"], bits: int) -> UInt32[Array, "*shape"]:
    """Return the values whose image under `permute` is given."""
    half, mask = bits // 2, 2 ** (bits // 2) - 1
    left, right = values >> half, values & mask
    for i in reversed(range(FEISTEL_ROUNDS)):
        left, right = right ^ (mix(left ^ keys[..., i]) >> (32 - half)), left
    return (left << half) | right
