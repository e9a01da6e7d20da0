"""The server's interface: OpenAI's paths, health, metrics and a page (S file; extra `serve`).

Bad input is a sentence with a status from 400 on, whatever it is; nothing of a prompt goes into the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pydantic
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxbench.generation import requests as texts
from jaxbench.serve import protocol, stream
from jaxbench.serve.protocol import ChatBody, CompletionBody, error_body
from jaxbench.serve.service import RETRY_S, Answer, Refused, Service
from jaxbench.serve.settings import ServerConfig

log = logging.getLogger("jaxbench.serve")
KEY_VARIABLE = "JAXBENCH_API_KEY"
OPEN_PATHS = ("/health", "/ready", "/")  # that need no key
PAGE = Path(__file__).with_name("page.html")


class Bad(Exception):
    """A request that cannot be served; status is that of HTTP."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


def make(config: ServerConfig, load_tokenizer: Callable[[], Any]) -> Starlette:
    """The application; the model is loaded by its worker as it starts. load_tokenizer: called then."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.service = Service(config, load_tokenizer())
        try:
            yield
        finally:
            await app.state.service.end()

    routes = [
        Route("/v1/completions", _served(completions), methods=["POST"]),
        Route("/v1/chat/completions", _served(chat), methods=["POST"]),
        Route("/v1/models", _served(models)),
        Route("/tokenize", _served(tokenize), methods=["POST"]),
        Route("/health", _served(health)),
        Route("/ready", _served(ready)),
        Route("/metrics", _served(metrics)),
        Route("/", _served(page)),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _http_error})
    app.state.config, app.state.name = config, config.name or _name(config.engine.model)
    return app


def _name(model: str | None) -> str:
    return "default" if model is None else Path(model).name


def _served(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """The handler behind the key, its errors as sentences, its requests in the log and in the metrics."""

    async def run(request: Request) -> Response:
        started, id = time.monotonic(), f"req-{secrets.token_hex(8)}"
        request.state.id = id
        try:
            _check_key(request)
            response = await handler(request)
        except Bad as error:
            response = JSONResponse(error_body(str(error), "invalid_request_error"), error.status)
        except Refused as error:
            kind = "rate_limit_error" if error.status == 429 else "server_error"
            response = JSONResponse(error_body(str(error), kind), error.status, {"Retry-After": str(RETRY_S)})
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception:
            log.exception("failed", extra={"fields": {"request": id}})
            response = JSONResponse(error_body(f"the server failed; its log has request {id}", "server_error"), 500)
        response.headers["x-request-id"] = id
        request.app.state.service.metrics.http(request.scope["path"], response.status_code)
        seconds = round(time.monotonic() - started, 4)
        fields = {"request": id, "path": request.scope["path"], "status": response.status_code, "seconds": seconds}
        log.info("http", extra={"fields": fields})
        return response

    return run


async def _http_error(request: Request, error: HTTPException) -> Response:
    request.app.state.service.metrics.http("other", error.status_code)
    return JSONResponse(error_body(str(error.detail), "invalid_request_error"), error.status_code, error.headers)


def _check_key(request: Request) -> None:
    key = os.environ.get(KEY_VARIABLE)
    if not key or request.scope["path"] in OPEN_PATHS:  # not request.url's, which a Host header has a part in
        return
    given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    if not hmac.compare_digest(given.encode("latin-1"), os.fsencode(key.strip())):
        raise Bad("the API key is missing or wrong; send it as `Authorization: Bearer KEY`", 401)


async def _body(request: Request, kind: type[pydantic.BaseModel]) -> Any:
    """The body, checked.

    Raises:
      Bad: it is too large, no JSON, or not what is wanted.
    """
    most, received = request.app.state.config.max_body_bytes, bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > most:
            raise Bad(f"the body is larger than {most} bytes", 413)
    try:
        value = json.loads(received)
    except (ValueError, RecursionError) as error:
        raise Bad(f"the body is no JSON ({type(error).__name__}: {str(error)[:100]})") from error
    if not isinstance(value, dict):
        raise Bad(f"the body is a {type(value).__name__}; wanted an object")
    try:
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        raise Bad(protocol.problem(error)) from error
    except RecursionError as error:
        raise Bad(f"the body of {len(received)} bytes is nested too deeply") from error


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
        return service.tokenizer.encode(text, add_special=False)
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


def _submitted(request: Request, body: CompletionBody | ChatBody) -> list[Answer]:
    """The answers that a body asks for, in the engine.

    Raises:
      Bad: it asks for what the model does not take.
      Refused: not now.
    """
    service: Service = request.app.state.service
    if body.model is not None and body.model != request.app.state.name:
        raise Bad(f"model {body.model!r} is not here; wanted {request.app.state.name!r}", 404)
    if body.n > service.config.max_choices:
        raise Bad(f"n={body.n}; wanted at most {service.config.max_choices}")
    service.check_ready()
    ids = _prompt_ids(service, body)
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
                f"model {request.app.state.name!r} follows no grammars: its tokenizer has no end token, or llguidance "
                "is not installed"
            )
        made = body.requests(request.state.id, tuple(ids), grammar=grammar, **how)
    except pydantic.ValidationError as error:
        raise Bad(protocol.problem(error)) from error
    except ValueError as error:
        raise Bad(str(error)) from error
    return service.submit(made)


async def completions(request: Request) -> Response:
    """Continue a text."""
    body = await _body(request, CompletionBody)
    return await _answered(request, body, stream.Completion)


async def chat(request: Request) -> Response:
    """Continue a conversation."""
    body = await _body(request, ChatBody)
    return await _answered(request, body, stream.Chat)


async def _answered(request: Request, body: CompletionBody | ChatBody, form: type[stream.Form]) -> Response:
    service: Service = request.app.state.service
    answers = _submitted(request, body)
    made = form(request.state.id, request.app.state.name, service.tokenizer, body)
    if body.stream:
        return _Stream(made.events(answers), service, answers)
    gone = asyncio.create_task(_disconnected(request))
    whole = asyncio.create_task(made.whole(answers))
    try:
        await asyncio.wait({gone, whole}, return_when="FIRST_COMPLETED")
        if not whole.done():
            raise ClientDisconnect
        value, error = whole.result()
        return JSONResponse(value) if error is None else JSONResponse(error_body(error, "server_error"), 500)
    finally:
        gone.cancel()
        whole.cancel()
        service.drop(answers)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Stream(StreamingResponse):
    """Events of answers; whoever goes before their end leaves nothing behind."""

    def __init__(self, events: AsyncIterator[str], service: Service, answers: Sequence[Answer]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._service, self._answers = service, answers

    async def __call__(self, *arguments: Any) -> None:
        """Send them."""
        try:
            await super().__call__(*arguments)
        finally:
            self._service.drop(self._answers)


async def models(request: Request) -> Response:
    """The one model that is served."""
    about = request.app.state.service.about
    model = {"id": request.app.state.name, "object": "model", "created": 0, "owned_by": "jaxbench"}
    return JSONResponse({"object": "list", "data": [model | {"max_model_len": about.get("max_seq_len")}]})


class TokenizeBody(pydantic.BaseModel):
    """A text whose tokens are wanted."""

    model_config = pydantic.ConfigDict(extra="forbid")
    text: str


async def tokenize(request: Request) -> Response:
    """Token ids of a text."""
    body, service = await _body(request, TokenizeBody), request.app.state.service
    try:
        ids = service.tokenizer.encode(texts.check_text(body.text, "text"))
    except ValueError as error:
        raise Bad(str(error)) from error
    return JSONResponse({"tokens": ids, "count": len(ids)})


async def health(request: Request) -> Response:
    """Whether the server runs."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Whether requests are taken."""
    service: Service = request.app.state.service
    is_ready = service.state == "ready"
    headers = {} if is_ready else {"Retry-After": str(RETRY_S)}
    return JSONResponse({"status": service.state} | service.about, 200 if is_ready else 503, headers)


async def metrics(request: Request) -> Response:
    """Everything that is counted."""
    return Response(request.app.state.service.metrics.text(), media_type="text/plain; version=0.0.4")


async def page(request: Request) -> Response:
    """A page to talk to the model, and to watch the server."""
    return HTMLResponse(PAGE.read_text(encoding="utf-8"))
