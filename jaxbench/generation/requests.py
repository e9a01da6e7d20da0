"""Requests to continue as token ids: a prompt, messages, or a file with one request per line (S file)."""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench.pretrained.chat_template import REASONING

WRITTEN = ("row", "run", "text", "ids", "prompt_tokens", "ended")  # keys that an output adds to a line's own
ROLES = ("system", "developer", "user", "assistant", "tool")  # developer: a newer name of system, which templates miss
MOST_DEPTH = 100  # of nested objects and lists: writing a row meets Python's recursion limit at some 500
WANTED = '{"prompt": TEXT} or {"messages": [{"role": ..., "content": ...}, ...]}'


class Request(NamedTuple):
    """One line of a file."""

    row: int  # number of the request, from 0; selects the random stream of its tokens
    place: str  # file and line, for messages
    fields: dict[str, Any]  # as the line has them
    ids: list[int]
    is_chat: bool  # ids are messages in the model's template, so that the continuation is a message


def check_text(text: str, place: str) -> str:
    """Check that a text is non-empty Unicode, and return it.

    Raises:
      ValueError: it is empty, or not Unicode text.
    """
    if not text:
        raise ValueError(f"{place} is empty ({text!r}), wanted a text")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"{place} has a lone surrogate, which is no Unicode text: {text[:60]!a}")
    return text


def prompt_ids(tokenizer: Any, text: str, place: str) -> list[int]:
    """Ids of a plain prompt.

    Raises:
      ValueError: it is empty, not Unicode text, or has no token in the vocabulary.
    """
    ids = tokenizer.encode(check_text(text, place))
    if not ids:
        raise ValueError(f"{place}: {text[:60]!r} has no token in this model's vocabulary")
    return ids


def template_role(role: str) -> str:
    """Role of a message by the name that chat templates know."""
    return "system" if role == "developer" else role


def message_ids(tokenizer: Any, messages: Sequence[dict[str, str]], place: str, system: str | None = None) -> list[int]:
    """Ids of messages in the model's chat template, up to where its answer begins.

    system: message put in front if the messages do not begin with a system message.

    Raises:
      ValueError: the model has no template, or its template refuses the messages or makes no token of them.
    """
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    try:
        ids = tokenizer.encode(tokenizer.chat(messages), add_special=False)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    if not ids:
        raise ValueError(f"{place}: the chat template makes no token of {len(messages)} messages")
    return ids


def check_room(ids: Sequence[int], place: str, *, new_tokens: int, context: int) -> None:
    """Check that a prompt and what is to follow fit the model.

    Raises:
      ValueError: they do not.
    """
    if len(ids) + new_tokens > context:
        cure = f"pass --new_tokens={context - len(ids)} or less" if len(ids) < context else "shorten it"
        raise ValueError(
            f"{place} has {len(ids)} tokens, which with --new_tokens={new_tokens} is more than the model's context of "
            f"{context}; {cure}"
        )


def parsed(
    content: bytes, path: str | Path, tokenizer: Any, *, chat: bool = False, system: str | None = None
) -> list[Request]:
    """Parse the requests of a file, one JSON object per line; blank lines are skipped.

    Args:
      content: of the file.
      path: of the file, for messages.
      chat: a line's prompt is a user message in the model's chat template.
      system: message in front of every chat that does not begin with one.

    Raises:
      ValueError: a line is not a request (its number is named); the file has none; or system applies to none of them.
    """
    requests = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            place = f"{path} line {number}"
            fields = _fields(line, place)
            ids = _ids(tokenizer, fields, place, chat=chat, system=system)
            requests.append(Request(len(requests), place, fields, ids, chat or "messages" in fields))
    if not requests:
        raise ValueError(f"{path} holds no request, wanted lines of {WANTED}")
    if system is not None and not any(_takes_system(request.fields, chat=chat) for request in requests):
        raise ValueError(
            f"--system={system[:60]!r} does nothing with {path}: its {len(requests)} requests are prompts without "
            "--chat, or messages that begin with a system message; leave it out"
        )
    return requests


