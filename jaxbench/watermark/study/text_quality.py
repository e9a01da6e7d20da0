"""Text quality without a model: the variety of a text, and how it ended (S file)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np


class Variety(NamedTuple):
    """How much one text repeats itself."""

    distinct_1: float  # distinct words over words
    distinct_2: float  # distinct pairs over pairs
    distinct_3: float
    repetition: float  # share of 4-grams seen before in the text
    num_words: int


def distinct(items: Sequence[Hashable], n: int) -> float:
    """Return distinct n-grams over n-grams (Li et al. 2016, arXiv:1510.03055); nan for fewer than n items."""
    grams = [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
    return len(set(grams)) / len(grams) if grams else float("nan")


def variety(text: str) -> Variety:
    """Return the variety of a text's words, in lower case; nan if it is too short."""
    words = text.lower().split()
    return Variety(*(distinct(words, n) for n in (1, 2, 3)), 1.0 - distinct(words, 4), len(words))


def ending(num_tokens: Sequence[int], *, limit: int, has_ended: Sequence[bool]) -> dict[str, float]:
    """Return the mean length in tokens and the share of texts that the limit cut off."""
    lengths, ended = np.asarray(num_tokens, np.float64), np.asarray(has_ended, bool)
    if not lengths.size:
        return {"mean_tokens": float("nan"), "cap_hits": float("nan")}
    return {"mean_tokens": float(lengths.mean()), "cap_hits": float(((lengths >= limit) & ~ended).mean())}
