"""What is said of an answer, its sentences, and the passages of the context that these should rest on (S file)."""

from __future__ import annotations

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
    probability: float  # that it says what the context does not
    is_flagged: bool
    passage: Passage | None  # what it should rest on: the sentence of the context that shares most with it

    def to_dict(self) -> dict[str, Any]:
        """The sentence as JSON has it."""
        return self._asdict() | {"passage": None if self.passage is None else self.passage._asdict()}


class Span(NamedTuple):
    """A run of characters of a response that its context does not support."""

    start: int  # characters
    end: int
    text: str
    probability: float  # of its most suspicious token
    sentence: int  # number of the sentence that it begins in
    passage: Passage | None  # what it should rest on: its sentence's

    def to_dict(self) -> dict[str, Any]:
        """The span as JSON has it."""
        return self._asdict() | {"passage": None if self.passage is None else self.passage._asdict()}


class Verdict(NamedTuple):
    """What a detector says of a response."""

    probability: float  # that some of it is hallucinated
    is_hallucinated: bool
    sentences: tuple[Sentence, ...]
    spans: tuple[Span, ...]  # none where the detector has no token classifier
    num_cut: int  # tokens of the context, from its end, that did not fit the reader's window

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON has it."""
        parts = {name: [each.to_dict() for each in getattr(self, name)] for name in ("sentences", "spans")}
        return self._asdict() | parts


class Passages:
    """A context's sentences, by the words they are known by."""

    def __init__(self, context: str):
        self._spans = [Passage(a, b, context[a:b]) for a, b in sentences.sentences(context)]
        self._words = [_content(passage.text) for passage in self._spans]
        count = {word: sum(word in words for words in self._words) for word in set().union(*self._words)}
        self._weight = {word: math.log(1 + len(self._spans) / number) for word, number in count.items()}

    def nearest(self, text: str) -> Passage | None:
        """The sentence that shares most content words with a text, rare ones counting more; None where none does."""
        words = _content(text)
        shared = [sum(self._weight[word] for word in sorted(words & mine)) for mine in self._words]
        best = max(shared, default=0.0)
        return self._spans[shared.index(best)] if best > 0 else None


def _content(text: str) -> set[str]:
    return {token.key for token in lexical.tokens(text) if token.is_content}