def _takes_system(fields: dict[str, Any], *, chat: bool) -> bool:
    """True for a request that `message_ids` puts a system message in front of."""
    return template_role(fields["messages"][0]["role"]) != "system" if "messages" in fields else chat


class Twice(ValueError):
    """An object that has a key twice; the message is the key."""


def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of a line, or inside one: Python's parser would silently keep the last of two values."""
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        raise Twice(repr(next(name for name in counts if counts[name] > 1)[:60]))
    return made


def _fields(line: bytes, place: str) -> dict[str, Any]:
    """Object of a line, checked to have either a prompt or messages."""
    try:
        fields = json.loads(line.decode("utf-8"), object_pairs_hook=unrepeated)
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 (byte {line[error.start]:#04x} at {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error.msg} at column {error.colno}") from error
    except Twice as error:
        raise ValueError(f"{place} has the key {error} twice, wanted once") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: JSON that cannot be read ({type(error).__name__}: {str(error)[:80]})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{place} holds a {type(fields).__name__}, wanted {WANTED}")
    if is_deep(fields):
        raise ValueError(f"{place} has objects or lists nested more than {MOST_DEPTH} deep, too many to write again")
    given = [name for name in ("prompt", "messages") if name in fields]
    if len(given) != 1:
        raise ValueError(f"{place} has {' and '.join(given) or 'neither prompt nor messages'}, wanted {WANTED}")
    taken = [name for name in WRITTEN if name in fields]
    if taken:
        raise ValueError(f"{place} has the key {taken[0]!r}, which the output writes; rename it")
    return fields


def is_deep(value: Any) -> bool:
    """True for a JSON value that is nested more than MOST_DEPTH deep."""
    layer = [value]
    for _ in range(MOST_DEPTH + 1):
        holders = [each for each in layer if isinstance(each, dict | list)]
        layer = [inner for each in holders for inner in (each.values() if isinstance(each, dict) else each)]
        if not holders:
            return False
    return True


def _ids(tokenizer: Any, fields: dict[str, Any], place: str, *, chat: bool, system: str | None) -> list[int]:
    if "messages" in fields:
        return message_ids(tokenizer, _messages(fields["messages"], place), place, system)
    if not isinstance(prompt := fields["prompt"], str):
        raise ValueError(f"{place}: prompt is a {type(prompt).__name__}, wanted a text")
    if not chat:
        return prompt_ids(tokenizer, prompt, f"{place}: prompt")
    message = {"role": "user", "content": check_text(prompt, f"{place}: prompt")}
    return message_ids(tokenizer, [message], place, system)


def _messages(given: Any, place: str) -> list[dict[str, str]]:
    """Messages of a line, checked."""
    if not isinstance(given, list) or not given:
        shown = "an empty list" if given == [] else f"a {type(given).__name__}"
        raise ValueError(f"{place}: messages is {shown}, wanted a list of messages")
    for number, message in enumerate(given, 1):
        if not isinstance(message, dict):
            raise ValueError(f"{place}: message {number} is a {type(message).__name__}, wanted an object")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                kind = f"a {type(message[name]).__name__}" if name in message else "missing"
                raise ValueError(f"{place}: {name} of message {number} is {kind}, wanted a text")
            if message[name]:
                check_text(message[name], f"{place}: {name} of message {number}")
        if message["role"] not in ROLES:
            raise ValueError(f"{place}: role of message {number} is {message['role'][:60]!r}, wanted one of {ROLES}")
        for name in (name for name in REASONING if message.get(name) is not None):
            if not isinstance(message[name], str) or message["role"] != "assistant":
                said = f"a {type(message[name]).__name__}, in a message of role {message['role']}"
                raise ValueError(f"{place}: {name} of message {number} is {said}; wanted a text in one of assistant")
            if message[name]:
                check_text(message[name], f"{place}: {name} of message {number}")
        odd = next((name for name in message if name not in ("role", "content", *REASONING)), None)
        if odd is not None:  # the template may not show it
            raise ValueError(f"{place}: message {number} has {odd[:60]!r}, which is not taken; wanted role and content")
    return [message | {"role": template_role(message["role"])} for message in given]
