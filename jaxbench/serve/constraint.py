"""Answers that follow a grammar: a JSON schema, a regular expression, a list of choices (S file; extra `serve`).

llguidance computes which tokens may come next; all others get no probability. A request carries its grammar as text;
its state carries a Constraint, which takes every token of the answer.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

MAX_CHARACTERS = 100_000  # of a grammar
MOST_BEGUN = 16  # grammars that are kept as they begin
MAX_CHECK_S = 0.5  # CPU time to begin an answer: the engine does it again, and a step of all requests waits for it
BYTES_AHEAD = 16  # of a matching text, tried before a grammar is accepted: one that is too large mostly fails there
# Between two parts of a JSON value: room for a line and its indentation. Without a limit a model that has begun with
# white space may write nothing else until the answer's last token.
SPACED = {"whitespace_pattern": r"[ \t\r\n]{0,64}"}
_IN_LARK = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}  # a regular expression there stands between slashes, in one line


class Unfollowed(ValueError):
    """An answer cannot continue under its grammar: an error of the request. The message begins "grammar: "."""


class Reasoning(NamedTuple):
    """Free text between two tags in front of an answer that follows a grammar."""

    opening: str
    closing: str
    is_begun: bool  # the prompt ends with the opening; else the reasoning may be left out
    tokens: tuple[int | None, int | None] = (None, None)  # the tags that are tokens, which stand for themselves

    @property
    def rules(self) -> list[str]:
        """The rule `thought`, which leaves nothing out, and those that it needs beside SPACE and TEXT."""
        opens, closes = self.tokens
        # one terminal with the space in front, as both may begin an answer, too, up to the tag's last character
        opening = "[ \\n]{0,2}" + re.escape(self.opening)
        begun = "OPENING" if opens is None else f"SPACE <[{opens}]>"
        lines = [f"thought: {'' if self.is_begun else begun} told SPACE", f"OPENING: {_slashed(opening)}"]
        if closes is None:  # the reasoning ends at the first closing
            return [*lines, f"told[lazy]: TEXT {_literal(self.closing)}"]
        # nor do other tokens spell the closing, where readers of the text would see the reasoning end
        spelled = f"(.|\\n)*{re.escape(self.closing)}(.|\\n)*"
        return [*lines, f"told: UNCLOSED <[{closes}]>", rf"UNCLOSED: /(.|\n)*/ & ~{_slashed(spelled)}"]

    @property
    def excluded(self) -> str:
        """What is written behind a terminal that may not begin with the opening; "" = the prompt has it."""
        return "" if self.is_begun else " & ~" + _slashed(f"\\s*{re.escape(self.opening)}(.|\\n)*")

    @property
    def as_text(self) -> Reasoning:
        """The same with texts in place of tokens, which no check knows."""
        return self._replace(tokens=(None, None))


def told(error: str | None) -> str | None:
    """Return what an engine's error says about a request's grammar; None = the error is about something else.

    error: as it comes from the engine's process, where exceptions are turned into text.
    """
    said = (error or "").removeprefix(f"{Unfollowed.__name__}: ")
    return said if said.startswith("grammar: ") else None


def of_schema(schema: dict[str, Any] | bool, name: str = "json_schema", reasoning: Reasoning | None = None) -> str:
    """Return the grammar of JSON values that a schema admits; name: of the field that has it, for messages.

    reasoning: what may be in front of the value.

    Raises:
      ValueError: the schema cannot be followed; the message says why.
    """
    _check_unicode(name, json.dumps(schema, ensure_ascii=False))
    alone = _checked(name, _matcher().grammar_from_json_schema(_spaced(schema)))
    return alone if reasoning is None else _behind(name, reasoning, f"%json {_spaced(schema)}")


def _spaced(schema: dict[str, Any] | bool) -> str:
    """Write a schema as JSON, with a limit on white space unless it says itself what separates values."""
    schema = {} if schema is True else schema
    if schema is False or "x-guidance" in schema:
        return json.dumps(schema)
    return json.dumps(schema | {"x-guidance": SPACED})


def of_calls(
    functions: Sequence[tuple[str, str, dict[str, Any], str]], name: str, *, opening: Sequence[str | int] = (),
    closing: Sequence[str | int] = (), is_listed: bool = False, is_forced: bool = False,
    is_first: bool = False, content: dict[str, Any] | None = None, reasoning: Reasoning | None = None,
) -> str:  # fmt: skip
    """Return the grammar of answers whose calls of tools follow schemas, and that may have none.

    functions: of each its name, the text in front of its arguments, their JSON schema, the text behind them. name: of
    the field that has them, for messages. opening, closing: texts, and tokens that stand for themselves. is_listed:
    calls are items of one list. is_forced: the answer is one call without opening and closing. is_first: no text is in
    front of a call. content: the JSON schema of an answer without calls; None = any text. reasoning: what may be in
    front of calls or a content with a schema.

    Raises:
      ValueError: a schema cannot be followed; the message says why.
    """
    began = time.thread_time()
    for function, before, schema, behind in functions:  # each alone: what is tried of the whole may have no arguments
        _check_unicode(name, before + behind)
        of_schema(schema, f"{name}: function {function[:60]!r}")
        if (seconds := time.thread_time() - began) > MAX_CHECK_S:
            said = f"{len(functions)} functions are too large to be followed ({seconds:.1f} s to begin some of them; "
            raise ValueError(f"{name}: {said}at most {MAX_CHECK_S} are taken)")
    if content is not None:
        of_schema(content)
    lines = _functions(functions)
    if is_forced:
        return _checked(name, _matcher().grammar_from_lark("\n".join(["start: item", *lines])))
    lines.append("body: SPACE " + ('"[" SPACE item ("," SPACE item)* SPACE "]"' if is_listed else "item"))
    texts = [*map(_shown, (*opening, *closing))]
    shown = None if reasoning is None else reasoning.as_text
    plain = _answers(lines, texts[: len(opening)], texts[len(opening) :], content, shown, is_first=is_first)
    _checked(name, _matcher().grammar_from_lark(plain))  # tokens are known to no check
    return _matcher().grammar_from_lark(_answers(lines, opening, closing, content, reasoning, is_first=is_first))


def _shown(part: str | int) -> str:
    """Return a text that stands for a token."""
    return part if isinstance(part, str) else f"<{part}>"


def _behind(name: str, reasoning: Reasoning, answer: str, *rules: str) -> str:
    """Return the grammar of an answer behind its reasoning; answer: a rule's right side; rules: that it needs."""
    start = "start: thought answer" + " | answer" * (not reasoning.is_begun)
    fixed = [start, f"answer: {answer}", *rules, r"SPACE: /[ \n]{0,2}/", r"TEXT: /(.|\n)*/"]
    plain, made = ("\n".join([*fixed, *each.rules]) for each in (reasoning.as_text, reasoning))
    _checked(name, _matcher().grammar_from_lark(plain))
    return _matcher().grammar_from_lark(made)


