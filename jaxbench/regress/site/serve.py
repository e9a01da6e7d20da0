"""Serve the pages that `write` makes, with samples of this machine as server-sent events (S file).

Read-only: only GET and HEAD, only of paths in a table built in advance, so that no path reaches the disk. Pages are
rebuilt when a run was added. Bound to an address that is reachable from elsewhere it requires a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import html
import ipaddress
import json
import logging
import mimetypes
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxbench.regress.history import History
from jaxbench.regress.site import content, write
from jaxbench.regress.site.samples import Sampler

log = logging.getLogger("jaxbench.dashboard")

COOKIE = "jaxbench_token"
MOST_LISTENERS = 64
MOST_REQUESTS = 512  # concurrent; further ones get 503
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'none'; "
HEADERS = {
    "Content-Security-Policy": POLICY + "form-action 'none'; base-uri 'none'", "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache",
}  # fmt: skip


class Pages:
    """Every file of the site, rebuilt when the history changed."""

    def __init__(self, history: History, layers: Sequence[dict[str, Any]]):
        self._history, self._layers, self._state, self._lock = history, layers, None, asyncio.Lock()
        self._static = {path.name: path.read_bytes() for path in write.STATIC}
        self._static["plotly.js"] = write.plotly().encode()
        self.files: dict[str, bytes] = {}

    async def get(self, name: str) -> bytes | None:
        """Return a file's bytes; None if there is no file of this name."""
        if name in self._static:
            return self._static[name]
        async with self._lock:
            state = await run_in_threadpool(self._now)
            if state != self._state:
                self.files = await run_in_threadpool(self.made)
                self._state = state
        return self.files.get(name)

    def made(self) -> dict[str, bytes]:
        """Build all files that come from the history."""
        try:
            texts = write.texts(content.gather(self._history), self._layers)
        except ValueError as error:  # no run yet
            texts = {"index.html": f"<!doctype html><title>performance over time</title><p>{html.escape(str(error))}"}
        return {name: text.encode() for name, text in texts.items()}

    def _now(self) -> list[tuple[str, int, int]]:
        """Return the state of the history: files of runs, alerts and qualifications with sizes and times."""
        paths = [path for path in self._history.folder.rglob("*.json*") if path.is_file()]
        found = []
        for path in paths:
            with contextlib.suppress(OSError):
                found.append((str(path), path.stat().st_size, path.stat().st_mtime_ns))
        return sorted(found)


class Live:
    """One sampler shared by all listeners."""

    def __init__(self, sampler: Sampler, interval_s: float):
        self._sampler, self._interval_s, self._listeners = sampler, interval_s, set()

    async def run(self) -> None:
        """Sample for ever, but only while somebody listens."""
        while True:
            await asyncio.sleep(self._interval_s)
            if self._listeners:
                try:
                    sample = await run_in_threadpool(self._sampler.sample)
                except Exception:  # a counter may fail once; the next sample may work
                    log.exception("no sample")
                    continue
                for queue in self._listeners:
                    if queue.qsize() < 8:  # a listener that does not read loses samples instead of filling memory
                        queue.put_nowait(sample)

    async def events(self, request: Request) -> Response:
        """Stream samples as server-sent events."""
        if len(self._listeners) >= MOST_LISTENERS:
            return PlainTextResponse(f"{MOST_LISTENERS} listen already\n", 503)

        async def stream() -> AsyncIterator[str]:
            queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
            self._listeners.add(queue)
            try:
                yield "retry: 2000\n\n"
                while True:
                    yield f"data: {json.dumps(await queue.get(), allow_nan=False)}\n\n"
            finally:
                self._listeners.discard(queue)

        return StreamingResponse(stream(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


class Guard:
    """Middleware that refuses other methods and requests without the token, and adds headers to every response."""

    def __init__(self, app: ASGIApp, token: str | None):
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        await (self._refused(Request(scope)) or self._app)(scope, receive, sending)

    def _refused(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse(
                f"{request.method} is not taken: these pages are read-only\n", 405, {"Allow": "GET, HEAD"}
            )
        if self._token is None:
            return None
        given = request.query_params.get("token")
        if given is not None and self._is_right(given):  # first in the URL, then in a cookie
            answer = RedirectResponse(quote(request.url.path), 303)
            answer.set_cookie(COOKIE, given, httponly=True, samesite="strict")
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_right(bearer) or self._is_right(request.cookies.get(COOKIE, "")):
            return None
        return PlainTextResponse("a token is wanted: ?token=... once, or the header Authorization: Bearer\n", 401)

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self._token or "").encode())


def make_app(
    history: History, runs: Path, *, layers: Sequence[dict[str, Any]] = (), token: str | None = None,
    interval_s: float = 1.0,
) -> Starlette:  # fmt: skip
    """Build the application.

    Args:
      runs: folder of the active runs.
      token: token that a request must carry; None = no token, for this machine only.
      interval_s: seconds between samples.
    """
    pages, live = Pages(history, layers), Live(Sampler(runs), interval_s)

    async def page(request: Request) -> Response:
        name = request.path_params["name"] or "index.html"
        body = await pages.get(name)
        if body is None:
            return PlainTextResponse("there is no such page\n", 404)
        return Response(body, media_type=mimetypes.guess_type(name)[0] or "application/octet-stream")

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(live.run())
        yield
        task.cancel()

    routes = [Route("/events", live.events), Route("/{name:path}", page)]
    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token)], lifespan=lifespan)


def is_own(host: str) -> bool:
    """True if an address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
