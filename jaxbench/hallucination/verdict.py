"""Verdicts on an answer and its sentences, with the context passages that should support them (S file)."""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

from jaxbench.hallucination import lexical, sentences


class Passage(NamedTuple):
    """A sentence of the context."""

    start: int  # characters
    end: int
    text: str


class Sentence(NamedTuple):
    """A sentence of a response."""

    start: int  # characters
    end: int
    text: str
    probability: float  # that the context does not support it
    is_flagged: bool
    passage: Passage | None  # the context sentence that shares most with it, which should support it

    def to_dict(self) -> dict[str, Any]:
        """Return the sentence as a dict for JSON."""
        return self._asdict() | {"passage": None if self.passage is None else self.passage._asdict()}


class Span(NamedTuple):
    """A run of characters of a response that its context does not support."""

    start: int  # characters
    end: int
    text: str
    probability: float  # of its most suspicious token
    sentence: int  # index of the sentence that it begins in
    passage: Passage | None  # that of its sentence

    def to_dict(self) -> dict[str, Any]:
        """Return the span as a dict for JSON."""
        return self._asdict() | {"passage": None if self.passage is None else self.passage._asdict()}


class Verdict(NamedTuple):
    """A detector's verdict on a response."""

    probability: float  # that some of it is hallucinated
    is_hallucinated: bool
    sentences: tuple[Sentence, ...]
    spans: tuple[Span, ...]  # empty if the detector has no token classifier
    num_cut: int  # tokens of the context, from its end, that did not fit the reader's window

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as a dict for JSON."""
        parts = {name: [each.to_dict() for each in getattr(self, name)] for name in ("sentences", "spans")}
        return self._asdict() | parts


class Passages:
    """A context's sentences, indexed by their content words."""

    def __init__(self, context: str):
        self._spans = [Passage(a, b, context[a:b]) for a, b in sentences.sentences(context)]
        self._words = [_content(passage.text) for passage in self._spans]
        count = collections.Counter(word for words in self._words for word in words)
        self._weight = {word: math.log(1 + len(self._spans) / number) for word, number in count.items()}

    def nearest(self, text: str) -> Passage | None:
        """Return the sentence sharing most content words with a text, rare words weighing more; None if none does."""
        words = _content(text)
        shared = [sum(self._weight[word] for word in sorted(words & mine)) for mine in self._words]
        best = max(shared, default=0.0)
        return self._spans[shared.index(best)] if best > 0 else None


def _content(text: str) -> set[str]:
    return {token.key for token in lexical.tokens(text) if token.is_content}
