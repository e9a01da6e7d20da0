"""Calls of tools in answers: a model's notation of them, learned from its template, and found in its text (S file).

A template shows earlier calls in the notation that the model was trained with. Known are notations whose calls are JSON
objects with name and arguments, whatever the keys and whatever stands around them: those of Qwen 2.5 and 3, Hermes,
Llama 3, Mistral and others. Calls of other models stay part of their text.
"""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jaxbench.generation.pieces import held_back
from jaxbench.serve import constraint

_USER = {"role": "user", "content": "What is there?"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "described", "description": "Tells.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "What."}}},
    },
}  # fmt: skip
_ARGUMENTS = {"key": "value"}
_TEXT = "~"  # no notation begins like it
_BOUNDS_BEFORE = r"[\s<\[({]"  # what begins a tag
_NAMES = "first_called", "second_called"
_ARGUMENT_KEYS = "arguments", "parameters"  # models confuse them
_BETWEEN = " \t\r\n;,"  # calls without a notation of their own
_LONGEST_LITERAL = 10  # characters of a JSON literal that may be incomplete, such as -Infinity
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write JSON


class Notation(NamedTuple):
    """How a model writes calls."""

    keys: tuple[str, ...]  # of a call's object, in order
    name: str  # key of the function's name
    arguments: str  # key of its arguments
    opening: str  # visible text in front of a call; "" = none, and calls begin an answer
    closing: str  # visible text behind it
    prefill: str | None  # what a template writes between a prompt and its answer's first call; None = not known
    opening_parts: tuple[str | int, ...] = ()  # the same as texts and added tokens, also those that are not visible
    closing_parts: tuple[str | int, ...] = ()
    is_listed: bool = False  # calls are items of one list

    def grammar(
        self, functions: Sequence[dict[str, Any]], content: dict[str, Any] | None = None, *, is_forced: bool = False,
        reasoning: constraint.Reasoning | None = None,
    ) -> str:  # fmt: skip
        """Return the grammar of answers whose calls follow the schemas of some functions, described as requests do.

        content: the JSON schema of an answer without calls; None = any text. is_forced: the answer is one call, and the
        prompt ends with what is in front of it. reasoning: what may be in front of calls or a content with a schema.

        Raises:
          ValueError: a schema cannot be followed.
        """
        how = {"opening": self.opening_parts, "closing": self.closing_parts, "is_listed": self.is_listed}
        calls = [self._of_function(each) for each in functions]
        return constraint.of_calls(
            calls, "tools", **how, content=content, is_forced=is_forced, is_first=not self.opening, reasoning=reasoning
        )

    def _of_function(self, function: dict[str, Any]) -> tuple[str, str, dict[str, Any], str]:
        """Return the name, what is in front of a call's arguments, their JSON schema, and what is behind them."""
        given = function.get("parameters", {})  # None = not followed
        parameters = {"type": "object", "additionalProperties": False} if given == {} else given or {}
        if "$ref" not in parameters:  # which takes no other condition beside it
            parameters = {"type": "object"} | parameters
        name = f"{json.dumps(self.name)}: {json.dumps(function['name'], ensure_ascii=False)}"
        before, behind = f"{{{json.dumps(self.arguments)}: ", "}"
        if self.keys.index(self.name) < self.keys.index(self.arguments):
            before = f"{{{name}, {before[1:]}"
        else:
            behind = f", {name}}}"
        return function["name"], before, parameters | {"x-guidance": _SEPARATORS}, behind


