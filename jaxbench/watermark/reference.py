"""Shared by all schemes, in numpy: pseudo-random functions and the evidence of a text (S file).

The reference for every backend; code specific to one scheme is in schemes/. Notation: a context [.. n] is the n tokens
before a position, oldest first; a seed is two words computed from a context and a key; a word is the 32 random bits of
a (key, seed, token). A key argument is one Key, or one per row of the batch. Device twin: prf.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt32
from pydantic import Field

from jaxbench import philox
from jaxbench.config import Base
from jaxbench.watermark.keys import Key

CONTEXT_SITE, MIN_SITE, SELF_SITE = (philox.site_id(f"watermark/{name}") for name in ("context", "min", "self"))
INPUT_SITE, SEED_FACTOR = philox.site_id("watermark/inputs"), np.uint32(0x9E3779B1)  # any odd factor
NO_TOKEN = 0xFFFFFFFF  # fills the last block of a context
RED = 0xFFFFFFFF  # the word of a token that is not on a list; green tokens have 0
MAX_WIDTH = 8  # maximum tokens of context
Halves = tuple[np.ndarray, np.ndarray]
Keys = Key | Sequence[Key]  # one key, or one per row
Words = UInt32[np.ndarray, "B T"]
Seeds = Int[np.ndarray, "B T S"]  # S words; a seed and a token decide a word


class ContextRule(Base):
    """Which tokens before a position seed its pseudo-random function (`seeds_after` computes the seed)."""

    kind: Literal["left", "skip", "min", "self"] = "left"
    width: int = Field(default=1, ge=1, le=MAX_WIDTH)  # h, tokens; `self` counts the candidate among them

    @property
    def length(self) -> int:
        """Tokens that must precede a position for it to be marked and scored."""
        return self.width - 1 if self.kind == "self" else self.width


class Evidence(NamedTuple):
    """Evidence of texts about a key, per position."""

    words: UInt32[np.ndarray, "B T"]  # the word of each token; list schemes: 0 = green, RED = not
    scored: Bool[np.ndarray, "B T"]  # True at the first position of each exact (key, seed, token), of both keys
    second_words: UInt32[np.ndarray, "B T"] | None = None  # words under the second key of a dual-key scheme
    inputs: UInt32[np.ndarray, "B T"] | None = None  # for list schemes: the result of `inputs`


class Text(NamedTuple):
    """Texts as a scheme reads them."""

    tokens: Int[np.ndarray, "B T"]
    prompt: Int[np.ndarray, " B"]  # prompt tokens of each row, before the marked ones
    vocab_size: int
    payload: int | np.ndarray = 0  # the message, or one per row [B 1]
    green_lists: Any = None  # green_lists.GreenLists, for kgw_markllm and kgw_transformers


def site_of(scheme: Any) -> int:
    """Return the number of a scheme's random site, the fourth word of its Philox counters."""
    return philox.site_id(f"watermark/{scheme.scheme}")


def halves(key: Keys, ndim: int) -> Halves:
    """Return the low and high words (uint32) of one key or of one per row, shaped [B or 1, 1, ..] with ndim axes."""
    keys = [key] if isinstance(key, Key) else list(key)
    pairs = np.array([k.halves for k in keys], np.uint32).reshape(-1, 2)
    shape = (len(keys),) + (1,) * (ndim - 1)
    return pairs[:, 0].reshape(shape), pairs[:, 1].reshape(shape)


def is_dual_key(scheme: Any) -> bool:
    """Return whether a share `dual_key_alpha` of the steps uses a second key."""
    return getattr(scheme, "dual_key_alpha", 0.0) > 0


def has_seeds_of_each_key(scheme: Any) -> bool:
    """Return whether contexts with equal seeds under one key may differ under another: each key then repeats apart."""
    return scheme.context.kind == "min"


