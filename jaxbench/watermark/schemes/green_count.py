"""Shared by schemes with green and red tokens: words, evidence, and the number of green tokens (S file)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from jaxbench.watermark import null_distributions, reference
from jaxbench.watermark.reference import RED, Evidence, Keys, Seeds, Text, Words
from jaxbench.watermark.schemes.contract import Scheme, Statistic

MAX_BIAS = 1000.0  # nats: from 100 on red tokens are practically banned; float32 still tells green logits 1e-4 apart
MIN_GAMMA = 2.0**-32  # a smaller share of 32-bit words is none: nothing would be marked, and p be 1 for every text


class GreenScheme(Scheme):
    """A scheme with a share `gamma` of green tokens; each is green independently, if its word is below a threshold."""

    def is_green(self, words: UInt32[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
        """Which words make their token green."""
        return words < threshold(self.gamma)

    def statistic(self, vocab_size: int) -> GreenCount:
        """The number of green tokens."""
        return GreenCount(self.is_green, threshold(self.gamma) / 2**32)

    def neural_evidence(self, words: UInt32[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
        """Midpoint of the uniform range that the colour leaves: 1 - gamma/2 for green tokens, (1 - gamma)/2 for red."""
        return np.where(self.is_green(words), 1.0 - self.gamma / 2, (1.0 - self.gamma) / 2)

    def shade(self, words: UInt32[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """1 for a green token, 0 for others."""
        return self.is_green(words).astype(np.float64)


class ListScheme(GreenScheme):
    """A scheme whose words say only whether a token is on a list: 0 or RED."""

    word_fields: ClassVar[tuple[str, ...]] = ()
    has_list_words: ClassVar[bool] = True

    def is_green(self, words: UInt32[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
        """Which words make their token green."""
        return words == 0

    def null_words(self, random: np.random.Generator, shape: tuple[int, ...]) -> UInt32[np.ndarray, "*shape"]:
        """Draw words of tokens under an unrelated key."""
        return list_words(super().null_words(random, shape) < threshold(self.gamma))


class ToolkitScheme(ListScheme):
    """A scheme with another toolkit's lists (green_lists.py), which it describes by `list_rule(vocab_size)`."""

    device: ClassVar[str] = "listed"

    def text_words(self, key: Keys, text: Text) -> tuple[Words, Seeds]:
        """Return the words of the tokens of texts, and the seeds of the lists that decide them.

        Raises:
          ValueError: the scheme's lists were not given.
        """
        lists = text.green_lists
        if lists is None:
            raise ValueError(f"evidence: scheme {self.scheme} needs the tables of its green lists, got {lists}")
        return list_words(lists.green(text.tokens)), lists.seeds(text.tokens)[..., None]

    def statistic(self, vocab_size: int) -> GreenCount:
        """The number of green tokens."""
        return GreenCount(self.is_green, int(self.gamma * vocab_size) / vocab_size)


@dataclasses.dataclass(frozen=True)
class GreenCount(Statistic):
    """The number of green tokens among the scored ones: binomial under the null."""

    is_green: Callable[[np.ndarray], np.ndarray]  # of words
    share: float  # exact probability of a green token under the null
    counts_green: ClassVar[bool] = True

    def token_scores(self, evidence: Evidence) -> Int[np.ndarray, "N T"]:
        """1 for a scored green token, 0 for others."""
        return (self.is_green(evidence.words) & evidence.scored).astype(np.int64)

    def total(self, evidence: Evidence) -> Int[np.ndarray, " N"]:
        """The number of green tokens."""
        return reference.count(self.is_green(evidence.words) & evidence.scored)

    def moments(self) -> tuple[float, float]:
        """gamma and gamma (1 - gamma)."""
        return self.share, self.share * (1.0 - self.share)

    def tail(self, total: Int[np.ndarray, " N"], num_scored: Int[np.ndarray, " N"]) -> null_distributions.Tail:
        """The tail of Binomial(n, gamma)."""
        return null_distributions.binomial(total, num_scored, self.share)


def threshold(gamma: float) -> int:
    """Return the bound below which a word makes its token green, for schemes whose tokens are green independently."""
    return int(gamma * 2**32)


def list_words(is_green: Bool[np.ndarray, "*shape"]) -> UInt32[np.ndarray, "*shape"]:
    """Return words that say whether a token is on a list: 0 if it is, else RED."""
    return np.where(is_green, np.uint32(0), np.uint32(RED))