class Call(NamedTuple):
    """A call in an answer."""

    id: str
    name: str
    arguments: str  # JSON text of an object

    @property
    def shown(self) -> dict[str, Any]:
        """The call as OpenAI's clients read it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def learned(tokenizer: Any, variables: Mapping[str, Any] = {}) -> Notation | None:
    """Return the notation of a tokenizer's template; None = its calls are no JSON objects, or it shows none.

    variables: of the template; they may change how an answer begins.
    """
    return _learned(tokenizer, json.dumps(variables, sort_keys=True))


@functools.lru_cache(maxsize=8)
def _learned(tokenizer: Any, variables: str) -> Notation | None:
    render = functools.partial(tokenizer.chat, tools=[_TOOL], variables=json.loads(variables))
    try:
        prompt = render([_USER])
        one, plain = _rendered(render, 1), _rendered(render, 0)
    except Exception:  # a template is third-party code, and may raise anything
        return None
    found = _object(one, _NAMES[0])
    if found is None:
        return None
    start, end, keys, name, arguments = found
    front = one[:start]
    before = front[max(_shared(front, prompt), _shared(front, plain)) :]
    after = one[end:].removesuffix(plain[plain.rfind(_TEXT) + len(_TEXT) :])  # without the end of the turn
    is_listed = before.rstrip().endswith("[")
    opening, closing = before, after
    if is_listed:
        opening, closing = before.rstrip()[:-1], after.lstrip().removeprefix("]")
    elif (between := _between(render)) is not None:
        closing = after[: _shared(after, between)]
        opening = before[len(before) - _shared(before[::-1], between[::-1], _BOUNDS_BEFORE) :]
    opens = parts(tokenizer, opening)
    closes = [each for each in parts(tokenizer, closing) if _is_visible(tokenizer, each)]
    if opens and isinstance(opens[-1], int) and _is_visible(tokenizer, opens[-1]):
        opens = opens[-1:]  # the last token suffices: reasoning may stand in front of it
        opening = tokenizer.decode(opens)
    return Notation(
        keys, name, arguments, _visible(tokenizer, opening), _visible(tokenizer, closing),
        front[len(prompt) :] if front.startswith(prompt) else None, tuple(opens), tuple(closes), is_listed,
    )  # fmt: skip


def _shared(text: str, other: str, bounds: str = r"[\s>\])}]") -> int:
    """Return the length of what two texts begin with, without a part of a tag at its end; bounds: what ends a tag."""
    length = len(os.path.commonprefix([text, other]))
    if length in (len(text), len(other)):
        return length
    return max((each.end() for each in re.finditer(bounds, text[:length])), default=0)


def _between(render: Callable[..., str]) -> str | None:
    """Return what a template writes between two calls; None = it does not take two."""
    try:
        two = _rendered(render, 2)
        (_, end, *_), (start, *_) = _object(two, _NAMES[0]), _object(two, _NAMES[1])
    except Exception:  # see above
        return None
    return two[end:start]


def _rendered(render: Callable[..., str], count: int) -> str:
    """Render an answer of some calls; of none, one of a text."""
    calls = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": dict(_ARGUMENTS)}}
        for i, name in enumerate(_NAMES[:count])
    ]
    answer = {"role": "assistant", "content": ""} | ({"tool_calls": calls} if calls else {"content": _TEXT})
    return render([_USER, answer], add_generation_prompt=False)


def _object(text: str, called: str) -> tuple[int, int, tuple[str, ...], str, str] | None:
    """Find the innermost JSON object with a function's name and arguments: start, end, keys, key of either."""
    start = text.rfind("{", 0, text.rfind(called) + 1)
    while start >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            value, end = None, start
        if isinstance(value, dict) and called in value.values() and _ARGUMENTS in value.values():
            key_of = {json.dumps(each): key for key, each in value.items()}
            return start, end, tuple(value), key_of[json.dumps(called)], key_of[json.dumps(_ARGUMENTS)]
        start = text.rfind("{", 0, start)
    return None


def _visible(tokenizer: Any, text: str) -> str:
    """Return what a text's tokens are decoded to in an answer, where special tokens are left out."""
    return tokenizer.decode(tokenizer.encode(text, add_special=False), skip_special=True).strip()


def parts(tokenizer: Any, text: str) -> list[str | int]:
    """Cut a text into its added tokens and what is between them, without white space at its ends."""
    core = getattr(tokenizer, "core", None)
    added = {} if core is None else {token.content: id for id, token in core.get_added_tokens_decoder().items()}
    longest_first = sorted(map(re.escape, added), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(longest_first)})", text.strip()) if added else [text.strip()]
    return [added.get(piece, piece) for piece in pieces if piece]


def _is_visible(tokenizer: Any, part: str | int) -> bool:
    return bool(_visible(tokenizer, part) if isinstance(part, str) else tokenizer.decode([part], skip_special=True))


def _calls(value: Any, notation: Notation, names: Collection[str]) -> list[tuple[str, str]]:
    """Return the calls that a JSON value stands for; [] = it is no call."""
    found = []
    for each in value if isinstance(value, list) else [value]:
        name = each.get(notation.name) if isinstance(each, dict) else None
        given = (
            next((each[key] for key in (notation.arguments, *_ARGUMENT_KEYS) if key in each), None) if name else None
        )
        if given is None and notation.opening:  # of a function without any
            given = {}
        if not isinstance(name, str) or not isinstance(given, dict) or not (notation.opening or name in names):
            return []
        if _has_surrogate(name):
            return []
        try:
            found.append((name, _written(given)))
        except RecursionError:  # deeper than Python writes, though not than it reads
            return []
    return found


