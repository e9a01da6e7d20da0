"""A body's way into the engine: checked, its prompt in tokens, its answers begun (S file)."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from typing import Any

import pydantic

from jaxbench.generation import requests as texts
from jaxbench.serve import marking, protocol
from jaxbench.serve.protocol import ChatBody, CompletionBody
from jaxbench.serve.service import Answer, Service

KEY_VARIABLE = "JAXBENCH_API_KEY"  # of the environment
LONG_TEXT = 16_384  # characters whose tokens take longer than a step of the engine: some 5 ms


class Bad(Exception):
    """A request that cannot be served; status is that of HTTP."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


def parsed(data: bytes | bytearray, kind: type[pydantic.BaseModel]) -> Any:
    """A body, checked.

    Raises:
      Bad: it is no JSON, or not what is wanted.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Bad(f"the body is no JSON ({type(error).__name__}: {str(error)[:100]})") from error
    return checked(value, kind)


def checked(value: Any, kind: type[pydantic.BaseModel]) -> Any:
    """A body that was read from JSON, checked.

    Raises:
      Bad: it is not what is wanted.
    """
    if not isinstance(value, dict):
        raise Bad(f"the body is a {type(value).__name__}; wanted an object")
    try:
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        raise Bad(protocol.problem(error)) from error
    except RecursionError as error:
        raise Bad(f"the body of {len(value)} fields is nested too deeply") from error


def _prompt_ids(service: Service, body: CompletionBody | ChatBody) -> list[int]:
    """Token ids of a prompt or of messages.

    Raises:
      Bad: it is empty, no Unicode text, or nothing that the model's template takes.
    """
    try:
        if isinstance(body, CompletionBody):
            if isinstance(body.prompt, list):
                return body.prompt
            return texts.prompt_ids(service.tokenizer, body.prompt, "prompt")
    except ValueError as error:
        raise Bad(str(error)) from error
    messages = [_message(number, message) for number, message in enumerate(body.messages)]
    try:
        text = texts.check_text(service.tokenizer.chat(messages, tools=body.tools), "messages")
        if body.tools and text == service.tokenizer.chat(messages):
            raise Bad(f"tools: the model's template shows none of the {len(body.tools)} to the model; leave them out")
        return service.tokenizer.encode(text, add_special=False)
    except Bad:
        raise
    except Exception as error:  # a template is a stranger's code, and fails as it likes
        said = " ".join(str(error).split())[:200]
        raise Bad(f"messages: the model's template does not take them ({type(error).__name__}: {said})") from error


def _message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message whose parts are joined to one text."""
    if not isinstance(message.get("role"), str):
        raise Bad(f"messages.{number}.role is {message.get('role')!r}; wanted a text")
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise Bad(f"messages.{number}.content has a part that is no text; wanted parts of type text")
        content = "".join(parts)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise Bad(f"messages.{number}.content is a {type(content).__name__}; wanted a text")
    if content:
        try:
            texts.check_text(content, f"messages.{number}.content")
        except ValueError as error:
            raise Bad(str(error)) from error
    return message | {"content": content}


async def aside(length: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a text of `length` characters returns; of a long one in a thread: streams go on meanwhile."""
    return await asyncio.to_thread(function, *arguments) if length > LONG_TEXT else function(*arguments)


def _length(body: CompletionBody | ChatBody) -> int:
    """Characters of a body's prompt, about."""
    if isinstance(body, CompletionBody):
        return len(body.prompt) if isinstance(body.prompt, str) else 0
    return sum(len(str(message.get("content"))) for message in body.messages)


async def submitted(service: Service, name: str, id: str, body: CompletionBody | ChatBody) -> list[Answer]:
    """The answers that a body asks for, in the engine.

    name: of the model, as clients give it. id: of the body's requests, with the number of the answer behind it.

    Raises:
      Bad: it asks for what the model does not take.
      Refused: not now.
    """
    if body.model is not None and body.model != name:
        raise Bad(f"model {body.model!r} is not here; wanted {name!r}", 404)
    most = min(service.config.max_choices, service.config.engine.limits.most)
    if body.n > most:
        raise Bad(f"n={body.n}; wanted at most {most}")
    service.check_ready()
    ids = await aside(_length(body), _prompt_ids, service, body)
    context, vocabulary = service.about["max_seq_len"], service.about["vocab_size"]
    room = min(context, service.about["cache_tokens"]) - len(ids)
    new = min(service.config.default_new_tokens, room) if body.new_tokens is None else body.new_tokens
    if not ids or not 0 <= min(ids) <= max(ids) < vocabulary:
        raise Bad(f"prompt: {len(ids)} tokens; wanted some, each from 0 to {vocabulary - 1}")
    if room < 1 or new > room:
        raise Bad(
            f"the prompt has {len(ids)} tokens and max_tokens is {max(new, 1)}; together {len(ids) + room} are possible"
        )
    odd = [token for token in body.logit_bias or {} if not 0 <= token < vocabulary]
    if odd:
        raise Bad(f"logit_bias of token {odd[0]}; wanted tokens from 0 to {vocabulary - 1}")
    seed = secrets.randbits(62) if body.seed is None else body.seed
    how = {"new_tokens": new, "seed": seed, "end_ids": frozenset(service.tokenizer.end_ids), "now": time.monotonic()}
    try:
        grammar = body.grammar()
        if grammar is not None and not service.about["grammars"]:
            raise Bad(
                f"model {name!r} follows no grammars: its tokenizer has no end token, or llguidance is not installed"
            )
        made = body.requests(id, tuple(ids), grammar=grammar, **how)
        for each in made:
            marking.check(each, service.watermarks)
    except pydantic.ValidationError as error:
        raise Bad(protocol.problem(error)) from error
    except ValueError as error:
        raise Bad(str(error)) from error
    return service.submit(made)