def _functions(functions: Sequence[tuple[str, str, dict[str, Any], str]]) -> list[str]:
    """Write the rules of one call in llguidance's variant of Lark.

    The arguments are a JSON grammar of their own, as a schema's references are resolved in the whole of it.
    """
    lines = ["item: " + " | ".join(f"item_{i}" for i in range(len(functions)))]
    for i, (_, before, schema, behind) in enumerate(functions):
        lines += [f"item_{i}: {_literal(before)} arguments_{i} {_literal(behind)}"]
        lines += [f"arguments_{i}: %json {_spaced(schema)}"]
    return lines


def _literal(text: str) -> str:
    """Write a text in Lark; JSON does not escape U+007F, and llguidance's lexer takes it only escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _slashed(regex: str) -> str:
    """Write a regular expression in Lark."""
    return "/" + re.sub(r"\\.|/|\n", lambda found: _IN_LARK.get(found[0], found[0]), regex, flags=re.DOTALL) + "/"


def _terminal(part: str | int) -> str:
    """Write a text, or a token that stands for itself, in Lark."""
    return f"<[{part}]>" if isinstance(part, int) else _literal(part)


def _answers(
    lines: Sequence[str], opening: Sequence[str | int], closing: Sequence[str | int], content: dict[str, Any] | None,
    reasoning: Reasoning | None, *, is_first: bool,
) -> str:  # fmt: skip
    """Write the grammar of answers with and without calls."""
    first, *rest = [_terminal(each) for each in opening] or [""]
    end = " ".join(map(_terminal, closing))
    inside = " ".join([*rest, "body", *(["SPACE", end] if end else [])])
    lines = [*lines, r"SPACE: /[ \n]{0,2}/", r"TEXT: /(.|\n)*/", *([] if reasoning is None else reasoning.rules)]
    excluded = "" if reasoning is None else reasoning.excluded
    if content is not None:
        lines += [f"answer: content | ({first} {inside} SPACE)+", f"content: %json {_spaced(content)}"]
        fresh = "answer"
    elif is_first:
        other = r"/[ \n]*([^ \n{\[](.|\n)*)?/"
        lines += ["answer: OTHER | call", f"call: {first} {inside}", f"OTHER: {other}", f"FRESH: {other}{excluded}"]
        fresh = "FRESH | call"
    else:
        lazy = "" if isinstance(opening[0], int) else "[lazy]"
        lines += ["answer: call* tail", "tail: TEXT", f"head{lazy}: TEXT {first}", f"call: head {inside}"]
        lines += [rf"FRESH: /(.|\n)*/{excluded}", f"front{lazy}: FRESH {first}"]
        fresh = f"front {inside} answer | FRESH"
    if reasoning is None:
        return "\n".join(["start: answer", *lines])
    # an answer without reasoning begins with `fresh`: what begins with the opening has its calls behind the closing
    return "\n".join(["start: thought answer" + f" | {fresh}" * (not reasoning.is_begun), *lines])


def of_regex(regex: str, reasoning: Reasoning | None = None) -> str:
    """Return the grammar of texts that match a regular expression as a whole.

    reasoning: what may be in front; an expression that has its opening tag says itself what is there.

    Raises:
      ValueError: it is invalid, matches only the empty text or nothing, or is too large.
    """
    _check_unicode("regex", regex)
    alone = _checked("regex", _matcher().grammar_from_regex(regex))
    if reasoning is None or (not reasoning.is_begun and reasoning.opening in regex):
        return alone
    return _behind("regex", reasoning, "ANSWER", f"ANSWER: {_slashed(regex)}{reasoning.excluded}")


def of_choices(choices: Sequence[str], reasoning: Reasoning | None = None) -> str:
    """Return the grammar of a few texts, one of which is the answer; reasoning: what may be in front of it.

    Raises:
      ValueError: there is no text, or one is empty or not valid Unicode.
    """
    if not choices or not all(choices):
        raise ValueError(f"choice: {len(choices)} texts; wanted at least one, and none empty")
    for number, each in enumerate(choices):
        _check_unicode(f"choice.{number}", each)
    rule = " | ".join(map(_literal, choices))
    alone = _checked("choice", _matcher().grammar_from_lark(f"start: {rule}"))
    return alone if reasoning is None else _behind("choice", reasoning, rule)


def _matcher() -> Any:
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise ValueError(f"constrained answers: {error}; pip install -e '.[serve]'") from error
    return LLMatcher


def _checked(name: str, grammar: str) -> str:
    if len(grammar) > MAX_CHARACTERS:
        raise ValueError(f"{name}: a grammar of {len(grammar)} characters; at most {MAX_CHARACTERS} are taken")
    is_error, messages = _matcher().validate_grammar_with_warnings(grammar)
    if is_error:
        raise ValueError(f"{name}: {_short(messages[0])}")
    problem = _problem(grammar)
    if problem:
        raise ValueError(f"{name}: {problem}")
    return grammar


def _check_unicode(name: str, text: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"{name} has a lone surrogate, which is no Unicode text: {text[:60]!a}")


def _short(message: str) -> str:
    """Return llguidance's message in one line, without the state and the grammar that follow it."""
    return " ".join(message.partition("\n<")[0].split())[:300]


