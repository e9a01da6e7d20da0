"""KGW: green lists and a bias on their logits (Kirchenbauer et al. 2023, arXiv:2301.10226), Bernoulli form (S file).

A token is green after a context where its word lies below gamma 2^32, each token on its own: no permutation of the
vocabulary, and the number of green tokens is exactly binomial.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float, UInt32
from pydantic import Field

from jaxbench.config import Base
from jaxbench.watermark import reference
from jaxbench.watermark.reference import ContextRule, Keys, Seeds, Text, Words
from jaxbench.watermark.schemes import green_count


class Kgw(Base):
    """Green lists and a bias on their logits; a Scheme (contract.py)."""

    scheme: Literal["kgw"] = "kgw"
    gamma: float = Field(default=0.25, gt=0, lt=1)  # expected share of green tokens
    delta: float = Field(default=2.0, ge=0)  # bias on green logits, nats
    context: ContextRule = ContextRule()
    payload_bits: int = Field(default=0, ge=0, le=16)  # a message of this many bits, 0 = none

    draws: ClassVar[bool] = False
    device: ClassVar[str] = "kgw"
    word_fields: ClassVar[tuple[str, ...]] = ("context",)
    key_field: ClassVar[str | None] = None
    has_fixed_list: ClassVar[bool] = False

    @property
    def context_length(self) -> int:
        """Tokens that must precede a marked position."""
        return self.context.length

    def text_words(self, key: Keys, text: Text) -> tuple[Words, Seeds]:
        """Words and seeds of the tokens of texts."""
        return reference.text_words(self, key, text)

    def is_green(self, words: UInt32[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
        """Which words make their token green."""
        return words < green_count.threshold(self.gamma)

    def statistic(self, vocab_size: int) -> green_count.GreenCount:
        """The number of green tokens."""
        return green_count.GreenCount(self.is_green, green_count.threshold(self.gamma) / 2**32)

    def null_words(self, random: np.random.Generator, shape: tuple[int, ...]) -> UInt32[np.ndarray, "*shape"]:
        """Words of tokens under another key."""
        return reference.null_words(random, shape)

    def neural_evidence(self, words: UInt32[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
        """Evidence for the neural detector."""
        return green_count.neural_evidence(self.is_green(words), self.gamma)

    def shade(self, words: UInt32[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """1 for a green token, 0 for others."""
        return self.is_green(words).astype(np.float64)
