"""Check that questions and responses fit a reader's window, before anything is read (S file)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from jaxbench.hallucination import encoding
from jaxbench.hallucination.reader_settings import ReaderSettings

Style = Literal["plain", "chat"]


class ReaderLimits(NamedTuple):
    """What bounds the length of texts that a reader takes."""

    tokenizer: Any
    window: int  # tokens


def limits(settings: ReaderSettings) -> ReaderLimits:
    """Return the limits of a reader, without loading its weights."""
    from jaxbench.pretrained import weights
    from jaxbench.pretrained.tokenizer import load_tokenizer

    window = settings.window or weights.read_config(settings.model).max_seq_len
    return ReaderLimits(load_tokenizer(settings.model), window)


def check(tokenizer: Any, question: str, response: str, *, window: int, style: Style) -> None:
    """Check that a window of `window` tokens holds a response, a question and some of the context.

    Raises:
      ValueError: it does not, or the response has no token or more than half the window.
    """
    length = len(encoding.encode_response(tokenizer, response).ids)
    if length > window // 2:
        raise ValueError(f"response: {length} tokens, and the window of {window} takes {window // 2}; cut it in parts")
    check_question(tokenizer, question, window=window - length, style=style)


def check_question(tokenizer: Any, question: str, *, window: int, style: Style) -> None:
    """Check that a window of `window` tokens holds a question and some of the context.

    Raises:
      ValueError: it does not.
    """
    # any token stands for the context, which is cut to fit
    encoding.encode_prompt(tokenizer, "x", question, window=window, style=style)


def check_all(rows: Iterable[tuple[str, str, str | None]], tokenizer: Any, *, window: int, style: Style) -> None:
    """Check all rows of (place, question, response) before the first is read.

    A row whose response is None is still to be answered: only its question is checked.

    Raises:
      ValueError: a row does not fit the window; it is named by its place.
    """
    for place, question, response in rows:
        try:
            if response is None:
                check_question(tokenizer, question, window=window, style=style)
            else:
                check(tokenizer, question, response, window=window, style=style)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
