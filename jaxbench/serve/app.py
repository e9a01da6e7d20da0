"""The server's HTTP interface: OpenAI's paths, health, metrics and a page (S file; extra `serve`).

Any bad input is answered with a sentence and a status of 400 or above; no part of a prompt goes into the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
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
from jaxbench.serve import intake, jobs, protocol, stream
from jaxbench.serve.intake import KEY_VARIABLE, Bad
from jaxbench.serve.marking import Watermarks
from jaxbench.serve.protocol import ChatBody, CompletionBody, DetectBody, error_body
from jaxbench.serve.service import RETRY_S, Answer, Refused, Service, are_refused
from jaxbench.serve.settings import ServerConfig

log = logging.getLogger("jaxbench.serve")
OPEN_PATHS = ("/health", "/ready", "/")  # that need no key
MODEL_PATH = "/v1/models/{id:path}"
PAGE = Path(__file__).with_name("page.html")


def make(config: ServerConfig, load_tokenizer: Callable[[], Any], watermarks: Watermarks | None = None) -> Starlette:
    """Return the application; its worker loads the model at startup. load_tokenizer: called at startup."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.service = Service(config, load_tokenizer(), watermarks)
        workers = jobs.Workers(config)
        try:
            yield
        finally:
            await app.state.service.end()
            await asyncio.to_thread(workers.end)

    routes = [
        Route("/v1/completions", _served(completions), methods=["POST"]),
        Route("/v1/chat/completions", _served(chat), methods=["POST"]),
        Route("/v1/models", _served(models)),
        Route(MODEL_PATH, _served(model)),
        Route("/tokenize", _served(tokenize), methods=["POST"]),
        Route("/v1/watermark/detect", _served(find_watermarks), methods=["POST"]),
        Route(jobs.PATH, _served(jobs.submit), methods=["POST"]),
        Route(jobs.PATH, _served(jobs.show_all)),
        Route(jobs.ONE, _served(jobs.show)),
        Route(jobs.ONE, _served(jobs.remove), methods=["DELETE"]),
        Route(jobs.RESULT, _served(jobs.scores)),
        Route("/health", _served(health)),
        Route("/ready", _served(ready)),
        Route("/metrics", _served(metrics)),
        Route("/", _served(page)),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _http_error})
    app.state.config, app.state.name = config, config.shown_name
    return app


