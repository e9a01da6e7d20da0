"""The watermarks' pseudo-random functions and evidence in numpy: the reference of every backend (S file).

Notation: context [.. n] are the n tokens before a position, oldest first; a seed is two words that a context and a key
give; a word is 32 random bits of a (key, seed, token). Twins of the parts that run on a device: prf.py, detect.py.

A key argument is one Key, or one for each row of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench import philox
from jaxbench.watermark import vllm_prf
from jaxbench.watermark.config import ContextRule, context_length
from jaxbench.watermark.keys import Key

CONTEXT_SITE, MIN_SITE, SELF_SITE = (philox.site_id(f"watermark/{name}") for name in ("context", "min", "self"))
NO_TOKEN = 0xFFFFFFFF  # fills the last block of a context
RED = 0xFFFFFFFF  # the word of a token that is not on a list; green tokens have 0
FEISTEL_ROUNDS = 8
HEAD_BLOCK = 32  # consecutive ids that enter a tournament together
MIX_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
Halves = tuple[np.ndarray, np.ndarray]


class Evidence(NamedTuple):
    """What a text says about a key, position by position."""

    words: np.ndarray  # uint32 [B T], the word of each token; lists: 0 = green, RED = not
    scored: np.ndarray  # bool [B T], True at the first position of each exact (key, seed, token)
    second_words: np.ndarray | None = None  # uint32 [B T], under the second key of a dual-key scheme


def site_of(scheme: Any) -> int:
    """Return the number of a scheme's random site."""
    return philox.site_id(f"watermark/{scheme.scheme}")


def halves(key: Key | Sequence[Key], ndim: int) -> Halves:
    """Return low and high words of one key or of one a row, shaped [B or 1, 1, ..] with ndim axes."""
    keys = [key] if isinstance(key, Key) else list(key)
    pairs = np.array([k.halves for k in keys], np.uint32).reshape(-1, 2)
    shape = (len(keys),) + (1,) * (ndim - 1)
    return pairs[:, 0].reshape(shape), pairs[:, 1].reshape(shape)


def generation_keys(scheme: Any, key: Key) -> tuple[Key, Key]:
    """Return the first and second key that a scheme draws with; they differ for a dual-key scheme only."""
    if getattr(scheme, "dual_key_alpha", 0.0) > 0:
        return key.derive("key_a"), key.derive("key_b")
    return key, key


# Contexts to seeds


def seed_of_context(contexts: np.ndarray, key: Halves) -> np.ndarray:
    """Return the seed [.. 2] (uint32) of contexts [.. n], 1 <= n: a chain of Philox blocks over four tokens each."""
    contexts = np.asarray(contexts).astype(np.uint32)
    low, high = key
    words: Sequence[Any] = (np.uint32(0),) * 4
    for start in range(0, contexts.shape[-1], 4):
        block = [contexts[..., start + i] if start + i < contexts.shape[-1] else np.uint32(NO_TOKEN) for i in range(4)]
        words = philox.philox4x32(tuple(b ^ w for b, w in zip(block, words)), (low, high ^ np.uint32(CONTEXT_SITE)))
    return np.stack(np.broadcast_arrays(words[0], words[1]), axis=-1)


def minimum_token(contexts: np.ndarray, key: Halves) -> np.ndarray:
    """Return the one token [..] of each context [.. n] whose (hash, id) is the smallest."""
    contexts = np.asarray(contexts).astype(np.uint32)
    low, high = (half[..., None] for half in key)
    hashes = philox.philox4x32((contexts, 0, 0, MIN_SITE), (low, high))[0]
    return (((hashes.astype(np.uint64) << np.uint64(32)) | contexts).min(axis=-1) & np.uint64(NO_TOKEN)).astype(
        np.uint32
    )


