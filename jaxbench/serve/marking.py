"""What the engine and the server ask of a watermark; jaxbench/watermark/serving.py has it (S file)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jaxbench.result_cache import ResultCache
from jaxbench.serve.request import Marker, Request


class Finder(Protocol):
    """Looks for marks in texts."""

    names: tuple[str, ...]

    def find(self, text: str | Sequence[int], names: Sequence[str], *, prompt_tokens: int = 0) -> dict[str, Any]:
        """What each of some keys says of a text, or of token ids.

        Raises:
          ValueError: a key is unknown, or a token outside the vocabulary.
        """


class Marks(Protocol):
    """Watermarks that are ready: everything that they compile is compiled."""

    def begin(self, request: Request) -> Marker:
        """What marks a request's answer."""


class Watermarks(Protocol):
    """Watermarks by the names that requests give; travels to the engine's process."""

    def check(self, request: Request) -> None:
        """Check that a request can be marked as it asks.

        Raises:
          ValueError: it cannot; the message begins with the field that a body has for it, and says what was wanted.
        """

    def marks(self, vocab_size: int) -> Marks:
        """The watermarks, ready for logits of so many tokens."""

    def finder(self, tokenizer: Any, vocab_size: int, cache: ResultCache | None = None) -> Finder:
        """What finds them again; cache: of scores."""

    def described(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Some of the watermarks as `watermark.py identify --watermarks` reads them."""


def check(request: Request, watermarks: Watermarks | None) -> None:
    """Check that a request can be marked as it asks, if it asks at all.

    Raises:
      ValueError: it cannot; the message begins with the field of the body, such as `watermark: `.
    """
    if watermarks is not None:
        watermarks.check(request)
    elif request.watermark is not None or request.payload:
        raise ValueError(f"watermark: {str(request.watermark)[:60]!r} is unknown here; the server has none")
