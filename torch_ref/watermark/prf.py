"""The pseudo-random functions shared by all schemes, in PyTorch, those of reference.py. Twin: jaxbench.

Words are int64 tensors with values in [0, 2**32). A key is a pair (low, high) of tensors that broadcast over the rows.
Words of the whole vocabulary are four lanes [B ceil(V / 4)]: lane j holds tokens j, j + 4, j + 8, .. (one Philox block
gives four words).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from jaxbench import philox
from jaxbench.watermark import reference
from jaxbench.watermark.reference import CONTEXT_SITE, MIN_SITE, NO_TOKEN, SELF_SITE, ContextRule
from jaxbench.watermark.schemes.contract import Scheme
from torch_ref import prng

Halves = tuple[Tensor, Tensor]
Lanes = tuple[Tensor, Tensor, Tensor, Tensor]
Words = Int64[Tensor, "B T"]
Seeds = Int64[Tensor, "B T S"]  # S words; a seed and a token decide a word


class Text(NamedTuple):
    """Texts of a batch as detection reads them."""

    tokens: Int64[Tensor, "B T"]
    prompt: Int[Tensor, " B"]  # prompt tokens of each text, before the marked ones
    payload: Int64[Tensor, "B 1"]
    fixed_lists: tuple[Bool[Tensor, "K V"], Int[Tensor, " B"]] | None  # the keys' lists, and each text's index


def random_blocks(counter: tuple[Any, ...], key: Halves) -> Lanes:
    """Return the four words of each counter; its arrays have the key's rank, its constants are integers."""
    ones = (1,) * key[0].ndim
    words = (c if isinstance(c, Tensor) else torch.full(ones, c, device=key[0].device) for c in counter)
    return prng.philox4x32(tuple(words), key)


def pick_word(words: Lanes, tokens: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Return word `token & 3` of each block."""
    place = tokens & 3
    lower = torch.where(place == 1, words[1], words[0])
    return torch.where(place >= 2, torch.where(place == 3, words[3], words[2]), lower)


# Contexts to seeds


def seed_of_context(contexts: Int[Tensor, "*shape n"], key: Halves) -> Int64[Tensor, "*shape 2"]:
    """Return the seed of contexts, oldest token first: a chain of Philox blocks over four tokens each."""
    contexts = contexts.to(torch.int64) & philox.MASK32
    key = (key[0], key[1] ^ CONTEXT_SITE)
    words: Any = (torch.zeros_like(key[0]),) * 4
    for start in range(0, contexts.shape[-1], 4):
        block = [
            contexts[..., start + i] if start + i < contexts.shape[-1] else torch.full_like(key[0], NO_TOKEN)
            for i in range(4)
        ]
        words = random_blocks(tuple(b ^ w for b, w in zip(block, words)), key)
    return torch.stack(torch.broadcast_tensors(words[0], words[1]), dim=-1)


def minimum_token(contexts: Int[Tensor, "*shape n"], key: Halves) -> Int64[Tensor, "*shape"]:
    """Return the token of each context with the smallest (hash, id)."""
    contexts = contexts.to(torch.int64) & philox.MASK32
    hashes = random_blocks((contexts, 0, 0, MIN_SITE), (key[0][..., None], key[1][..., None]))[0]
    least = torch.amin(hashes, dim=-1, keepdim=True)
    return torch.amin(torch.where(hashes == least, contexts, NO_TOKEN), dim=-1)


def pair_words(context_tokens: Tensor, candidates: Tensor, key: Halves) -> Int64[Tensor, "*shape"]:
    """Return P(x, v), the rule `self`'s word of context token x and candidate v (arrays that broadcast)."""
    candidates = candidates.to(torch.int64) & philox.MASK32
    return pick_word(
        random_blocks((candidates >> 2, context_tokens.to(torch.int64) & philox.MASK32, 0, SELF_SITE), key), candidates
    )


def self_seeds(contexts: Tensor, candidates: Tensor, key: Halves) -> Int64[Tensor, "*shape 2"]:
    """Return each candidate's [..] seed (m, 0) after its context [.. h - 1]; m = min P over context and candidate."""
    least = pair_words(candidates, candidates, key)
    for i in range(contexts.shape[-1]):
        least = torch.minimum(least, pair_words(contexts[..., i], candidates, key))
    return torch.stack([least, torch.zeros_like(least)], dim=-1)


def seeds_after(
    rule: ContextRule, key: Halves, contexts: Int[Tensor, "*shape n"], candidates: Int[Tensor, "*shape"]
) -> Int64[Tensor, "*shape 2"]:
    """Return the seeds of contexts; only the rule `self` uses the candidates."""
    if rule.kind == "self":
        return self_seeds(contexts, candidates, key)
    if rule.kind == "skip":
        contexts = contexts[..., :1]
    if rule.kind == "min":
        contexts = minimum_token(contexts, key)[..., None]
    return seed_of_context(contexts, key)


def earlier_tokens(tokens: Int64[Tensor, "B T"], length: int) -> Int64[Tensor, "B T n"]:
    """Return the `length` tokens before each position of texts, oldest first, 0 before the start."""
    padded = F.pad(tokens, (length, 0))
    earlier = [padded[:, i : i + tokens.shape[1]] for i in range(length)]
    return torch.stack(earlier, dim=-1) if earlier else tokens.new_zeros((*tokens.shape, 0))


def text_seeds(rule: ContextRule, key: Halves, tokens: Int64[Tensor, "B T"]) -> Int64[Tensor, "B T 2"]:
    """Return the seed at every position of texts; undefined where fewer than rule.length tokens precede it."""
    return seeds_after(rule, key, earlier_tokens(tokens, rule.length), tokens)


# Seeds to words


def token_words(
    scheme: Scheme, key: Halves, seeds: Int64[Tensor, "*shape 2"], tokens: Tensor, *, vocab_size: int, payload: Any = 0
) -> Int64[Tensor, "*shape"]:
    """Return the word of each token under its seed; with a payload, the word of token (token + payload) mod V."""
    shifted = tokens.to(torch.int64) & philox.MASK32
    if not isinstance(payload, int) or payload:
        shifted = (shifted + payload) % vocab_size
    return pick_word(
        random_blocks((shifted >> 2, seeds[..., 0], seeds[..., 1], reference.site_of(scheme)), key), shifted
    )


def lanes(key: Halves, seeds: Int64[Tensor, "B 2"], *, site: int, num_elements: int) -> Lanes:
    """Return the words of tokens 0..num_elements-1 under each row's seed, in lanes."""
    return random_blocks((block_numbers(num_elements, device=key[0].device), seeds[:, :1], seeds[:, 1:], site), key)


def interleave(words: tuple[Tensor, ...], num_elements: int) -> Tensor:
    """Interleave the lanes into one array [B V]."""
    stacked = torch.stack(words, dim=-1)
    return stacked.reshape(stacked.shape[0], -1)[:, :num_elements]


def block_numbers(num_elements: int, *, device: torch.device) -> Int64[Tensor, "1 C"]:
    """Return the numbers of the Philox blocks that hold tokens 0..num_elements-1, four each."""
    return torch.arange(-(-num_elements // 4), device=device)[None, :]


def shift(values: Tensor, payload: Int[Tensor, " B"]) -> Tensor:
    """Shift values [B V] by the payload: token v gets the value of token (v + payload) mod V."""
    places = torch.arange(values.shape[1], device=values.device)[None, :] + payload[:, None]
    return torch.gather(values, 1, places % values.shape[1])
