"""uvicorn's HTTP protocol with limits on head size and on silence (S file; extra `serve`).

httptools, the fastest parser, accepts headers without limit, before any key is checked; and uvicorn waits without limit
for what a client does not send, while each connection keeps one of the process's files open.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import Iterator
from typing import Any, Literal

log = logging.getLogger("jaxbench.serve")

MAX_HEAD_BYTES = 64 * 1024  # of a request's line and headers
OWN_FILES = 128  # that a server has open besides its connections, at most; under a low limit, half are its own
PIECE = 4096  # bytes parsed at once; of a head that follows another request's body, no more than so many are miscounted
TELL_S = 60.0  # at least between two log lines about silent connections: thousands of them do not fill the log


def protocol(silence_s: float) -> Any:
    """Return the protocol class for uvicorn.Config's `http`; without httptools h11, which limits only heads.

    silence_s: seconds that a whole head may take, and that may pass between two parts of a body.
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"
    fields = {"silence_s": silence_s, "most": _most_connections(), "closed": _Closed(silence_s)}
    fields["numbers"] = itertools.count()
    return type("Limited", (_Limited, HttpToolsProtocol), fields)


def _most_connections() -> int:
    """Return how many connections the process's limit of open files has room for."""
    try:
        import resource
    except ImportError:  # Windows
        return sys.maxsize
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if files == resource.RLIM_INFINITY else max(files // 2, files - OWN_FILES)


class _Limited:
    """Mixin for uvicorn's protocol: ends a connection whose head is too long or whose client is silent for too long."""

    # of all connections of a server
    silence_s: float
    most: int  # connections; above, the one that is silent longest gives way to a new one
    closed: _Closed
    numbers: Iterator[int]
    # uvicorn's
    connections: set[Any]
    loop: asyncio.AbstractEventLoop
    transport: Any
    flow: Any
    cycle: Any
    pipeline: Any

    _part: Literal["head", "body", "idle"] = "head"
    _head_bytes = _piece_bytes = 0
    _number = 0  # order of connections: many that come at once have the same time
    _since = 0.0  # loop's clock: when the wait began; for a body, when data last came
    _timer: asyncio.TimerHandle | None = None  # None = nothing is waited for

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request of a new client; with too many connections, close the longest silent one."""
        super().connection_made(transport)
        self._number = next(self.numbers)
        self._wait()
        if len(self.connections) > self.most:
            others = [each for each in self.connections if each is not self and each._is_silent()]
            if others:
                min(others, key=lambda each: (each._since, each._number))._end_silence()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting: the client is gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Begin a request's head; the wait for the first one began with the connection."""
        if self._part != "head":
            self._part, self._head_bytes = "head", self._piece_bytes
        if self._timer is None:
            self._wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begin the request's body."""
        self._part, self._since = "body", self.loop.time()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Stop waiting: the request is complete, and how long its answer takes is up to the server."""
        self._part = "idle"
        self._stop_waiting()
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Parse received data; refuse a head that is too long."""
        at = 0
        while at < len(data) and not self.transport.is_closing():
            room = MAX_HEAD_BYTES - self._head_bytes if self._part == "head" else PIECE
            if not room:
                self.send_400_response(f"the request's line and headers are over {MAX_HEAD_BYTES} bytes")
                return
            piece = data[at : at + min(PIECE, room)]
            self._piece_bytes = len(piece)
            if self._part == "head":
                self._head_bytes += len(piece)
            super().data_received(piece)
            at += len(piece)
        if self._part == "body":
            self._since = self.loop.time()
        elif self._timer is None and not self._is_answered():
            self._wait()  # the data belongs to no request, and has ended uvicorn's wait for the next one

    def _is_answered(self) -> bool:
        """True while an answer is computed or sent."""
        cycle = self.cycle
        if self.pipeline:  # cycle is the newest request's; an older one is being answered
            return True
        return cycle is not None and not cycle.response_complete and (cycle.response_started or not cycle.more_body)

    def _is_silent(self) -> bool:
        return self._timer is not None and not self._is_answered() and not self.transport.is_closing()

    def _end_silence(self) -> None:
        self.closed.count(self.loop.time())
        self.transport.close()

    def _wait(self) -> None:
        self._since = self.loop.time()
        self._timer = self.loop.call_later(self.silence_s, self._judge)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _judge(self) -> None:
        """Close the connection if nothing came for too long, unless the server itself was the cause."""
        now = self.loop.time()
        if self._is_answered() or self.flow.read_paused:
            self._since = now
        left = self._since + self.silence_s - now
        if left > 0:
            self._timer = self.loop.call_later(left, self._judge)
            return
        self._timer = None
        if not self.transport.is_closing():
            self._end_silence()


class _Closed:
    """Connections that were closed for silence."""

    def __init__(self, silence_s: float):
        self._silence_s, self._untold, self._told = silence_s, 0, float("-inf")

    def count(self, now: float) -> None:
        """Count one; log those since the last line, at most every TELL_S."""
        self._untold += 1
        if now - self._told >= TELL_S:
            fields = {"connections": self._untold, "silence_s": self._silence_s}
            log.warning("silent connections are closed", extra={"fields": fields})
            self._untold, self._told = 0, now
