"""The number of green tokens: what all schemes of green lists share (S file)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from jaxbench.watermark import null_distributions, reference
from jaxbench.watermark.reference import Evidence


@dataclasses.dataclass(frozen=True)
class GreenCount:
    """The number of green tokens among the scored ones: binomial under the null."""

    is_green: Callable[[np.ndarray], np.ndarray]  # of words
    share: float  # exact probability of a green token under the null
    is_continuous: ClassVar[bool] = False
    counts_green: ClassVar[bool] = True

    def token_scores(self, evidence: Evidence) -> Int[np.ndarray, "N T"]:
        """Return 1 for a green token that is scored, 0 for others."""
        return (self.is_green(evidence.words) & evidence.scored).astype(np.int64)

    def total(self, evidence: Evidence) -> Int[np.ndarray, " N"]:
        """Return the number of green tokens."""
        return reference.count(self.is_green(evidence.words) & evidence.scored)

    def moments(self) -> tuple[float, float]:
        """Return gamma and gamma (1 - gamma)."""
        return self.share, self.share * (1.0 - self.share)

    def variance(self, num_scored: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """Return n gamma (1 - gamma)."""
        return num_scored * self.moments()[1]

    def tail(self, total: Int[np.ndarray, " N"], num_scored: Int[np.ndarray, " N"]) -> null_distributions.Tail:
        """Return the tail of Binomial(n, gamma)."""
        return null_distributions.binomial(total, num_scored, self.share)

    def reported(self, total: Int[np.ndarray, " N"], num_scored: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """Return the number of green tokens."""
        return total.astype(np.float64)

    def null_scores(self, random: np.random.Generator, shape: tuple[int, int]) -> Float[np.ndarray, "N T"]:
        """Return independent 0s and 1s."""
        return (reference.null_words(random, shape) < np.uint32(self.share * 2**32)).astype(np.float64)


def threshold(gamma: float) -> int:
    """Return the number that a green token's word lies below, where each token is green on its own."""
    return int(gamma * 2**32)


def list_words(is_green: Bool[np.ndarray, "*shape"]) -> UInt32[np.ndarray, "*shape"]:
    """Return words that say no more than whether a token is on a list: 0 and RED."""
    return np.where(is_green, np.uint32(0), np.uint32(reference.RED))


def null_list_words(random: np.random.Generator, shape: tuple[int, ...], gamma: float) -> UInt32[np.ndarray, "*shape"]:
    """Return such words of tokens that are green with probability gamma."""
    return list_words(reference.null_words(random, shape) < threshold(gamma))


def neural_evidence(is_green: Bool[np.ndarray, "B T"], gamma: float) -> Float[np.ndarray, "B T"]:
    """Return the middle of what a token's word can say: 1 - gamma/2 where green, (1 - gamma)/2 where not."""
    return np.where(is_green, 1.0 - gamma / 2, (1.0 - gamma) / 2)
