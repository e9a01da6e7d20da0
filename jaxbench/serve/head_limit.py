"""uvicorn's HTTP protocol, with an end to heads and to silence (S file; extra `serve`).

httptools, which reads fastest, takes headers without end, before any key is looked at; and uvicorn waits without end
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
OWN_FILES = 128  # that a server has open beside its connections, at most; of few files half are its own
PIECE = 4096  # bytes that are read at once: of a head behind another request's body no more are counted wrongly
TELL_S = 60.0  # at least between two lines about silent connections: whoever opens thousands does not fill the log


def protocol(silence_s: float) -> Any:
    """Protocol class for uvicorn.Config's `http`; h11, which ends heads but no silence, where httptools is not there.

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
    """Connections that the process's open files have room for."""
    try:
        import resource
    except ImportError:  # Windows
        return sys.maxsize
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if files == resource.RLIM_INFINITY else max(files // 2, files - OWN_FILES)


class _Limited:
    """In front of uvicorn's protocol: a connection that ends where its head or its client's silence is too long."""

    # of all connections of a server
    silence_s: float
    most: int  # connections; behind them the most silent one gives way to the next
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
    _number = 0  # of connections: the loop's clock gives many that come at once the same time
    _since = 0.0  # of the loop's clock: when what is waited for began, of a body when it last went on
    _timer: asyncio.TimerHandle | None = None  # None = nothing is waited for

    def connection_made(self, transport: Any) -> None:
        """A client is there, and has sent nothing."""
        super().connection_made(transport)
        self._number = next(self.numbers)
        self._wait()
        if len(self.connections) > self.most:
            others = [each for each in self.connections if each is not self and each._is_silent()]
            if others:
                min(others, key=lambda each: (each._since, each._number))._end_silence()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins; that of the first one was waited for."""
        if self._part != "head":
            self._part, self._head_bytes = "head", self._piece_bytes
        if self._timer is None:
            self._wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its body begins."""
        self._part, self._since = "body", self.loop.time()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of it is there: how long the answer takes is not the client's doing."""
        self._part = "idle"
        self._stop_waiting()
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Read what came; a head that has not ended by then is refused."""
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
            self._wait()  # what came belongs to no request, and has ended uvicorn's wait for the next one

    def _is_answered(self) -> bool:
        """True while an answer is computed or sent."""
        cycle = self.cycle
        if self.pipeline:  # the newest request's cycle, and an older one is at work
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
        """Close the connection where nothing came for too long, and that is not the server's own doing."""
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
        """Count one, and tell of those since the last line."""
        self._untold += 1
        if now - self._told >= TELL_S:
            fields = {"connections": self._untold, "silence_s": self._silence_s}
            log.warning("silent connections are closed", extra={"fields": fields})
            self._untold, self._told = 0, now
