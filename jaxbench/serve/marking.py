"""The interface of watermarks to engine and server; jaxbench/watermark/serving.py implements it (S file)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jaxbench.result_cache import ResultCache
from jaxbench.serve.request import Marker, Request


class Finder(Protocol):
    """Detects watermarks in texts."""

    names: tuple[str, ...]

    def find(self, text: str | Sequence[int], names: Sequence[str], *, prompt_tokens: int = 0) -> dict[str, Any]:
        """Return what detection with each of some keys finds in a text, or in token ids.

        Raises:
          ValueError: a key is unknown, or a token outside the vocabulary.
        """


class Marks(Protocol):
    """Watermarks that are ready to use: everything that they compile is compiled."""

    def begin(self, request: Request) -> Marker:
        """Return the marker of a request's answer."""


class Watermarks(Protocol):
    """Watermarks by the names that requests give; sent to the engine's process."""

    def check(self, request: Request) -> None:
        """Check that a request can be marked as it asks.

        Raises:
          ValueError: it cannot; the message begins with the field of the body, and says what was wanted.
        """

    def marks(self, vocab_size: int) -> Marks:
        """Return the watermarks, ready for logits of `vocab_size` tokens."""

    def finder(self, tokenizer: Any, vocab_size: int, cache: ResultCache | None = None) -> Finder:
        """Return the detector of these watermarks; cache: of scores."""

    def described(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Describe some of the watermarks as `watermark.py identify --watermarks` reads them."""


def check(request: Request, watermarks: Watermarks | None) -> None:
    """Check that a request can be marked as it asks, if it asks at all.

    Raises:
      ValueError: it cannot; the message begins with the field of the body, such as `watermark: `.
    """
    if watermarks is not None:
        watermarks.check(request)
    elif request.watermark is not None or request.payload:
        raise ValueError(f"watermark: {str(request.watermark)[:60]!r} is unknown here; the server has none")
