"""Whether a reader's window takes a question and a response, told before anything is read (S file)."""

from __future__ import annotations

from typing import Any, Literal

from jaxbench.hallucination import encoding


def check(tokenizer: Any, question: str, response: str, *, window: int, style: Literal["plain", "chat"]) -> None:
    """Check that a window of `window` tokens takes a response behind a question and some of its context.

    Raises:
      ValueError: it does not, or the response has no token.
    """
    length = len(encoding.encode_response(tokenizer, response).ids)
    if length > window // 2:
        raise ValueError(f"response: {length} tokens, and the window of {window} takes {window // 2}; cut it in parts")
    # of the context any token will do: the rest is cut where it does not fit
    encoding.encode_prompt(tokenizer, "x", question, window=window - length, style=style)