def _written(value: Any) -> str:
    """Write a call's arguments as JSON: their numbers as the model did, and half characters as escapes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_written(key)}: {_written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, _Number):
        return value.text
    # no answer can be sent with a lone surrogate, which a model can write as an escape
    return json.dumps(value, ensure_ascii=isinstance(value, str) and _has_surrogate(value))


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


class _Number(float):
    """A number that keeps its text: one that a float cannot hold would be rounded, or no number of JSON."""

    def __new__(cls, text: str) -> _Number:
        made = super().__new__(cls, text)
        made.text = text
        return made


class Finder:
    """Finds the calls in one answer while its text comes; a call is given whole, once it is complete.

    What only looks like a call is content. White space around calls belongs to the notation.
    """

    def __init__(self, notation: Notation, names: Collection[str], *, most: int | None, is_begun: bool):
        """names: of the functions that there are. most: number of calls that are taken; what follows them is dropped.

        is_begun: the prompt ends with the opening of a call.
        """
        self._notation, self._names, self._most = notation, names, most
        self._is_next = is_begun or not notation.opening  # a call may begin without an opening
        self._is_behind = False  # the closing of the last call may come
        self._text, self._shown = "", 0  # what is not decided; how much of it was told, as content in any case
        self._nesting = _Nesting()
        self.calls: list[Call] = []

    def update(self, text: str, *, is_whole: bool) -> tuple[str, list[Call]]:
        """Take further text; return the content and the calls that became certain; is_whole: no more text comes."""
        self._text += text
        content, known = "", len(self.calls)
        while not self.is_full and (place := self._next(is_whole)) is not None:
            before, start = place
            value, end = self._value(start, is_whole)
            if end is None:
                return content + self._told(self._in_front(before)), self.calls[known:]
            found = _calls(value, self._notation, self._names)
            content += self._told(self._in_front(before) if found else end)
            self.calls += [Call(_new_id(), *each) for each in found]
            self._is_behind, self._is_next = bool(found), bool(found) and not self._notation.opening
            self._text, self._shown, self._nesting = self._text[end:], 0, _Nesting()
        if self.is_full:
            self.calls, self._text = self.calls[: self._most], ""
        return content + self._told(self._rest(is_whole)), self.calls[known:]

    @property
    def is_full(self) -> bool:
        """True where the answer has all calls that are taken, and its further text is dropped."""
        return self._most is not None and len(self.calls) >= self._most

    def _told(self, end: int) -> str:
        """Return the text up to a place, but for what was told before."""
        begin, self._shown = self._shown, max(self._shown, end)
        return self._text[begin:end]

    def _in_front(self, place: int) -> int:
        """Return where content in front of a call ends."""
        front = self._text[:place]
        return len(front.rstrip()) if not self.calls or front.strip(_BETWEEN) else 0

    def _rest(self, is_whole: bool) -> int:
        """Return where content ends that no call follows so far."""
        kept = 0 if is_whole else held_back(self._text, [self._notation.opening])
        rest = self._text[: len(self._text) - kept]
        if self._is_behind or (self.calls and not rest.strip(_BETWEEN)):
            return 0
        return len(rest if is_whole else rest.rstrip())

    def _next(self, is_whole: bool) -> tuple[int, int] | None:
        """Return where the next call's notation and its value may begin; None = nowhere."""
        text, closing = self._text, self._notation.closing
        if self._is_behind:
            begin = _SPACE.match(text).end()
            if not is_whole and len(text) - begin < len(closing) and closing.startswith(text[begin:]):
                return None
            self._text = text = text[begin + len(closing) :] if closing and text.startswith(closing, begin) else text
            self._is_behind = False
        if self._is_next:
            start = len(text) - len(text.lstrip(_BETWEEN if self.calls else None))
            return (0, start) if text[start : start + 1] in ("{", "[") else None
        place = text.find(self._notation.opening) if self._notation.opening else -1
        return (place, place + len(self._notation.opening)) if place >= 0 else None

    def _value(self, start: int, is_whole: bool) -> tuple[Any, int | None]:
        """Return the JSON value at a place and its end; no value ends where it began, and None = it may be incomplete.

        An incomplete one is not parsed with every further token, or a long one would take time that is quadratic.
        """
        text = self._text
        begin = _SPACE.match(text, start).end()
        if text[begin : begin + 1] not in ("{", "["):  # no call, or nothing yet
            return None, None if begin == len(text) and not is_whole else start
        if not is_whole and not self._nesting.is_worth(text, begin):
            return None, None
        try:
            return _DECODER.raw_decode(text, begin)
        except json.JSONDecodeError as error:
            is_cut = len(text) - error.pos <= _LONGEST_LITERAL or error.msg.startswith("Unterminated string")
            return None, None if is_cut and not is_whole else start
        except (ValueError, RecursionError):
            return None, start


class _Nesting:
    """Tells when it is worth to parse a JSON value that is coming: if its brackets close, or it has grown by a part."""

    def __init__(self) -> None:
        self._at, self._next = -1, 0
        self._depth, self._is_text, self._is_escaped = 0, False, False

    def is_worth(self, text: str, begin: int) -> bool:
        """Return whether to parse; text: all that came; begin: the place of the value in it, always the same."""
        has_closed = False
        for letter in text[max(self._at, begin) :]:
            if self._is_text:
                self._is_text = letter != '"' or self._is_escaped
                self._is_escaped = letter == "\\" and not self._is_escaped
            elif letter == '"':
                self._is_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                has_closed |= self._depth <= 0
        self._at = len(text)
        if not has_closed and self._depth > 0 and len(text) < self._next:
            return False
        self._next = len(text) + (len(text) - begin) // 8
        return True


def _new_id() -> str:
    """Return a new call's id: nine letters and digits, as Mistral's templates ask."""
    return secrets.token_hex(5)[:9]


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


_SPACE = re.compile(r"\s*")
# not strict: line breaks in a string
_DECODER = json.JSONDecoder(strict=False, parse_float=_Number, parse_constant=_no_number)