def pair_words(context_tokens: np.ndarray, candidates: np.ndarray, key: Halves) -> np.ndarray:
    """Return P(x, v), the word of context token x and candidate v (arrays that broadcast), of the rule `self`."""
    candidates = np.asarray(candidates).astype(np.uint32)
    counter = (candidates >> 2, np.asarray(context_tokens).astype(np.uint32), 0, SELF_SITE)
    return _pick(philox.philox4x32(counter, key), candidates)


def self_seeds(contexts: np.ndarray, candidates: np.ndarray, key: Halves) -> np.ndarray:
    """Return the seed [.. 2] of each candidate [..] after its context [.. h - 1]: the least P over both, and 0."""
    least = pair_words(candidates, candidates, key)
    for i in range(contexts.shape[-1]):
        least = np.minimum(least, pair_words(contexts[..., i], candidates, key))
    return np.stack([least, np.zeros_like(least)], axis=-1)


def windows(tokens: np.ndarray, length: int, *, fill: int = 0) -> np.ndarray:
    """Return the contexts [B T n] of every position of tokens [B T]; places before the text hold `fill`."""
    padded = np.pad(tokens, ((0, 0), (length, 0)), constant_values=fill)
    index = np.arange(tokens.shape[1])[:, None] + np.arange(length)[None, :]
    return padded[:, index]


def context_seeds(rule: ContextRule, key: Key | Sequence[Key], tokens: np.ndarray) -> np.ndarray:
    """Return the seed [B T 2] (uint32) at every position of tokens [B T]; fewer than rule.length tokens: no meaning."""
    pair, contexts = halves(key, 2), windows(tokens, rule.length)
    return _seeds(rule, pair, contexts, tokens)


