"""Replicas of a model on one or many machines, by Ray Serve (extra `ray`).

Data flow: the gateway reads a body, takes the beginning of its text -> Ray Serve's router, with prefix_router.py ->
a replica with its own engine -> its events back through the gateway. If a replica dies before the first event of an
answer, the answer is started again on another replica; if it dies later, the answer ends with an error.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jaxbench.serve import app, intake
from jaxbench.serve.batch import URLS
from jaxbench.serve.marking import Watermarks
from jaxbench.serve.prefix_router import PrefixRouter
from jaxbench.serve.protocol import error_body, model_object
from jaxbench.serve.service import RETRY_S, Refused, Service, are_refused
from jaxbench.serve.settings import ServerConfig

log = logging.getLogger("jaxbench.serve")
CUT_S = 2.0  # for clients to read that their answer was cut off
BEGINNING = 512  # characters of a text by which its replica is chosen
RETRY = {"Retry-After": str(RETRY_S)}
ATTEMPTS = 3  # replicas that are tried for an answer
ENDED = "the server ended before the answer did"


class Replica:
    """One replica: a service with its own engine."""

    async def __init__(self, config: ServerConfig, watermarks: Watermarks | None):
        """Load the model; the replica takes requests once it is loaded."""
        from jaxbench.pretrained.tokenizer import load_tokenizer

        self._name = config.shown_name
        self._service = Service(config, load_tokenizer(config.engine.model), watermarks)
        while self._service.state == "loading":
            await asyncio.sleep(0.05)
        self.check_health()

    def check_health(self) -> None:
        """Check that it can serve.

        Raises:
          RuntimeError: its model cannot be loaded.
        """
        if self._service.state == "failed":
            raise RuntimeError(f"engine: {self._service.problem}")

    async def state(self, *, beginning: str) -> str:
        """Return the state of its service: "ready" if it takes requests, else "loading", "draining" or "failed"."""
        return self._service.state

    async def max_seq_len(self, *, beginning: str) -> int | None:
        """Return the length of the model's context in tokens."""
        return self._service.about.get("max_seq_len")

    async def answer(
        self, path: str, data: bytes, id: str, *, beginning: str, excluded: Sequence[str] = ()
    ) -> AsyncIterator[tuple[Any, ...]]:
        """Yield (status, body) of a whole answer, or (200, None) and (0, event) for each event of a stream.

        Where this replica takes no request now, yield (status, body, its name). beginning, excluded: prefix_router.py.
        """
        kind, form = URLS[path]
        try:
            body = intake.parsed(data, kind)
            answers = await intake.submitted(self._service, self._name, id, body)
        except intake.Bad as error:
            yield error.status, error.body
            return
        except Refused as error:
            kind = "rate_limit_error" if error.status == 429 else "server_error"
            yield error.status, error_body(str(error), kind), serve.get_replica_context().replica_id.unique_id
            return
        made = form(id, self._name, self._service.tokenizer, body)
        try:
            if body.stream:
                events = made.events(answers)
                yield 200, None
                async for event in events:
                    yield 0, event
            else:
                value, error = await made.whole(answers)
                if error is not None and are_refused(answers):
                    yield 400, error_body(error, "invalid_request_error")
                else:
                    yield (200, value) if error is None else (500, error_body(error, "server_error"))
        finally:
            self._service.drop(answers)


