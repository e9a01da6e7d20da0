"""Answers that follow a grammar: a JSON schema, a regular expression, a list of choices (S file; extra `serve`).

llguidance says which tokens may come next; all others get no probability. A request carries its grammar as a text, its
sequence a Constraint, which hears every token of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

MAX_CHARACTERS = 100_000  # of a grammar


def of_schema(schema: dict[str, Any] | bool) -> str:
    """Grammar of JSON values that a schema admits.

    Raises:
      ValueError: the schema cannot be followed; the message says why.
    """
    return _checked("json_schema", _matcher().grammar_from_json_schema(json.dumps(schema)))


def of_regex(regex: str) -> str:
    """Grammar of texts that match a regular expression as a whole.

    Raises:
      ValueError: it is none.
    """
    return _checked("regex", _matcher().grammar_from_regex(regex))


def of_choices(choices: Sequence[str]) -> str:
    """Grammar of a few texts.

    Raises:
      ValueError: there is none, or one is empty.
    """
    if not choices or not all(choices):
        raise ValueError(f"choice: {len(choices)} texts; wanted at least one, and none empty")
    lark = "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
    return _checked("choice", _matcher().grammar_from_lark(lark))


def _matcher() -> Any:
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise ValueError(f"constrained answers: {error}; pip install 'jaxbench[serve]'") from error
    return LLMatcher


def _checked(name: str, grammar: str) -> str:
    if len(grammar) > MAX_CHARACTERS:
        raise ValueError(f"{name}: a grammar of {len(grammar)} characters; at most {MAX_CHARACTERS} are taken")
    is_error, messages = _matcher().validate_grammar_with_warnings(grammar)
    if is_error:
        raise ValueError(f"{name}: {' '.join(messages[0].split())[:300]}")
    return grammar


class Grammars:
    """Grammars over one tokenizer's tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        """tokenizer: jaxbench.pretrained's. vocab_size: of the logits, which may be more than the tokenizer's."""
        from llguidance import LLTokenizer

        _matcher()
        self.vocab_size = vocab_size
        self._tokens = LLTokenizer(tokenizer.core.to_str(), n_vocab=vocab_size, eos_token=list(tokenizer.end_ids))

    def begin(self, grammar: str, answer: Iterable[int] = ()) -> Constraint:
        """The state of an answer that follows a grammar.

        Raises:
          ValueError: the grammar is none.
        """
        matcher = _matcher()(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"grammar: {' '.join(matcher.get_error().split())[:300]}")
        made = Constraint(matcher, self.vocab_size)
        for token in answer:
            made.accept(token)
        return made


class Constraint:
    """Which tokens may come next in one answer."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher
        self._bits = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self._vocab_size = vocab_size

    def masked(self, logits: Float[np.ndarray, " V"]) -> Float[np.ndarray, " V"]:
        """Logits with -inf for tokens that may not come.

        Raises:
          ValueError: no token may.
        """
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bits)
        allowed = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little")[: self._vocab_size].astype(bool)
        if not allowed.any():
            raise ValueError(f"grammar: none of {self._vocab_size} tokens may come next ({self._matcher.get_error()})")
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """Take the next token.

        Raises:
          ValueError: it may not come.
        """
        if not self._matcher.consume_token(token):
            raise ValueError(f"grammar: token {token} may not come next ({self._matcher.get_error()[:200]})")

    @property
    def is_over(self) -> bool:
        """True where nothing more may come."""
        return self._matcher.is_stopped()