def generation_keys(scheme: Any, key: Key) -> tuple[Key, Key]:
    """Return the first and second key that a scheme draws with; they differ only for a dual-key scheme."""
    if is_dual_key(scheme):
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
    """Return the token [..] of each context [.. n] with the smallest (hash, id)."""
    contexts = np.asarray(contexts).astype(np.uint32)
    low, high = (half[..., None] for half in key)
    hashes = philox.philox4x32((contexts, 0, 0, MIN_SITE), (low, high))[0]
    return (((hashes.astype(np.uint64) << np.uint64(32)) | contexts).min(axis=-1) & np.uint64(NO_TOKEN)).astype(
        np.uint32
    )


def pair_words(context_tokens: np.ndarray, candidates: np.ndarray, key: Halves) -> np.ndarray:
    """Return P(x, v), the rule `self`'s word of context token x and candidate v (arrays that broadcast)."""
    candidates = np.asarray(candidates).astype(np.uint32)
    counter = (candidates >> 2, np.asarray(context_tokens).astype(np.uint32), 0, SELF_SITE)
    return pick_word(philox.philox4x32(counter, key), candidates)


def self_seeds(contexts: np.ndarray, candidates: np.ndarray, key: Halves) -> np.ndarray:
    """Return each candidate's [..] seed (m, 0) after its context [.. h - 1]; m = min P over context and candidate."""
    least = pair_words(candidates, candidates, key)
    for i in range(contexts.shape[-1]):
        least = np.minimum(least, pair_words(contexts[..., i], candidates, key))
    return np.stack([least, np.zeros_like(least)], axis=-1)


def windows(tokens: np.ndarray, length: int, *, fill: int = 0) -> np.ndarray:
    """Return the context [B T n] of every position of tokens [B T]; places before the text hold `fill`."""
    padded = np.pad(tokens, ((0, 0), (length, 0)), constant_values=fill)
    index = np.arange(tokens.shape[1])[:, None] + np.arange(length)[None, :]
    return padded[:, index]


def context_seeds(rule: ContextRule, key: Keys, tokens: np.ndarray) -> np.ndarray:
    """Return the seed [B T 2] (uint32) at every position of tokens [B T]; undefined before position rule.length."""
    return seeds_after(rule, halves(key, 2), windows(tokens, rule.length), tokens)


