"""From a request body to answers in the engine: validate it, tokenize its prompt, submit its requests (S file)."""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pydantic

from jaxbench.generation import requests as texts
from jaxbench.pretrained import chat_template
from jaxbench.serve import marking, protocol, reasoning, tools
from jaxbench.serve.protocol import ChatBody, CompletionBody
from jaxbench.serve.request import Request
from jaxbench.serve.service import Answer, Service

KEY_VARIABLE = "JAXBENCH_API_KEY"  # name of the environment variable that holds the API key
LONG_TEXT = 16_384  # characters; tokenizing more takes longer than a step of the engine: some 5 ms


class Bad(Exception):
    """A request that cannot be served; status: HTTP's; code, param: OpenAI's, if any."""

    def __init__(self, message: str, status: int = 400, *, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        """The error as clients read it."""
        return protocol.error_body(str(self), "invalid_request_error", self.code, self.param)


def check_model(given: str, name: str) -> None:
    """Check that a model's name is that of the served one.

    Raises:
      Bad: it is not.
    """
    if given != name:
        raise Bad(f"model {given[:100]!r} is not here; wanted {name!r}", 404, code="model_not_found", param="model")


async def chunks(request: Any, most: int) -> AsyncIterator[bytes]:
    """Yield the chunks of a body as they arrive.

    Raises:
      Bad: it has more than `most` bytes.
    """
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise Bad(f"the body is larger than {most} bytes", 413)
        yield chunk


def parsed(data: bytes | bytearray, kind: type[pydantic.BaseModel]) -> Any:
    """Parse and validate a body.

    Raises:
      Bad: it is not JSON, has a key twice, or does not validate.
    """
    try:
        value = json.loads(data, object_pairs_hook=texts.unrepeated)
    except texts.Twice as error:
        raise Bad(f"the body has the key {error} twice in one object; wanted it once") from error
    except (ValueError, RecursionError) as error:
        raise Bad(f"the body is no JSON ({type(error).__name__}: {str(error)[:100]})") from error
    return checked(value, kind)


def checked(value: Any, kind: type[pydantic.BaseModel]) -> Any:
    """Validate a body that was read from JSON.

    Raises:
      Bad: it does not validate.
    """
    if not isinstance(value, dict):
        raise Bad(f"the body is a {type(value).__name__}; wanted an object")
    try:
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        raise _of_field(error) from error
    except RecursionError as error:
        raise Bad(f"the body of {len(value)} fields is nested too deeply") from error


def _of_field(error: pydantic.ValidationError) -> Bad:
    return Bad(protocol.problem(error), param=protocol.place_of(error) or None)


def _prompt_ids(service: Service, body: CompletionBody | ChatBody) -> list[list[int]]:
    """Return the token ids of each prompt, or of the messages.

    Raises:
      Bad: a text is empty or not valid Unicode, or the model's template does not take the messages or tools.
    """
    try:
        if isinstance(body, CompletionBody):
            for each in body.prompts:
                _check_characters(service, each, "prompt")
            return [
                each if isinstance(each, list) else texts.prompt_ids(service.tokenizer, each, "prompt")
                for each in body.prompts
            ]
    except ValueError as error:
        raise Bad(str(error), param="prompt") from error
    messages = [message.for_template for message in body.messages]
    try:
        rendered = functools.partial(service.tokenizer.chat, variables=body.chat_template_kwargs)
        text = texts.check_text(rendered(messages, tools=body.shown_tools), "messages")
        _check_characters(service, text, "messages")
        _check_shown(rendered, messages, text, body.shown_tools)
        if body.is_call:
            text += _prefill(service, body)
        return [service.tokenizer.encode(text, add_special=False)]
    except Bad:
        raise
    except chat_template.UnknownVariable as error:
        raise Bad(f"chat_template_kwargs: {error}", param="chat_template_kwargs") from error
    except Exception as error:  # a template is third-party code, and may raise anything
        said = " ".join(str(error).split())[:200]
        said = f"messages: the model's template does not take them ({type(error).__name__}: {said})"
        raise Bad(said, param="messages") from error


def _prefill(service: Service, body: ChatBody) -> str:
    """Return what an answer begins with that has to be a call.

    Raises:
      Bad: the model's template does not tell.
    """
    found = tools.learned(service.tokenizer, body.chat_template_kwargs)
    if found is None or found.prefill is None:
        said = (
            "tool_choice: the model's template does not tell how an answer begins that is a call; wanted auto or none"
        )
        raise Bad(said, param="tool_choice")
    return found.prefill


def _check_characters(service: Service, text: str | list[int], param: str) -> None:
    """Check, before the work of tokenizing it, that a text is not too long however few tokens it has.

    Raises:
      Bad: it is.
    """
    longest, most = service.tokenizer.longest_token, _context(service)
    if longest is not None and isinstance(text, str) and len(text) > most * longest:
        said = f"the prompt has {len(text)} characters, over {most} tokens; together {most} are possible"
        raise Bad(said, code="context_length_exceeded", param=param)


def _context(service: Service) -> int:
    """Return the maximum number of tokens of a prompt and its answer."""
    return min(service.about["max_seq_len"], service.about["cache_tokens"])


def _check_shown(rendered: Callable[..., str], messages: list[dict[str, Any]], text: str, tools: Any) -> None:
    """Check that the model's template, `rendered`, shows tools and calls to the model; text: what it made of them.

    Raises:
      Bad: it does not.
    """
    try:
        is_same = bool(tools) and text == rendered(messages)
    except ValueError:  # another template, where there are no tools, which may take other variables
        is_same = False
    if is_same:
        said = f"tools: the model's template shows none of the {len(tools)} to the model; leave them out"
        raise Bad(said, param="tools")
    calling = [number for number, message in enumerate(messages) if "tool_calls" in message]
    if not calling:
        return
    without = [{name: value for name, value in each.items() if name != "tool_calls"} for each in messages]
    try:
        is_same = text == rendered(without, tools=tools)
    except ValueError:  # what follows needs the calls
        return
    if is_same:
        place = f"messages.{calling[0]}.tool_calls"
        raise Bad(f"{place}: the model's template does not show calls to the model; leave them out", param=place)


async def aside(length: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a text of `length` characters, in a thread if it is long, so that streams continue.

    The function should leave Python's lock to others: Tokenizer.encode does.
    """
    return await asyncio.to_thread(function, *arguments) if length > LONG_TEXT else function(*arguments)


def _length(body: CompletionBody | ChatBody) -> int:
    """Return the approximate number of characters of a body's prompt and of what makes it."""
    if isinstance(body, CompletionBody):
        return sum(len(each) for each in body.prompts if isinstance(each, str))
    try:
        return sum(len(str(each)) for each in (body.messages, body.tools, body.chat_template_kwargs))
    except RecursionError:
        return LONG_TEXT + 1  # the template will refuse it


async def submitted(service: Service, name: str, id: str, body: CompletionBody | ChatBody) -> list[Answer]:
    """Submit the requests of a body to the engine; return its answers, n to each prompt, in the prompts' order.

    name: the model's, as clients give it. id: prefix of the requests' ids; the number of the answer follows it.

    Raises:
      Bad: the body asks for what the server or the model does not take.
      Refused: the engine takes no requests now.
    """
    if body.model is not None:
        check_model(body.model, name)
    most = min(service.config.max_choices, service.config.engine.limits.max_requests)
    if body.n * (count := body.num_prompts) > most:
        said = "" if count == 1 else f" for each of {count} prompts"
        raise Bad(f"n={body.n}{said}; wanted at most {most} answers", param="n" if count == 1 else "prompt")
    service.check_ready()
    prompts = await aside(_length(body), _prompt_ids, service, body)
    new = [_new_tokens(service, body, ids) for ids in prompts]
    vocabulary = service.about["vocab_size"]
    odd = [token for token in body.logit_bias or {} if not 0 <= token < vocabulary]
    if odd:
        raise Bad(f"logit_bias of token {odd[0]}; wanted tokens from 0 to {vocabulary - 1}", param="logit_bias")
    odd = [token for token in body.stop_token_ids if not 0 <= token < vocabulary]
    if odd:
        said = f"stop_token_ids has token {str(odd[0])[:40]}; wanted tokens from 0 to {vocabulary - 1}"
        raise Bad(said, param="stop_token_ids")
    how = {"end_ids": frozenset(service.tokenizer.end_ids), "now": time.monotonic()}
    grammar = await _grammar(service, name, body, prompts[0])
    try:
        made = []
        for ids, count in zip(prompts, new):
            seed = _seed(body)
            made += body.requests(id, tuple(ids), first=len(made), new_tokens=count, seed=seed, grammar=grammar, **how)
    except pydantic.ValidationError as error:
        raise _of_field(error) from error
    except ValueError as error:
        raise Bad(str(error)) from error
    _check_marks(service, made)
    return service.submit(made, go_on=isinstance(body, CompletionBody) and grammar is None)


def _seed(body: CompletionBody | ChatBody) -> int:
    """Return the seed of a prompt's answers: the given one, in the engine's 63 bits, or a random one for this prompt.

    If the prompts of a list shared a random seed, all would get the same draws: a prompt listed twice, the same text.
    """
    return secrets.randbits(62) if body.seed is None else body.seed % 2**63


def _check_marks(service: Service, made: Sequence[Request]) -> None:
    """Check that requests can be watermarked as they ask.

    Raises:
      Bad: one cannot.
    """
    try:
        for each in made:
            marking.check(each, service.watermarks)
    except ValueError as error:
        raise Bad(str(error), param=str(error).partition(":")[0]) from error


async def _grammar(service: Service, name: str, body: CompletionBody | ChatBody, prompt: list[int]) -> str | None:
    """Return the grammar that an answer follows, if any; it is checked in a thread, so that streams continue.

    prompt: the first, of messages the only one.

    Raises:
      Bad: it cannot be followed.
    """
    fields = body.followed
    param = fields[0] if len(fields) == 1 else None
    if not fields:
        return None
    if not service.about["grammars"]:
        said = f"model {name!r} follows no grammars: its tokenizer has no end token, or llguidance is not installed"
        raise Bad(said, param=param)
    is_chat = isinstance(body, ChatBody)
    notation = tools.learned(service.tokenizer, body.chat_template_kwargs) if is_chat and body.shown_tools else None
    tags = reasoning.learned(service.tokenizer) if is_chat else None
    thought = None if tags is None else tags.of_grammar(service.tokenizer, prompt)
    if "tools" in fields and notation is None:
        said = "tools: the model's template does not tell how it writes calls, and none can be strict; leave strict out"
        raise Bad(said, param="tools")
    try:
        return await asyncio.to_thread(body.grammar, notation, thought)
    except ValueError as error:
        raise Bad(str(error), param=param) from error


def _new_tokens(service: Service, body: CompletionBody | ChatBody, ids: list[int]) -> int:
    """Return the maximum number of tokens of an answer to a prompt.

    Raises:
      Bad: the prompt has no token, or an unknown one, or there is no room for prompt and answer.
    """
    param, vocabulary = "prompt" if isinstance(body, CompletionBody) else "messages", service.about["vocab_size"]
    room = _context(service) - len(ids)
    new = min(service.config.default_new_tokens, room) if body.new_tokens is None else body.new_tokens
    odd = next((f"token {str(token)[:40]}" for token in ids if not 0 <= token < vocabulary), None)
    if not ids or odd is not None:
        raise Bad(f"prompt: {odd or '0 tokens'}; wanted some, each from 0 to {vocabulary - 1}", param=param)
    if room < 1 or new > room:
        said = f"the prompt has {len(ids)} tokens and max_tokens is {max(new, 1)}"
        code = "context_length_exceeded"
        raise Bad(f"{said}; together {len(ids) + room} are possible", code=code, param=param)
    return new
