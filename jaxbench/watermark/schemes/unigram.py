"""Unigram: one green list for all contexts (Zhao et al. 2023, arXiv:2306.17439) (S file).

A key's list holds the floor(gamma V) tokens with the smallest (word, id). A text's distinct tokens are draws from the
vocabulary without replacement, so the number of green ones is hypergeometric.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float, Int
from pydantic import Field

from jaxbench import philox
from jaxbench.watermark import null_distributions, reference
from jaxbench.watermark.keys import Key
from jaxbench.watermark.reference import Keys, Seeds, Text, Words
from jaxbench.watermark.schemes.green_count import MAX_BIAS, GreenCount, ListScheme, list_words


class Unigram(ListScheme):
    """One fixed green list and a bias on its logits."""

    scheme: Literal["unigram"] = "unigram"
    gamma: float = Field(default=0.5, gt=0, lt=1)  # share of green tokens
    delta: float = Field(default=2.0, ge=0, le=MAX_BIAS)  # bias on green logits, nats

    device: ClassVar[str] = "unigram"
    has_fixed_list: ClassVar[bool] = True
    context_length: ClassVar[int] = 0

    def green_list(self, key: Key, vocab_size: int) -> Bool[np.ndarray, " V"]:
        """Return the green list of a key."""
        low, high = key.halves
        tokens = np.arange(vocab_size, dtype=np.uint32)
        blocks = philox.philox4x32((tokens >> 2, 0, 0, reference.site_of(self)), (low, high))
        green = np.zeros(vocab_size, bool)
        words = reference.pick_word(blocks, tokens)
        green[np.argsort(words, kind="stable")[: int(self.gamma * vocab_size)]] = True
        return green

    def text_words(self, key: Keys, text: Text) -> tuple[Words, Seeds]:
        """Return the words of the tokens of texts; their seeds are all equal."""
        keys, tokens = [key] if isinstance(key, Key) else key, text.tokens
        lists = np.stack([self.green_list(one, text.vocab_size) for one in keys])
        is_green = lists[np.arange(len(tokens))[:, None] % len(lists), tokens]
        return list_words(is_green), np.zeros((*tokens.shape, 1), np.uint32)

    def statistic(self, vocab_size: int) -> DistinctGreenCount:
        """The number of green tokens among the distinct tokens."""
        list_size = int(self.gamma * vocab_size)
        return DistinctGreenCount(self.is_green, list_size / vocab_size, list_size, vocab_size)


@dataclasses.dataclass(frozen=True)
class DistinctGreenCount(GreenCount):
    """The number of green tokens among distinct tokens: hypergeometric under the null."""

    list_size: int  # tokens on the list
    vocab_size: int

    def variance(self, num_scored: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """n gamma (1 - gamma) (V - n) / (V - 1)."""
        return num_scored * self.moments()[1] * (self.vocab_size - num_scored) / max(1, self.vocab_size - 1)

    def tail(self, total: Int[np.ndarray, " N"], num_scored: Int[np.ndarray, " N"]) -> null_distributions.Tail:
        """Tail of the hypergeometric distribution.

        Raises:
          ValueError: more distinct tokens than the vocabulary has.
        """
        if num_scored.max(initial=0) > self.vocab_size:
            most = num_scored.max()
            raise ValueError(f"unigram: {most} distinct tokens in a vocabulary of vocab_size={self.vocab_size}")
        drawn_from = {"population": self.vocab_size, "successes": self.list_size}
        return null_distributions.hypergeometric(total, num_scored, **drawn_from)