class Gateway:
    """The deployment that clients connect to."""

    def __init__(self, replicas: DeploymentHandle, config: ServerConfig, key: str | None):
        self._replicas, self._config, self._any = replicas.options(stream=True), config, replicas
        # answers in progress; weak: of a client that leaves before its stream begins, no code runs to discard the entry
        self._running: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_ending = False
        self._longest: int | None = None  # the model's context in tokens, once a replica has told it
        if key is not None:  # from the environment that the fleet was started in, on whatever machine this runs
            os.environ[intake.KEY_VARIABLE] = key

    async def __call__(self, request: Request) -> Response:
        """Answer a request; Ray Serve adds the header x-request-id, its own or the client's."""
        path, id = request.scope["path"].removesuffix("/"), f"req-{secrets.token_hex(8)}"
        wanted = ("POST",) if path in URLS else ("GET", "HEAD")
        try:
            if not (path in URLS or path in ("/health", "/ready", "/v1/models") or path.startswith("/v1/models/")):
                raise intake.Bad(f"{path[:100]} is not served by a fleet; wanted {' or '.join(URLS)}", 404)
            if request.method not in wanted:
                raise intake.Bad(f"{request.method} {path[:100]}; wanted {' or '.join(wanted)}", 405)
            if path in ("/health", "/ready"):
                return await self._state(path)
            app.check_key(request)
            if path in URLS:
                data = await app.body_bytes(request, self._config.max_body_bytes)
                return await self._answered(path, data, id, request.headers.get("x-request-id", id))
            if path == "/v1/models":
                return JSONResponse({"object": "list", "data": [await self._model()]})
            intake.check_model(path.removeprefix("/v1/models/"), self._config.shown_name)
            return JSONResponse(await self._model())
        except intake.Bad as error:
            return JSONResponse(error.body, error.status, {"Allow": ", ".join(wanted)} if error.status == 405 else {})

    async def _model(self) -> dict[str, Any]:
        """Describe the model; the length of its context is a replica's knowledge."""
        if self._longest is None:
            try:
                self._longest = await asyncio.wait_for(self._any.max_seq_len.remote(beginning=""), 5)
            except Exception as error:  # whatever Ray raises for replicas that are gone
                log.error("no replica answers", extra={"fields": {"error": type(error).__name__}})
        return model_object(self._config.shown_name, max_model_len=self._longest)

    async def drain(self, seconds: float) -> int:
        """Refuse new requests, wait up to `seconds` for answers in progress; return how many had to be cut off."""
        self._is_ending, until = True, time.monotonic() + seconds
        while self._running and time.monotonic() < until:
            await asyncio.sleep(0.05)
        cut = list(self._running)
        for items in cut:
            items.cancel()
        until = time.monotonic() + CUT_S
        while self._running and time.monotonic() < until:  # while their clients are told
            await asyncio.sleep(0.05)
        return len(cut)

    async def _state(self, path: str) -> Response:
        """Report whether this process runs (/health), or whether a replica takes requests (/ready)."""
        if path == "/health":
            return JSONResponse({"status": "ok"})
        if self._is_ending:
            return JSONResponse({"status": "draining"}, 503, RETRY)
        try:
            state = await asyncio.wait_for(self._any.state.remote(beginning=""), 5)
        except Exception as error:  # whatever Ray raises for replicas that are gone
            state = f"no replica answers ({type(error).__name__})"
        is_ready = state == "ready"
        return JSONResponse({"status": state}, 200 if is_ready else 503, {} if is_ready else RETRY)

    async def _answered(self, path: str, data: bytes, id: str, told: str = "") -> Response:
        """Build the response from an answer's first item; if that is none or a refusal, try another replica.

        told: the request's id as its client reads it. It may be the client's own, so engines get a unique one.
        """
        beginning, failure, refusal = beginning_of(data), "", None
        excluded: list[str] = []  # replicas that refused it
        for attempt in range(ATTEMPTS):
            if self._is_ending:
                said = ENDED if attempt else "the server is ending"
                return JSONResponse(error_body(said, "server_error"), 503, RETRY)
            items = self._replicas.answer.remote(path, data, f"{id}-{attempt}", beginning=beginning, excluded=excluded)
            self._running.add(items)
            is_streamed = False
            try:
                status, value, *refusing = await anext(items)
                is_streamed = value is None
            except asyncio.CancelledError:
                items.cancel()
                if self._is_ending:
                    continue
                raise  # the client is gone
            except BackPressureError:
                error = error_body("all replicas have as many as they take", "rate_limit_error")
                return JSONResponse(error, 429, RETRY)
            except Exception as error:  # whatever Ray raises for a replica that is gone
                failure = type(error).__name__
                log.error(
                    "replica lost", extra={"fields": {"request": told or id, "error": failure, "attempt": attempt}}
                )
                continue
            finally:
                if not is_streamed:
                    self._running.discard(items)
            headers = RETRY if status in (429, 503) else {}
            if refusing:
                excluded += refusing
                refusal = JSONResponse(value, status, headers)
                continue
            if value is not None:
                return JSONResponse(value, status, headers)
            return StreamingResponse(self._events(items), media_type="text/event-stream", headers=headers)
        if refusal is not None and not self._is_ending:
            return refusal
        said = ENDED if self._is_ending else f"no replica answered ({failure})"
        return JSONResponse(error_body(said, "server_error"), 503, {"Retry-After": "5"})

    async def _events(self, items: Any) -> AsyncIterator[str]:
        """Yield the events of a stream that a replica has started; one with an error if it is lost."""
        try:
            async for _, event in items:
                yield event
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not self._is_ending:
                raise  # the client is gone
            said = ENDED if self._is_ending else f"the replica was lost while it answered ({type(error).__name__})"
            yield f"data: {json.dumps(error_body(said, 'server_error'))}\n\n"
        finally:
            items.cancel()
            self._running.discard(items)


def beginning_of(data: bytes) -> str:
    """Return the first characters of a body's text; "" where it has none: any replica may answer it."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(body, dict):
        return ""
    return str(body.get("messages") or body.get("prompt") or "")[:BEGINNING]


def application(config: ServerConfig, watermarks: Watermarks | None, *, replicas: int, cpus: float) -> Any:
    """Return the bound deployments, for serve.run. cpus: of each replica, shared by its threads."""
    most = config.engine.limits.max_requests
    engine = serve.deployment(
        Replica, name="replica", num_replicas=replicas, max_ongoing_requests=most, max_queued_requests=most,
        ray_actor_options={"num_cpus": cpus}, graceful_shutdown_timeout_s=config.drain_s, health_check_period_s=2.0,
        health_check_timeout_s=5.0, request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    )  # fmt: skip
    gateway = serve.deployment(
        Gateway, name="gateway", max_ongoing_requests=2 * most * replicas, ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.drain_s,
    )  # fmt: skip
    return gateway.bind(engine.bind(config, watermarks), config, os.environ.get(intake.KEY_VARIABLE))
