"""Encode a context, a question and responses as token ids with character offsets (S file)."""

from __future__ import annotations

import datetime
from typing import Any, Literal, NamedTuple

from jaxbench.hallucination.layout import Text

_MARK = "\0context\0"
# What chat templates that write the date (Llama 3, Mistral) write: neither features nor answers depend on the day.
DATE = datetime.datetime(2024, 7, 26)  # Llama 3's own, for where there is no clock


class Encoded(NamedTuple):
    """A prompt with its context and without it, and the character offsets of the context's tokens."""

    text: Text
    without: Text  # the same prompt with an empty context
    offsets: tuple[tuple[int, int], ...]  # characters of the context's tokens
    num_cut: int  # tokens of the context that did not fit the window, from its end


class EncodedResponse(NamedTuple):
    """A response's token ids, and the characters of each: start and end."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]


def encode_response(tokenizer: Any, response: str) -> EncodedResponse:
    """Encode a response.

    Raises:
      ValueError: it is empty.
    """
    encoding = tokenizer.core.encode(response, add_special_tokens=False)
    if not encoding.ids or not response.strip():
        raise ValueError(f"response: {response[:40]!r} is empty; there is nothing to judge")
    return EncodedResponse(tuple(encoding.ids), tuple(encoding.offsets))


def encode_prompt(
    tokenizer: Any, context: str, question: str, *, window: int, style: Literal["plain", "chat"] = "plain"
) -> Encoded:
    """Encode a prompt: the question, the context, and the text that asks for the answer.

    window: tokens for the prompt; the context is cut at its end to fit.

    Raises:
      ValueError: the context is empty, the window has no room for any of it, or the model has no chat template that
        writes a user's text once.
    """
    if not context.strip():
        raise ValueError(f"context: {context[:40]!r} is empty; there is nothing that an answer could rest on")
    before, behind = (
        tokenizer.core.encode(part, add_special_tokens=False).ids for part in _around(tokenizer, question, style)
    )
    if style == "plain" and tokenizer.bos_id is not None:
        before = [tokenizer.bos_id, *before]
    encoding = tokenizer.core.encode(context, add_special_tokens=False)
    room = window - len(before) - len(behind)
    if room < 1:
        raise ValueError(
            f"context: {len(before) + len(behind)} tokens around it leave no room in a window of {window}; shorten the "
            "question"
        )
    kept = encoding.ids[:room]
    text = Text([*before, *kept, *behind], range(len(before), len(before) + len(kept)))
    without = Text([*before, *behind], range(0))
    return Encoded(text, without, tuple(encoding.offsets[:room]), len(encoding.ids) - len(kept))


def _around(tokenizer: Any, question: str, style: str) -> tuple[str, str]:
    """Return the text before the context and the text after it."""
    asked = f"{question}\n\n" if question else ""
    if style == "plain":
        return asked, "\n\nAnswer:\n"
    parts = tokenizer.chat([{"role": "user", "content": f"{asked}{_MARK}"}], now=DATE).split(_MARK)
    if len(parts) != 2:
        raise ValueError(
            f"style={style}: the model's chat template writes the text of the user {len(parts) - 1} times as it is, "
            "wanted once; pass --set=style=plain"
        )
    return parts[0], parts[1]
