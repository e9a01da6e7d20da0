"""SynthID: tournament sampling with two leaves (Dathathri et al. 2024, Nature 634, non-distortionary) (S file).

A token's word gives it one bit g for each of `depth` layers; layer i multiplies the distribution by
1 + g - sum(g p). Detection sums the tokens' bits, weighted equally or by layer; under the null they are fair coins.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32
from pydantic import Field
from scipy import special

from jaxbench.watermark import null_distributions, reference
from jaxbench.watermark.reference import ContextRule
from jaxbench.watermark.schemes.contract import Scheme, Statistic

MAX_DEPTH = 30  # maximum layers of a tournament: a word has 32 bits
HEAD_BLOCK = 32  # consecutive ids that enter a tournament together
NEURAL_WEIGHTS = (10.0, 1.0)  # of the first and the last layer (Dathathri et al. 2024, weighted mean)
BAYESIAN_STEPS_PER_NAT = 64  # log-odds are rounded to this lattice, which makes their null exact
# P(two draws differ) before each layer of a tournament: the mean over 2,000 positions of the default text under the
# default model at temperature 1, simulated with `tournament`.
TWO_LEAVES = (
    *(0.728, 0.712, 0.696, 0.683, 0.667, 0.653, 0.634, 0.620, 0.603, 0.583, 0.566, 0.550, 0.534, 0.518, 0.503),
    *(0.487, 0.476, 0.460, 0.446, 0.433, 0.420, 0.407, 0.396, 0.383, 0.372, 0.361, 0.350, 0.338, 0.327, 0.313),
)


class SynthId(Scheme):
    """Tournament sampling."""

    scheme: Literal["synthid"] = "synthid"
    depth: int = Field(default=30, ge=1, le=MAX_DEPTH)  # layers of the tournament
    candidates: int | None = Field(default=4096, ge=32, multiple_of=32)  # tokens that compete (`head`); None = all
    context: ContextRule = ContextRule(kind="left", width=4)
    score: Literal["weighted", "mean", "bayesian"] = "weighted"  # what detection sums

    draws: ClassVar[bool] = True
    device: ClassVar[str] = "synthid"

    def statistic(self, vocab_size: int) -> BitSum:
        """The weighted sum of the bits."""
        return BitSum(self, weights(self.depth, self.score))

    def neural_evidence(self, words: UInt32[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
        """Phi(z), where z is the standardised weighted sum of the word's bits."""
        layer_weights, total = np.linspace(*NEURAL_WEIGHTS, self.depth), np.zeros(words.shape)
        for i, weight in enumerate(layer_weights):
            total += weight * (((words >> np.uint32(i)) & np.uint32(1)) - 0.5)
        return special.ndtr(total / (0.5 * np.sqrt(np.square(layer_weights).sum())))

    def shade(self, words: UInt32[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """The mean of the token's bits."""
        return np.bitwise_count(words & np.uint32((1 << self.depth) - 1)) / self.depth


@dataclasses.dataclass(frozen=True)
class BitSum(Statistic):
    """The sum of weighted bits: binomial, or a sum of weighted binomials, under the null."""

    scheme: SynthId
    weights: tuple[int, ...]  # of the layers' bits

    def token_scores(self, evidence: reference.Evidence) -> Int[np.ndarray, "N T"]:
        """Weighted bits of each scored token."""
        bits = ((evidence.words >> np.uint32(i)) & np.uint32(1) for i in range(self.scheme.depth))
        value = sum(weight * bit.astype(np.int64) for weight, bit in zip(self.weights, bits))
        return np.where(evidence.scored, value, 0)

    def total(self, evidence: reference.Evidence) -> Int[np.ndarray, " N"]:
        """Sum of the token scores."""
        words, scored, depth = evidence.words, evidence.scored, self.scheme.depth
        if self.scheme.score == "mean":
            bits = np.bitwise_count(words & np.uint32((1 << depth) - 1))
            return np.where(scored, bits, 0).sum(axis=1, dtype=np.int64)
        ones = (reference.count(((words >> np.uint32(i)) & np.uint32(1)).astype(bool) & scored) for i in range(depth))
        return sum(weight * one for weight, one in zip(self.weights, ones))

    def moments(self) -> tuple[float, float]:
        """Half the sum of the weights and a quarter of the sum of their squares."""
        return 0.5 * sum(self.weights), 0.25 * sum(w * w for w in self.weights)

    def tail(self, total: Int[np.ndarray, " N"], num_scored: Int[np.ndarray, " N"]) -> null_distributions.Tail:
        """Tail of Binomial(n depth, 1/2), or of the lattice sum."""
        if self.scheme.score == "mean":
            return null_distributions.binomial(total, num_scored * self.scheme.depth, 0.5)
        return null_distributions.lattice(total, num_scored, self.weights)

    def reported(self, total: Int[np.ndarray, " N"], num_scored: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """(Weighted) mean of the bits; bayesian: log P(bits | marked) / P(bits | not marked), nats."""
        if self.scheme.score == "bayesian":
            constant = sum(math.log1p(-math.tanh(0.5 * w / BAYESIAN_STEPS_PER_NAT)) for w in self.weights)
            return total / BAYESIAN_STEPS_PER_NAT + num_scored * constant
        return np.where(num_scored > 0, total / np.maximum(1, num_scored * sum(self.weights)), 0.0)


def weights(depth: int, kind: Literal["weighted", "mean", "bayesian"]) -> tuple[int, ...]:
    """Integer weight of each layer's bits: weighted (10 to 1, Dathathri et al. 2024), mean (all 1) or bayesian."""
    if kind == "bayesian":
        odds = [math.log((2.0 + b) / (2.0 - b)) for b in TWO_LEAVES[:depth]]
        return tuple(max(1, round(BAYESIAN_STEPS_PER_NAT * value)) for value in odds)
    if kind == "mean" or depth == 1:
        return (1,) * depth
    whole = [10 * (depth - 1) - 9 * i for i in range(depth)]
    return tuple(w // math.gcd(*whole) for w in whole)


def tournament(
    probabilities: Float[np.ndarray, "*shape V"], words: UInt32[np.ndarray, "*shape V"], *, depth: int
) -> Float[np.ndarray, "*shape V"]:
    """Distribution after `depth` layers of p (1 + g - sum(g p)), g = bit i of the words, in float64."""
    p = probabilities.astype(np.float64)
    for i in range(depth):
        g = (words >> np.uint32(i)) & np.uint32(1)
        p = p * (1 + g - (g * p).sum(axis=-1, keepdims=True))
    return p


def head(logits: Float[np.ndarray, "*shape V"], *, candidates: int) -> Bool[np.ndarray, "*shape V"]:
    """Return which tokens compete in a tournament: the likeliest blocks of HEAD_BLOCK consecutive ids.

    These are the candidates // HEAD_BLOCK blocks with the largest maximum logit; ties go to the lower ids. A tournament
    preserves the total mass of its tokens. So the distribution is unchanged on average over keys, and all other tokens
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
