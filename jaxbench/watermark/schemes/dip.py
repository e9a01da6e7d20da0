"""DiP: distribution-preserving reweighting along a keyed order (Wu et al. 2023, arXiv:2310.07710) (S file).

A Feistel network over [0, 2^b) permutes the tokens; context and key decide the order. Marking moves probability to the
end of the order; detection counts tokens in its upper half. A token's word is its place in the order, shifted to the
top of 32 bits.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32
from pydantic import Field

from jaxbench import philox
from jaxbench.watermark import reference
from jaxbench.watermark.reference import ContextRule, Halves, Keys, Seeds, Text, Words
from jaxbench.watermark.schemes.green_count import GreenScheme

FEISTEL_ROUNDS = 8
MIX_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
UPPER_HALF = 2**31  # the least word of a token that counts as green


class Dip(GreenScheme):
    """Distribution-preserving reweighting."""

    scheme: Literal["dip"] = "dip"
    alpha: float = Field(default=0.45, ge=0, le=0.5)  # mass taken from the front of the order; 0 marks nothing
    context: ContextRule = ContextRule(kind="left", width=4)

    draws: ClassVar[bool] = True
    device: ClassVar[str] = "dip"
    gamma: ClassVar[float] = 0.5  # the upper half is green

    def text_words(self, key: Keys, text: Text) -> tuple[Words, Seeds]:
        """Return the words and seeds of the tokens of texts."""
        seeds = reference.context_seeds(self.context, key, text.tokens)
        return token_words(reference.halves(key, 2), seeds, text.tokens, vocab_size=text.vocab_size), seeds

    def is_green(self, words: UInt32[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
        """Which words lie in the upper half of the order."""
        return words >= np.uint32(UPPER_HALF)


def token_words(
    key: Halves, seeds: UInt32[np.ndarray, "*shape 2"], tokens: Int[np.ndarray, "*shape"], *, vocab_size: int
) -> UInt32[np.ndarray, "*shape"]:
    """Each token's place in the order of its seed, in the top bits of a word."""
    bits = order_bits(vocab_size)
    return permute(np.asarray(tokens).astype(np.uint32), round_keys(key, seeds), bits) << np.uint32(32 - bits)


def reweight(
    probabilities: Float[np.ndarray, "*shape V"], positions: Int[np.ndarray, "*shape V"], *, alpha: float
) -> Float[np.ndarray, "*shape V"]:
    """Return DiP's distribution, in float64; positions give the order of the tokens (Wu et al. 2023, section 4)."""
    order = np.argsort(positions, axis=-1)
    mass = np.take_along_axis(probabilities.astype(np.float64), order, axis=-1)
    end = np.cumsum(mass, axis=-1)
    start = end - mass
    taken = [np.maximum(x - alpha, 0) + np.maximum(x - (1 - alpha), 0) for x in (start, end)]
    out = np.zeros_like(mass)
    np.put_along_axis(out, order, taken[1] - taken[0], axis=-1)
    return out


# The keyed order


def order_bits(vocab_size: int) -> int:
    """b, the least even number with 2**b >= vocab_size; the order is a permutation of [0, 2**b)."""
    bits = max(2, (vocab_size - 1).bit_length())
    return bits + bits % 2


def round_keys(key: Halves, seeds: UInt32[np.ndarray, "*shape 2"]) -> UInt32[np.ndarray, "*shape 8"]:
    """Round keys of each seed: two Philox blocks."""
    site = philox.site_id("watermark/dip")
    blocks = [philox.philox4x32((np.uint32(i), seeds[..., 0], seeds[..., 1], site), key) for i in range(2)]
    return np.stack(np.broadcast_arrays(*blocks[0], *blocks[1]), axis=-1)


def mix(x: UInt32[np.ndarray, "*shape"]) -> UInt32[np.ndarray, "*shape"]:
    """32-bit finaliser of MurmurHash3 (Appleby 2011), a bijection of uint32 values."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(MIX_MULTIPLIERS[0])
    x = (x ^ (x >> np.uint32(13))) * np.uint32(MIX_MULTIPLIERS[1])
    return x ^ (x >> np.uint32(16))


def permute(
    values: UInt32[np.ndarray, "*shape"], keys: UInt32[np.ndarray, "*shape 8"], bits: int
) -> UInt32[np.ndarray, "*shape"]:
    """Permute values in [0, 2**bits) by the Feistel network with these round keys."""
    half, mask = np.uint32(bits // 2), np.uint32(2 ** (bits // 2) - 1)
    left, right = values >> half, values & mask
    for i in range(FEISTEL_ROUNDS):
        left, right = right, left ^ (mix(right ^ keys[..., i]) >> np.uint32(32 - bits // 2))
    return (left << half) | right