def _seeds(rule: ContextRule, pair: Halves, contexts: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    if rule.kind == "self":
        return self_seeds(contexts, candidates, pair)
    if rule.kind == "skip":
        contexts = contexts[..., :1]
    if rule.kind == "min":
        contexts = minimum_token(contexts, pair)[..., None]
    return seed_of_context(contexts, pair)


# Seeds to words


def token_words(
    scheme: Any,
    key: Halves,
    seeds: np.ndarray,
    tokens: np.ndarray,
    *,
    vocab_size: int,
    payload: int | np.ndarray = 0,
) -> np.ndarray:
    """Return the word (uint32) of each token [..] at its seed [.. 2]; dip: its position in the keyed order, on top."""
    if scheme.scheme == "dip":
        bits = order_bits(vocab_size)
        positions = permute(np.asarray(tokens).astype(np.uint32), round_keys(key, seeds), bits)
        return positions << np.uint32(32 - bits)
    shifted = (np.asarray(tokens).astype(np.int64) + payload) % vocab_size
    shifted = shifted.astype(np.uint32)
    counter = (shifted >> 2, seeds[..., 0], seeds[..., 1], site_of(scheme))
    return _pick(philox.philox4x32(counter, key), shifted)


def vocabulary_words(
    scheme: Any, key: Key | Sequence[Key], contexts: np.ndarray, *, vocab_size: int, payload: int | np.ndarray = 0
) -> np.ndarray:
    """Return the words [B V] of all tokens after contexts [B n], n tokens as the scheme's rule wants (unigram: any)."""
    contexts = np.asarray(contexts)
    pair = halves(key, 2)
    candidates = np.broadcast_to(np.arange(vocab_size, dtype=np.uint32), (contexts.shape[0], vocab_size))
    if scheme.scheme == "gumbel" and scheme.prf == "vllm":
        return vllm_prf.token_words(vllm_prf.state(contexts[:, None], pair), candidates, pair)
    if scheme.scheme == "unigram":
        seeds = np.zeros((contexts.shape[0], 1, 2), np.uint32)
    else:
        seeds = _seeds(scheme.context, pair, contexts[:, None], candidates)
    payload = np.asarray(payload).reshape(-1, 1)
    return token_words(scheme, pair, seeds, candidates, vocab_size=vocab_size, payload=payload)


def green_threshold(gamma: float) -> int:
    """Return the number that a green token's word lies below."""
    return int(gamma * 2**32)


def green_list(
    scheme: Any, key: Key | Sequence[Key], contexts: np.ndarray, *, vocab_size: int, payload: int | np.ndarray = 0
) -> np.ndarray:
    """Return which tokens are green after contexts [B n], bool [B V]: kgw, unigram, and dip's upper half."""
    if scheme.scheme == "unigram":
        keys = [key] * len(contexts) if isinstance(key, Key) else key
        return np.stack([unigram_list(scheme.gamma, k, vocab_size) for k in keys])
    words = vocabulary_words(scheme, key, contexts, vocab_size=vocab_size, payload=payload)
    return is_green(scheme, words)


def is_green(scheme: Any, words: np.ndarray) -> np.ndarray:
    """Return which words (of Evidence) are green, bool.

    Raises:
      ValueError: the scheme has no green tokens.
    """
    if scheme.scheme == "kgw":
        return words < green_threshold(scheme.gamma)
    if scheme.scheme == "dip":
        return words >= np.uint32(2**31)
    if scheme.scheme in ("unigram", "kgw_markllm", "kgw_transformers"):
        return words == 0
    raise ValueError(f"green lists: scheme {scheme.scheme} has none")


def unigram_list(gamma: float, key: Key, vocab_size: int) -> np.ndarray:
    """Return the green list bool [V] of a key: the floor(gamma V) tokens with the smallest (word, id)."""
    low, high = key.halves
    tokens = np.arange(vocab_size, dtype=np.uint32)
    words = _pick(philox.philox4x32((tokens >> 2, 0, 0, philox.site_id("watermark/unigram")), (low, high)), tokens)
    green = np.zeros(vocab_size, bool)
    green[np.argsort(words, kind="stable")[: int(gamma * vocab_size)]] = True
    return green


def _pick(words: tuple[np.ndarray, ...], tokens: np.ndarray) -> np.ndarray:
    """Return word token & 3 of each block."""
    place = tokens & np.uint32(3)
    lower = np.where(place == 1, words[1], words[0])
    return np.where(place >= 2, np.where(place == 3, words[3], words[2]), lower)


# The keyed order of dip: a Feistel network


def order_bits(vocab_size: int) -> int:
    """Return b, the least even number with 2**b >= vocab_size; the order is a permutation of [0, 2**b)."""
    bits = max(2, (vocab_size - 1).bit_length())
    return bits + bits % 2


def round_keys(key: Halves, seeds: np.ndarray) -> np.ndarray:
    """Return the round keys [.. 8] (uint32) of seeds [.. 2]: two Philox blocks."""
    site = philox.site_id("watermark/dip")
    blocks = [philox.philox4x32((np.uint32(i), seeds[..., 0], seeds[..., 1], site), key) for i in range(2)]
    return np.stack(np.broadcast_arrays(*blocks[0], *blocks[1]), axis=-1)


def mix(x: np.ndarray) -> np.ndarray:
    """Return the 32-bit finaliser of MurmurHash3 (Appleby 2011), a bijection of uint32 values."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(MIX_MULTIPLIERS[0])
    x = (x ^ (x >> np.uint32(13))) * np.uint32(MIX_MULTIPLIERS[1])
    return x ^ (x >> np.uint32(16))


def permute(values: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """Return the image of values [..] in [0, 2**bits) under the Feistel network with round keys [.. 8]."""
    half, mask = np.uint32(bits // 2), np.uint32(2 ** (bits // 2) - 1)
    left, right = values >> half, values & mask
    for i in range(FEISTEL_ROUNDS):
        left, right = right, left ^ (mix(right ^ keys[..., i]) >> np.uint32(32 - bits // 2))
    return (left << half) | right


def unpermute(values: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """Return the values whose image under `permute` is given."""
    half, mask = np.uint32(bits // 2), np.uint32(2 ** (bits // 2) - 1)
    left, right = values >> half, values & mask
    for i in reversed(range(FEISTEL_ROUNDS)):
        left, right = right ^ (mix(left ^ keys[..., i]) >> np.uint32(32 - bits // 2)), left
    return (left << half) | right


# Reweighting of one distribution, in float64


def tournament(probabilities: np.ndarray, words: np.ndarray, *, depth: int) -> np.ndarray:
    """Return SynthID's distribution [.. V]: `depth` layers of p (1 + g - sum(g p)), g = bit i of the words [.. V]."""
    p = probabilities.astype(np.float64)
    for i in range(depth):
        g = (words >> np.uint32(i)) & np.uint32(1)
        p = p * (1 + g - (g * p).sum(axis=-1, keepdims=True))
    return p


def head(logits: np.ndarray, *, candidates: int) -> np.ndarray:
    """Return which tokens play a tournament, bool [.. V]: the likeliest blocks of HEAD_BLOCK consecutive ids.

    The candidates // HEAD_BLOCK blocks with the largest largest logit, the lower id where two are equal. A tournament
    among them leaves their mass as it is, so the distribution stays unchanged on average over keys, and other tokens
    keep their probability in every text.
    """
    size = logits.shape[-1]
    short = -size % HEAD_BLOCK
    padded = np.concatenate([logits, np.full((*logits.shape[:-1], short), -np.inf)], axis=-1)
    largest = padded.reshape(*logits.shape[:-1], -1, HEAD_BLOCK).max(axis=-1)
    chosen = np.argsort(-largest, axis=-1, kind="stable")[..., : candidates // HEAD_BLOCK]
    is_chosen = np.zeros(largest.shape, bool)
    np.put_along_axis(is_chosen, chosen, True, axis=-1)
    return np.repeat(is_chosen, HEAD_BLOCK, axis=-1)[..., :size]


def reweight(probabilities: np.ndarray, positions: np.ndarray, *, alpha: float) -> np.ndarray:
    """Return DiP's distribution [.. V]; positions [.. V] give the order of the tokens (Wu et al. 2023, section 4)."""
    order = np.argsort(positions, axis=-1)
    mass = np.take_along_axis(probabilities.astype(np.float64), order, axis=-1)
    end = np.cumsum(mass, axis=-1)
    start = end - mass
    taken = [np.maximum(x - alpha, 0) + np.maximum(x - (1 - alpha), 0) for x in (start, end)]
    out = np.zeros_like(mass)
    np.put_along_axis(out, order, taken[1] - taken[0], axis=-1)
    return out


# Evidence


def evidence(
    scheme: Any,
    key: Key | Sequence[Key],
    tokens: np.ndarray,
    lengths: np.ndarray,
    *,
    vocab_size: int,
    prompt_lengths: np.ndarray | int | None = None,
    payload: int = 0,
    tables: Any = None,
    deduplicate: bool = True,
) -> Evidence:
    """Return the words of tokens [B T] and which of them are scored.

    A position is scored when it lies in the text and after the prompt, has a full context (prompt tokens serve as
    context; not for vLLM's function, whose contexts start with the continuation), and its exact (key, seed, token) did
    not occur at an earlier scored position.

    Args:
      lengths: tokens of each row [B]; what lies behind is ignored.
      prompt_lengths: tokens of each row that are not scored.
      tables: the tables.Tables of kgw_markllm and kgw_transformers; other schemes need none.
      deduplicate: False scores repeated positions too, which no test here allows for: to show what that costs.

    Raises:
      ValueError: a token lies outside the vocabulary, or a scheme of lists comes without its tables.
    """
    tokens, lengths = np.asarray(tokens), np.asarray(lengths)
    prompt = np.broadcast_to(0 if prompt_lengths is None else prompt_lengths, lengths.shape)
    place = np.arange(tokens.shape[1])[None, :]
    in_text = place < lengths[:, None]
    tokens = np.where(in_text, tokens, 0)
    check_tokens(tokens, vocab_size)
    valid = in_text & (place >= np.maximum(prompt, context_length(scheme))[:, None])
    if scheme.scheme in ("kgw_markllm", "kgw_transformers"):
        if tables is None:
            raise ValueError(f"evidence: scheme {scheme.scheme} needs the tables of its green lists, got {tables}")
        observed = tables.observe(tokens, lengths)
        words, seeds = np.where(observed.is_green, np.uint32(0), np.uint32(RED)), observed.seeds[..., None]
        valid &= observed.has_context
        return Evidence(words, is_first(seeds, tokens, valid) if deduplicate else valid)
    first, second = _dual(scheme, key)
    words, seeds = _observed(scheme, first, tokens, prompt, vocab_size, payload)
    scored = is_first(seeds, tokens, valid) if deduplicate else valid
    if second is None:
        return Evidence(words, scored)
    return Evidence(words, scored, _observed(scheme, second, tokens, prompt, vocab_size, payload)[0])


def check_tokens(tokens: np.ndarray, vocab_size: int) -> None:
    """Raise a ValueError that names the first token outside [0, vocab_size)."""
    bad = (tokens < 0) | (tokens >= vocab_size)
    if bad.any():
        row, at = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"evidence: token {tokens[row, at]} (row {row}, position {at}) is outside [0, {vocab_size}); "
            "the detector needs the vocabulary size of the model that wrote the text"
        )


def is_first(seeds: np.ndarray, tokens: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Return True at the first valid position of each distinct (seed [B T S], token [B T]) of a row, bool [B T]."""
    columns = [tokens, *np.moveaxis(seeds, -1, 0), ~valid]
    order = np.lexsort(np.broadcast_arrays(*columns), axis=-1)  # stable: equal entries keep the text's order
    repeated = np.ones((tokens.shape[0], max(tokens.shape[1] - 1, 0)), bool)
    for column in columns:
        ordered = np.take_along_axis(np.broadcast_to(column, tokens.shape), order, axis=-1)
        repeated &= ordered[:, 1:] == ordered[:, :-1]
    first = np.ones(tokens.shape, bool)
    np.put_along_axis(first, order[:, 1:], ~repeated, axis=-1)
    return first & valid


def _dual(scheme: Any, key: Key | Sequence[Key]) -> tuple[Any, Any]:
    if getattr(scheme, "dual_key_alpha", 0.0) == 0.0:
        return key, None
    pairs = [generation_keys(scheme, k) for k in ([key] if isinstance(key, Key) else key)]
    return [first for first, _ in pairs], [second for _, second in pairs]


def _observed(scheme, key, tokens, prompt, vocab_size, payload) -> tuple[np.ndarray, np.ndarray]:
    """Return words [B T] and seeds [B T S] of the tokens of a text."""
    pair = halves(key, 2)
    if scheme.scheme == "gumbel" and scheme.prf == "vllm":
        width = scheme.context.width
        contexts = windows(tokens, width, fill=-1)
        place = np.arange(tokens.shape[1])[:, None] + np.arange(-width, 0)[None, :]
        states = vllm_prf.state(np.where(place[None] >= prompt[:, None, None], contexts, -1), pair)
        return vllm_prf.token_words(states, tokens, pair), states
    if scheme.scheme == "unigram":
        keys = [key] if isinstance(key, Key) else key
        lists = np.stack([unigram_list(scheme.gamma, k, vocab_size) for k in keys])
        green = lists[np.arange(len(tokens))[:, None] % len(lists), tokens]
        return np.where(green, np.uint32(0), np.uint32(RED)), np.zeros((*tokens.shape, 1), np.uint32)
    seeds = context_seeds(scheme.context, key, tokens)
    return token_words(scheme, pair, seeds, tokens, vocab_size=vocab_size, payload=payload), seeds
