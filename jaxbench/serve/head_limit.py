"""uvicorn's HTTP protocol, with an end to what may stand in front of a body (S file; extra `serve`).

httptools, which reads fastest, takes headers without end, before any key is looked at.
"""

from __future__ import annotations

from typing import Any

MAX_HEAD_BYTES = 64 * 1024  # of a request's line and headers


def protocol() -> Any:
    """Protocol class for uvicorn.Config's `http`; h11, which has a limit of its own, where httptools is not there."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class Limited(HttpToolsProtocol):
        """A connection whose heads are cut off."""

        _is_head, _head_bytes = True, 0

        def on_message_begin(self) -> None:
            """A request begins."""
            self._is_head, self._head_bytes = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            """Its body begins."""
            self._is_head = False
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            """Read what came; a head that has not ended by then is refused."""
            super().data_received(data)
            self._head_bytes += len(data) if self._is_head else 0
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"the request's line and headers are over {MAX_HEAD_BYTES} bytes")

    return Limited