def seeds_after(rule: ContextRule, key: Halves, contexts: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Return the seeds [.. 2] (uint32) of contexts [.. n]; only the rule `self` uses the candidates [..]."""
    if rule.kind == "self":
        return self_seeds(contexts, candidates, key)
    if rule.kind == "skip":
        contexts = contexts[..., :1]
    if rule.kind == "min":
        contexts = minimum_token(contexts, key)[..., None]
    return seed_of_context(contexts, key)


# Seeds to words


def token_words(
    scheme: Any,
    key: Halves,
    seeds: UInt32[np.ndarray, "*shape 2"],
    tokens: Int[np.ndarray, "*shape"],
    *,
    vocab_size: int,
    payload: int | np.ndarray = 0,
) -> UInt32[np.ndarray, "*shape"]:
    """Return the word of each token under its seed, from the Philox block of token (token + payload) mod V."""
    shifted = (np.asarray(tokens).astype(np.int64) + payload) % vocab_size
    shifted = shifted.astype(np.uint32)
    counter = (shifted >> 2, seeds[..., 0], seeds[..., 1], site_of(scheme))
    return pick_word(philox.philox4x32(counter, key), shifted)


def pick_word(words: tuple[np.ndarray, ...], tokens: UInt32[np.ndarray, "*shape"]) -> UInt32[np.ndarray, "*shape"]:
    """Return word `token & 3` of each Philox block."""
    place = tokens & np.uint32(3)
    lower = np.where(place == 1, words[1], words[0])
    return np.where(place >= 2, np.where(place == 3, words[3], words[2]), lower)


# Evidence


def evidence(
    scheme: Any,
    key: Keys,
    tokens: Int[np.ndarray, "B T"],
    lengths: Int[np.ndarray, " B"] | None = None,
    *,
    vocab_size: int,
    prompt_lengths: Int[np.ndarray, " B"] | int | None = None,
    payload: int | np.ndarray = 0,
    green_lists: Any = None,
    deduplicate: bool = True,
) -> Evidence:
    """Return the words of the tokens of texts, and which positions are scored.

    A position is valid if it lies in the text and after the prompt and has a full context (prompt tokens serve as
    context, except for vLLM's function, whose contexts start with the continuation). It is scored if its exact (key,
    seed, token) does not occur at an earlier valid position; with two keys, under neither of them.

    Args:
      lengths: tokens of each row; later columns are ignored. Unset: all columns.
      prompt_lengths: leading tokens of each row that are not scored.
      green_lists: the green_lists.GreenLists of kgw_markllm and kgw_transformers; other schemes need none.
      deduplicate: False also scores repeated positions, for which no test here is valid: to show what that costs.

    Raises:
      ValueError: see `checked`; or a scheme that needs green lists gets none.
    """
    tokens, lengths, prompt = checked(tokens, lengths, prompt_lengths, vocab_size=vocab_size)
    place = np.arange(tokens.shape[1])[None, :]
    valid = (place < lengths[:, None]) & (place >= np.maximum(prompt, scheme.context_length)[:, None])

    text = Text(tokens, prompt, vocab_size, payload, green_lists)
    pairs = [generation_keys(scheme, each) for each in ([key] if isinstance(key, Key) else key)]
    words, seeds = scheme.text_words([first for first, _ in pairs], text)
    scored = is_first(seeds, tokens, valid) if deduplicate else valid
    second_words = None
    if is_dual_key(scheme):
        second_words, second_seeds = scheme.text_words([second for _, second in pairs], text)
        if deduplicate and has_seeds_of_each_key(scheme):
            scored = scored & is_first(second_seeds, tokens, valid)
    return Evidence(words, scored, second_words, inputs(scheme, key, tokens, seeds))


def inputs(
    scheme: Any, key: Keys, tokens: Int[np.ndarray, "B T"], seeds: Seeds | None = None
) -> UInt32[np.ndarray, "B T"] | None:
    """Return one number per (key, seed, token) for schemes whose words say only green or red, None for others.

    A randomised p-value needs a number that the score does not determine, and two possible words are too few
    (significance.py). `seeds` is None if all seeds are equal.
    """
    if not scheme.has_list_words:
        return None
    of_key = philox.philox4x32((0, 0, 0, INPUT_SITE), halves(key, 2))[0]
    of_text = np.asarray(tokens).astype(np.uint32)
    return of_key ^ (of_text if seeds is None else of_text + seeds[..., 0].astype(np.uint32) * SEED_FACTOR)


def checked(tokens: Any, lengths: Any, prompt_lengths: Any, *, vocab_size: int) -> tuple[np.ndarray, ...]:
    """Return tokens [B T], with zeros after each text's end, lengths [B] and prompt lengths [B], all int32.

    Raises:
      ValueError: shapes do not fit, or a token lies outside the vocabulary.
    """
    tokens = np.asarray(tokens)
    lengths = np.asarray([tokens.shape[1]] * len(tokens) if lengths is None else lengths, np.int32)
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        raise ValueError(f"evidence: tokens {tokens.shape} and lengths {lengths.shape}, wanted [B T] and [B]")
    if lengths.size and (lengths.min() < 0 or lengths.max() > tokens.shape[1]):
        raise ValueError(f"evidence: lengths {lengths.min()}..{lengths.max()} do not fit {tokens.shape[1]} columns")
    prompt = np.broadcast_to(np.asarray(0 if prompt_lengths is None else prompt_lengths, np.int32), lengths.shape)
    if lengths.size and lengths.min() < tokens.shape[1]:
        tokens = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 0)
    check_tokens(tokens, vocab_size)
    return tokens.astype(np.int32, copy=False), lengths, prompt


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


def count(mask: Bool[np.ndarray, "N T"]) -> Int[np.ndarray, " N"]:
    """Count the True entries of each row."""
    return np.bitwise_count(np.packbits(mask, axis=1)).sum(axis=1, dtype=np.int64)