def _served(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler: check the key, turn errors into sentences, record requests in the log and in the metrics."""

    async def run(request: Request) -> Response:
        started, id = time.monotonic(), f"req-{secrets.token_hex(8)}"
        path = _route(request)
        request.state.id = id
        try:
            check_key(request)
            response = await handler(request)
        except Bad as error:
            response = JSONResponse(error.body, error.status)
        except Refused as error:
            kind = "rate_limit_error" if error.status == 429 else "server_error"
            response = JSONResponse(error_body(str(error), kind), error.status, {"Retry-After": str(RETRY_S)})
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception:
            log.exception("failed", extra={"fields": {"request": id}})
            response = JSONResponse(error_body(f"the server failed; its log has request {id}", "server_error"), 500)
        response.headers["x-request-id"] = id
        service: Service = request.app.state.service
        service.metrics.http(path, response.status_code)
        if request.method == "POST" and not isinstance(response, _Stream):  # a stream reports its outcome at its end
            service.watch.observe("error_share", float(response.status_code >= 500), time.monotonic())
        seconds = round(time.monotonic() - started, 4)
        fields = {"request": id, "path": path, "status": response.status_code, "seconds": seconds}
        log.info("http", extra={"fields": fields})
        return response

    return run


def _route(request: Request) -> str:
    """Return the path of the matched route, never text that a client made up."""
    if "job" in request.path_params:
        return jobs.RESULT if request.scope["path"].endswith("/scores") else jobs.ONE
    return MODEL_PATH if request.path_params else request.scope["path"]


async def _http_error(request: Request, error: HTTPException) -> Response:
    request.app.state.service.metrics.http("other", error.status_code)
    return JSONResponse(error_body(str(error.detail), "invalid_request_error"), error.status_code, error.headers)


def check_key(request: Request) -> None:
    """Check that a request carries the API key, if one is set.

    Raises:
      Bad: the key is missing or wrong.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key or request.scope["path"] in OPEN_PATHS:  # not request.url's, which depends on the Host header
        return
    given = request.headers.get("authorization", "").strip()
    scheme, _, rest = given.partition(" ")
    given = rest.strip() if scheme.lower() == "bearer" else given  # RFC 7235: case-insensitive
    if not hmac.compare_digest(given.encode("latin-1"), os.fsencode(key)):
        said = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
        raise Bad(said, 401, code="invalid_api_key")


async def _body(request: Request, kind: type[pydantic.BaseModel]) -> Any:
    """Read and validate a request's body.

    Raises:
      Bad: it is too large, is not JSON, or does not validate.
    """
    return intake.parsed(await body_bytes(request, request.app.state.config.max_body_bytes), kind)


async def body_bytes(request: Request, most: int) -> bytes:
    """Read the bytes of a body.

    Raises:
      Bad: there are more than `most`.
    """
    received = bytearray()
    async for chunk in intake.chunks(request, most):
        received += chunk
    return bytes(received)


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
    answers = await intake.submitted(service, request.app.state.name, request.state.id, body)
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
        if error is not None and are_refused(answers):
            raise Bad(error)
        return JSONResponse(value) if error is None else JSONResponse(error_body(error, "server_error"), 500)
    finally:
        gone.cancel()
        whole.cancel()
        service.drop(answers)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Stream(StreamingResponse):
    """Stream of the events of answers; if the client leaves early, the answers are dropped."""

    def __init__(self, events: AsyncIterator[str], service: Service, answers: Sequence[Answer]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._service, self._answers = service, answers

    async def __call__(self, *arguments: Any) -> None:
        """Send the events, then record whether the stream failed, and drop the answers."""
        try:
            await super().__call__(*arguments)
        finally:
            is_error = any(answer.ended == "error" and not answer.is_refused for answer in self._answers)
            self._service.watch.observe("error_share", float(is_error), time.monotonic())
            self._service.drop(self._answers)


async def models(request: Request) -> Response:
    """List the one model that is served."""
    return JSONResponse({"object": "list", "data": [_model(request)]})


async def model(request: Request) -> Response:
    """Describe the model with the given name."""
    intake.check_model(request.path_params["id"], request.app.state.name)
    return JSONResponse(_model(request))


def _model(request: Request) -> dict[str, Any]:
    longest = request.app.state.service.about.get("max_seq_len")
    return protocol.model_object(request.app.state.name, max_model_len=longest)


class TokenizeBody(pydantic.BaseModel):
    """A text to tokenize."""

    model_config = pydantic.ConfigDict(extra="forbid")
    text: str


async def tokenize(request: Request) -> Response:
    """Return the token ids of a text."""
    body, service = await _body(request, TokenizeBody), request.app.state.service
    try:
        text = texts.check_text(body.text, "text")
        ids = await intake.aside(len(text), service.tokenizer.encode, text)
    except ValueError as error:
        raise Bad(str(error)) from error
    return JSONResponse({"tokens": ids, "count": len(ids)})


async def find_watermarks(request: Request) -> Response:
    """Report which of the server's watermarks a text carries."""
    body, service = await _body(request, DetectBody), request.app.state.service
    service.check_ready()
    if service.finder is None:
        raise Bad(f"{request.scope['path']}: the server has no watermarks; name some in its configuration", 404)
    try:
        text = body.tokens if body.text is None else texts.check_text(body.text, "text")
        names = service.finder.names if body.watermarks is None else tuple(dict.fromkeys(body.watermarks))
        started = time.monotonic()
        found = await asyncio.to_thread(service.finder.find, text, names, prompt_tokens=body.prompt_tokens)
        service.detected(time.monotonic() - started, is_cached=found["is_cached"])
    except ValueError as error:
        raise Bad(str(error)) from error
    return JSONResponse(found)


async def health(request: Request) -> Response:
    """Report that the server runs."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Report whether requests are accepted."""
    service: Service = request.app.state.service
    is_ready = service.state == "ready"
    headers = {} if is_ready else {"Retry-After": str(RETRY_S)}
    told = service.progress if service.state == "loading" else service.about
    return JSONResponse({"status": service.state} | told, 200 if is_ready else 503, headers)


async def metrics(request: Request) -> Response:
    """Return all metrics."""
    counts = await asyncio.to_thread(jobs.counted, request.app.state.config)
    service: Service = request.app.state.service
    service.metrics.jobs(counts)
    service.metrics.processes(service.usage())
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


async def page(request: Request) -> Response:
    """Return a page to chat with the model and to watch the server."""
    return HTMLResponse(PAGE.read_text(encoding="utf-8"))
