"""The pseudo-random functions shared by all schemes, in JAX, bit for bit those of reference.py. Twin: torch_ref.

A key is a pair (low, high) of uint32 arrays that broadcast over the rows and have the rank of the other operand. Words
of the whole vocabulary are four lanes [B ceil(V / 4)]: lane j holds tokens j, j + 4, j + 8, .. (one Philox block gives
four words).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int, UInt32

from jaxbench import prng
from jaxbench.watermark import reference
from jaxbench.watermark.reference import CONTEXT_SITE, MIN_SITE, NO_TOKEN, SELF_SITE, ContextRule
from jaxbench.watermark.schemes.contract import Scheme

Halves = tuple[Array, Array]
Lanes = tuple[Array, Array, Array, Array]
Words = UInt32[Array, "T B"]
Seeds = UInt32[Array, "T B S"]  # S words; a seed and a token decide a word


class Text(NamedTuple):
    """Texts of a batch as detection reads them; texts are columns (detect.py says why)."""

    tokens: UInt32[Array, "T B"]
    prompt: Int[Array, " B"]  # prompt tokens of each text, before the marked ones
    payload: UInt32[Array, "1 B"]
    fixed_lists: tuple[Bool[Array, "K V"], Int[Array, " B"]] | None  # the keys' lists, and each text's index


def random_blocks(counter: tuple[Any, ...], key: Halves) -> Lanes:
    """Return the four words of each counter; its arrays have the key's rank, its constants are integers."""
    ones = (1,) * key[0].ndim
    words = (c if isinstance(c, Array) else jnp.full(ones, c, jnp.uint32) for c in counter)
    return prng.philox4x32(tuple(words), key)


def pick_word(words: Lanes, tokens: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Return word `token & 3` of each block."""
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
        words = random_blocks(tuple(b ^ w for b, w in zip(block, words)), key)
    return jnp.stack(jnp.broadcast_arrays(words[0], words[1]), axis=-1)


def minimum_token(contexts: Int[Array, "*shape n"], key: Halves) -> UInt32[Array, "*shape"]:
    """Return the token of each context with the smallest (hash, id)."""
    contexts = contexts.astype(jnp.uint32)
    hashes = random_blocks((contexts, 0, 0, MIN_SITE), (key[0][..., None], key[1][..., None]))[0]
    least = jnp.min(hashes, axis=-1, keepdims=True)
    return jnp.min(jnp.where(hashes == least, contexts, jnp.uint32(NO_TOKEN)), axis=-1)


def pair_words(context_tokens: Array, candidates: Array, key: Halves) -> UInt32[Array, "*shape"]:
    """Return P(x, v), the rule `self`'s word of context token x and candidate v (arrays that broadcast)."""
    candidates = candidates.astype(jnp.uint32)
    return pick_word(random_blocks((candidates >> 2, context_tokens.astype(jnp.uint32), 0, SELF_SITE), key), candidates)


def self_seeds(contexts: Array, candidates: Array, key: Halves) -> UInt32[Array, "*shape 2"]:
    """Return each candidate's [..] seed (m, 0) after its context [.. h - 1]; m = min P over context and candidate."""
    least = pair_words(candidates, candidates, key)
    for i in range(contexts.shape[-1]):
        least = jnp.minimum(least, pair_words(contexts[..., i], candidates, key))
    return jnp.stack([least, jnp.zeros_like(least)], axis=-1)


def seeds_after(
    rule: ContextRule, key: Halves, contexts: Int[Array, "*shape n"], candidates: Int[Array, "*shape"]
) -> UInt32[Array, "*shape 2"]:
    """Return the seeds of contexts; only the rule `self` uses the candidates."""
    if rule.kind == "self":
        return self_seeds(contexts, candidates, key)
    if rule.kind == "skip":
        contexts = contexts[..., :1]
    if rule.kind == "min":
        contexts = minimum_token(contexts, key)[..., None]
    return seed_of_context(contexts, key)


def earlier_tokens(tokens: UInt32[Array, "T B"], length: int) -> UInt32[Array, "T B n"]:
    """Return the `length` tokens before each position of texts, oldest first, 0 before the start.

    Texts are columns here (detect.py says why).
    """
    padded = jnp.pad(tokens, ((length, 0), (0, 0)))
    earlier = [padded[i : i + tokens.shape[0]] for i in range(length)]
    return jnp.stack(earlier, axis=-1) if earlier else jnp.zeros((*tokens.shape, 0), jnp.uint32)


def text_seeds(rule: ContextRule, key: Halves, tokens: UInt32[Array, "T B"]) -> UInt32[Array, "T B 2"]:
    """Return the seed at every position of texts; undefined where fewer than rule.length tokens precede it."""
    return seeds_after(rule, key, earlier_tokens(tokens, rule.length), tokens)


# Seeds to words


def token_words(
    scheme: Scheme, key: Halves, seeds: UInt32[Array, "*shape 2"], tokens: Array, *, vocab_size: int, payload: Any = 0
) -> UInt32[Array, "*shape"]:
    """Return the word of each token under its seed; with a payload, the word of token (token + payload) mod V."""
    shifted = tokens.astype(jnp.uint32)
    if not isinstance(payload, int) or payload:
        shifted = (shifted + jnp.asarray(payload).astype(jnp.uint32)) % vocab_size
    return pick_word(
        random_blocks((shifted >> 2, seeds[..., 0], seeds[..., 1], reference.site_of(scheme)), key), shifted
    )


def lanes(key: Halves, seeds: UInt32[Array, "B 2"], *, site: int, num_elements: int) -> Lanes:
    """Return the words of tokens 0..num_elements-1 under each row's seed, in lanes."""
    return random_blocks((block_numbers(num_elements), seeds[:, :1], seeds[:, 1:], site), key)


def interleave(words: tuple[Array, ...], num_elements: int) -> Array:
    """Interleave the lanes into one array [B V]."""
    stacked = jnp.stack(words, axis=-1)
    return stacked.reshape(stacked.shape[0], -1)[:, :num_elements]


def block_numbers(num_elements: int) -> UInt32[Array, "1 C"]:
    """Return the numbers of the Philox blocks that hold tokens 0..num_elements-1, four each."""
    return jnp.arange(-(-num_elements // 4), dtype=jnp.uint32)[None, :]


def shift(values: Array, payload: Int[Array, " B"]) -> Array:
    """Shift values [B V] by the payload: token v gets the value of token (v + payload) mod V."""
    doubled = jnp.concatenate([values, values], axis=1)
    return jax.vmap(lambda row, start: lax.dynamic_slice(row, (start,), values.shape[1:]))(doubled, payload)
