"""Unigram: one green list for all contexts (Zhao et al. 2023, arXiv:2306.17439) (S file).

The list of a key holds the floor(gamma V) tokens with the smallest (word, id). A text's distinct tokens are draws from
the vocabulary without replacement, so that the number of green ones is hypergeometric.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32
from pydantic import Field

from jaxbench import philox
from jaxbench.config import Base
from jaxbench.watermark import null_distributions, reference
from jaxbench.watermark.keys import Key
from jaxbench.watermark.reference import Keys, Seeds, Text, Words
from jaxbench.watermark.schemes import green_count


class Unigram(Base):
    """One fixed green list and a bias on its logits; a Scheme (contract.py)."""

    scheme: Literal["unigram"] = "unigram"
    gamma: float = Field(default=0.5, gt=0, lt=1)  # share of green tokens
    delta: float = Field(default=2.0, ge=0)  # bias on green logits, nats

    draws: ClassVar[bool] = False
    device: ClassVar[str] = "unigram"
    word_fields: ClassVar[tuple[str, ...]] = ()
    key_field: ClassVar[str | None] = None
    has_fixed_list: ClassVar[bool] = True
    context_length: ClassVar[int] = 0

    def green_list(self, key: Key, vocab_size: int) -> Bool[np.ndarray, " V"]:
        """The green list of a key."""
        low, high = key.halves
        tokens = np.arange(vocab_size, dtype=np.uint32)
        blocks = philox.philox4x32((tokens >> 2, 0, 0, reference.site_of(self)), (low, high))
        green = np.zeros(vocab_size, bool)
        words = reference.pick_word(blocks, tokens)
        green[np.argsort(words, kind="stable")[: int(self.gamma * vocab_size)]] = True
        return green

    def text_words(self, key: Keys, text: Text) -> tuple[Words, Seeds]:
        """Words of the tokens of texts; their seeds are all equal."""
        keys, tokens = [key] if isinstance(key, Key) else key, text.tokens
        lists = np.stack([self.green_list(one, text.vocab_size) for one in keys])
        is_green = lists[np.arange(len(tokens))[:, None] % len(lists), tokens]
        return green_count.list_words(is_green), np.zeros((*tokens.shape, 1), np.uint32)

    def is_green(self, words: UInt32[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
        """Which words make their token green."""
        return words == 0

    def statistic(self, vocab_size: int) -> DistinctGreenCount:
        """The number of green ones among the distinct tokens."""
        return DistinctGreenCount(int(self.gamma * vocab_size), vocab_size, self.is_green)

    def null_words(self, random: np.random.Generator, shape: tuple[int, ...]) -> UInt32[np.ndarray, "*shape"]:
        """Words of tokens under another key."""
        return green_count.null_list_words(random, shape, self.gamma)

    def neural_evidence(self, words: UInt32[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
        """Evidence for the neural detector."""
        return green_count.neural_evidence(self.is_green(words), self.gamma)

    def shade(self, words: UInt32[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """1 for a green token, 0 for others."""
        return self.is_green(words).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class DistinctGreenCount:
    """The number of green ones among distinct tokens: hypergeometric under the null."""

    list_size: int  # tokens on the list
    vocab_size: int
    is_green: Any  # of words
    is_continuous: ClassVar[bool] = False
    counts_green: ClassVar[bool] = True

    @property
    def _with_replacement(self) -> green_count.GreenCount:
        return green_count.GreenCount(self.is_green, self.list_size / self.vocab_size)

    def token_scores(self, evidence: reference.Evidence) -> Int[np.ndarray, "N T"]:
        """Return 1 for a green token that is scored, 0 for others."""
        return self._with_replacement.token_scores(evidence)

    def total(self, evidence: reference.Evidence) -> Int[np.ndarray, " N"]:
        """Return the number of green tokens."""
        return self._with_replacement.total(evidence)

    def moments(self) -> tuple[float, float]:
        """Return gamma and gamma (1 - gamma)."""
        return self._with_replacement.moments()

    def variance(self, num_scored: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """Return n gamma (1 - gamma) (V - n) / (V - 1)."""
        return num_scored * self.moments()[1] * (self.vocab_size - num_scored) / max(1, self.vocab_size - 1)

    def tail(self, total: Int[np.ndarray, " N"], num_scored: Int[np.ndarray, " N"]) -> null_distributions.Tail:
        """Return the tail of the hypergeometric distribution.

        Raises:
          ValueError: more distinct tokens than the vocabulary has.
        """
        if num_scored.max(initial=0) > self.vocab_size:
            most = num_scored.max()
            raise ValueError(f"unigram: {most} distinct tokens in a vocabulary of vocab_size={self.vocab_size}")
        drawn_from = {"population": self.vocab_size, "successes": self.list_size}
        return null_distributions.hypergeometric(total, num_scored, **drawn_from)

    def reported(self, total: Int[np.ndarray, " N"], num_scored: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """Return the number of green tokens."""
        return total.astype(np.float64)

    def null_scores(self, random: np.random.Generator, shape: tuple[int, int]) -> Float[np.ndarray, "N T"]:
        """Return 0s and 1s drawn without replacement."""
        scores, left = np.zeros(shape), np.full(shape[0], self.list_size, np.float64)
        for i in range(shape[1]):
            scores[:, i] = random.random(shape[0]) * (self.vocab_size - i) < left
            left -= scores[:, i]
        return scores