@functools.lru_cache(maxsize=64)  # clients send the same schema again and again
def _problem(grammar: str) -> str:
    """Return why no answer can begin under a grammar; "" = one can.

    Checked with bytes as tokens instead of the model's: they need no preparation, and the grammar is the same.
    """
    from llguidance import LLTokenizer

    began, tokens = time.thread_time(), LLTokenizer("byte")
    matcher = _matcher()(tokens, grammar, log_level=0)
    for number in range(BYTES_AHEAD):
        mask = 0 if matcher.is_error() else int.from_bytes(matcher.compute_bitmask(), "little")
        seconds = time.thread_time() - began
        if matcher.is_error() and "NoExtension" in matcher.get_error():
            return "no text follows it"
        if matcher.is_error():
            return f"it is too large to be followed ({_short(matcher.get_error())})"
        if seconds > MAX_CHECK_S:
            return f"it is too large to be followed ({seconds:.1f} s to begin it; at most {MAX_CHECK_S} are taken)"
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if not allowed and not number:
            return "no text but the empty one follows it"
        if not allowed:
            break
        matcher.consume_token(max(allowed, key=lambda byte: (byte < 128, byte)))  # a failure is seen in the next round
    return ""


class Grammars:
    """Grammars over one tokenizer's tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        """tokenizer: jaxbench.pretrained's. vocab_size: of the logits, which may be more than the tokenizer's."""
        from llguidance import LLTokenizer

        _matcher()
        self.vocab_size = vocab_size
        self._tokens = LLTokenizer(tokenizer.core.to_str(), n_vocab=vocab_size, eos_token=list(tokenizer.end_ids))
        # answers to a request, and most requests of a client, follow one grammar; all answers wait while one is built
        self._begun = functools.lru_cache(maxsize=MOST_BEGUN)(self._beginning)

    def begin(self, grammar: str, answer: Iterable[int] = ()) -> Constraint:
        """Return the state of an answer that follows a grammar; answer: tokens that it has already.

        Raises:
          Unfollowed: the grammar is invalid, or the answer does not follow it.
        """
        made = Constraint(self._begun(grammar).deep_copy(), self.vocab_size)
        for token in answer:
            made.accept(token)
        return made

    def _beginning(self, grammar: str) -> Any:
        matcher = _matcher()(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise Unfollowed(f"grammar: {_short(matcher.get_error())}")
        return matcher


class Constraint:
    """Which tokens may come next in one answer."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher
        self._bits = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self._vocab_size = vocab_size

    def masked(self, logits: Float[np.ndarray, " V"]) -> Float[np.ndarray, " V"]:
        """Return the logits with -inf for tokens that may not come next.

        Raises:
          Unfollowed: no token may come next, or the grammar is too large from here on.
        """
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bits)
        if self._matcher.is_error():  # its mask would then allow only an end, in the middle of a text
            raise Unfollowed(f"grammar: the answer cannot go on ({_short(self._matcher.get_error())})")
        allowed = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little")[: self._vocab_size].astype(bool)
        if not allowed.any():
            raise Unfollowed(f"grammar: none of {self._vocab_size} tokens may come next")
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """Take the next token.

        Raises:
          Unfollowed: the token may not come next.
        """
        if not self._matcher.consume_token(token):
            said = _short(self._matcher.get_error())
            wrong = "the answer cannot go on" if said.startswith("lexer") else f"token {token} may not come next"
            raise Unfollowed(f"grammar: {wrong} ({said})")

    @property
    def is_over(self) -> bool:
        """True where no further token may come."""
        return self._matcher.is_stopped()
