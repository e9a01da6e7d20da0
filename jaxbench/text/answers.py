"""Score answers against right ones, as SQuAD does (S file).

Source: the official evaluation of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250; 2018, arXiv:1806.03822).
"""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Sequence

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Convert a text to lower case, without punctuation and articles, with single spaces between words."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, right: Sequence[str]) -> float:
    """1.0 if an answer, normalized, is one of the right ones (or empty, if there are none), else 0.0."""
    return float(any(normalized(answer) == each for each in _normalized(right)))


def f1(answer: str, right: Sequence[str]) -> float:
    """F1 (harmonic mean of precision and recall) of an answer's words, the best over the right ones, 0 to 1."""
    return max(_f1(normalized(answer).split(), each.split()) for each in _normalized(right))


def _normalized(right: Sequence[str]) -> list[str]:
    """Right answers, normalized, without those of which nothing is left, as "The": no answer is not right for them."""
    return [words for each in right if (words := normalized(each))] or [""]


def _f1(words: list[str], right: list[str]) -> float:
    if not words or not right:
        return float(words == right)
    common = (collections.Counter(words) & collections.Counter(right)).total()
    return 2 * common / (len(words) + len(right))
