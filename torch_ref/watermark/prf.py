"""The pseudo-random functions that all schemes share, in PyTorch, those of reference.py. Twin: jaxbench.

Words are int64 tensors with values in [0, 2**32). A key is the pair (low, high) of tensors that broadcast with the
rows. Words of the whole vocabulary come as four lanes [B ceil(V / 4)]: lane j holds tokens j, j + 4, j + 8, .. (one
block serves four).
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
Seeds = Int64[Tensor, "B T S"]  # S words: what, with the token, decides a word


class Text(NamedTuple):
    """Texts of a batch as detection reads them."""

    tokens: Int64[Tensor, "B T"]
    prompt: Int[Tensor, " B"]  # tokens of each text that were there before the marked ones
    payload: Int64[Tensor, "B 1"]
    fixed_lists: tuple[Bool[Tensor, "K V"], Int[Tensor, " B"]] | None  # lists of the keys, and which one each text has


def random_blocks(counter: tuple[Any, ...], key: Halves) -> Lanes:
    """Four words of each counter, whose arrays have the key's rank and whose constants are integers."""
    ones = (1,) * key[0].ndim
    words = (c if isinstance(c, Tensor) else torch.full(ones, c, device=key[0].device) for c in counter)
    return prng.philox4x32(tuple(words), key)


def pick_word(words: Lanes, tokens: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Word token & 3 of each block."""
    place = tokens & 3
    lower = torch.where(place == 1, words[1], words[0])
    return torch.where(place >= 2, torch.where(place == 3, words[3], words[2]), lower)


# Contexts to seeds


def seed_of_context(contexts: Int[Tensor, "*shape n"], key: Halves) -> Int64[Tensor, "*shape 2"]:
    """Seed of contexts, oldest token first: a chain of Philox blocks over four tokens each."""
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
    """One token of each context whose (hash, id) is the smallest."""
    contexts = contexts.to(torch.int64) & philox.MASK32
    hashes = random_blocks((contexts, 0, 0, MIN_SITE), (key[0][..., None], key[1][..., None]))[0]
    least = torch.amin(hashes, dim=-1, keepdim=True)
    return torch.amin(torch.where(hashes == least, contexts, NO_TOKEN), dim=-1)


def pair_words(context_tokens: Tensor, candidates: Tensor, key: Halves) -> Int64[Tensor, "*shape"]:
    """P(x, v), the word of context token x and candidate v (arrays that broadcast), of the rule `self`."""
    candidates = candidates.to(torch.int64) & philox.MASK32
    return pick_word(
        random_blocks((candidates >> 2, context_tokens.to(torch.int64) & philox.MASK32, 0, SELF_SITE), key), candidates
    )


def self_seeds(contexts: Tensor, candidates: Tensor, key: Halves) -> Int64[Tensor, "*shape 2"]:
    """Seed of each candidate [..] after its context [.. h - 1]: the least P over both, and 0."""
    least = pair_words(candidates, candidates, key)
    for i in range(contexts.shape[-1]):
        least = torch.minimum(least, pair_words(contexts[..., i], candidates, key))
    return torch.stack([least, torch.zeros_like(least)], dim=-1)


def seeds_after(
    rule: ContextRule, key: Halves, contexts: Int[Tensor, "*shape n"], candidates: Int[Tensor, "*shape"]
) -> Int64[Tensor, "*shape 2"]:
    """Seed that contexts give; only the rule `self` looks at the candidates."""
    if rule.kind == "self":
        return self_seeds(contexts, candidates, key)
    if rule.kind == "skip":
        contexts = contexts[..., :1]
    if rule.kind == "min":
        contexts = minimum_token(contexts, key)[..., None]
    return seed_of_context(contexts, key)


def earlier_tokens(tokens: Int64[Tensor, "B T"], length: int) -> Int64[Tensor, "B T n"]:
    """`length` tokens before each position of texts, oldest first, 0 where there is none."""
    padded = F.pad(tokens, (length, 0))
    earlier = [padded[:, i : i + tokens.shape[1]] for i in range(length)]
    return torch.stack(earlier, dim=-1) if earlier else tokens.new_zeros((*tokens.shape, 0))


def text_seeds(rule: ContextRule, key: Halves, tokens: Int64[Tensor, "B T"]) -> Int64[Tensor, "B T 2"]:
    """Seed at every position of texts; with fewer than rule.length tokens before it, it has no meaning."""
    return seeds_after(rule, key, earlier_tokens(tokens, rule.length), tokens)


# Seeds to words


def token_words(
    scheme: Scheme, key: Halves, seeds: Int64[Tensor, "*shape 2"], tokens: Tensor, *, vocab_size: int, payload: Any = 0
) -> Int64[Tensor, "*shape"]:
    """Word of each token at its seed; a payload takes the word of token + payload mod V."""
    shifted = tokens.to(torch.int64) & philox.MASK32
    if not isinstance(payload, int) or payload:
        shifted = (shifted + payload) % vocab_size
    return pick_word(
        random_blocks((shifted >> 2, seeds[..., 0], seeds[..., 1], reference.site_of(scheme)), key), shifted
    )


def lanes(key: Halves, seeds: Int64[Tensor, "B 2"], *, site: int, num_elements: int) -> Lanes:
    """Words of tokens 0..num_elements-1 at each row's seed, in lanes."""
    return random_blocks((block_numbers(num_elements, device=key[0].device), seeds[:, :1], seeds[:, 1:], site), key)


def interleave(words: tuple[Tensor, ...], num_elements: int) -> Tensor:
    """Lanes as one array [B V]."""
    stacked = torch.stack(words, dim=-1)
    return stacked.reshape(stacked.shape[0], -1)[:, :num_elements]


def block_numbers(num_elements: int, *, device: torch.device) -> Int64[Tensor, "1 C"]:
    """Numbers of the Philox blocks that hold tokens 0..num_elements-1, four each."""
    return torch.arange(-(-num_elements // 4), device=device)[None, :]


def shift(values: Tensor, payload: Int[Tensor, " B"]) -> Tensor:
    """Values [B V] with token v taking the place of token (v + payload) mod V."""
    places = torch.arange(values.shape[1], device=values.device)[None, :] + payload[:, None]
    return torch.gather(values, 1, places % values.shape[1])
