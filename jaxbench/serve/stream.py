"""Pieces of answers as OpenAI's objects: whole, or as server-sent events (S file)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jaxbench.serve import protocol
from jaxbench.serve.request import TokenLogprobs
from jaxbench.serve.service import Answer, Piece

DONE = "data: [DONE]\n\n"
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Form:
    """What both interfaces share; a subclass says what a choice is."""

    kind = chunk_kind = ""

    def __init__(self, id: str, model: str, tokenizer: Any, body: Any):
        self._id, self._model, self._tokenizer = id, model, tokenizer
        options = body.stream_options or protocol.StreamOptions()
        self._wants_usage, self._counts_on = options.include_usage, options.continuous_usage_stats
        # of every event; only its choices are written anew
        self._head = _json(protocol.envelope(id, self.chunk_kind, model, [])).removesuffix("[]}")

    def opening(self, number: int) -> dict[str, Any] | None:
        """The choice of the first event, or None."""
        return None

    def part(self, number: int, text: str, logprobs: dict[str, Any] | None, ended: str | None) -> dict[str, Any]:
        """A choice of an event."""
        raise NotImplementedError

    def choice(self, number: int, text: str, logprobs: dict[str, Any] | None, ended: str | None) -> dict[str, Any]:
        """A choice of a whole answer."""
        raise NotImplementedError

    def logprobs(self, tokens: Sequence[int], found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """Log-probabilities of tokens, None where there are none."""
        raise NotImplementedError

    async def whole(self, answers: Sequence[Answer]) -> tuple[dict[str, Any], str | None]:
        """All of the answers, and an error where one ended with it."""
        found = [await _joined(answer) for answer in answers]
        error = next((each.error or "the engine failed" for each in found if each.ended == "error"), None)
        choices = [
            self.choice(i, each.text, self.logprobs(each.tokens, each.logprobs), each.ended)
            for i, each in enumerate(found)
        ]
        return protocol.envelope(self._id, self.kind, self._model, choices, usage=_usage(answers)), error

    async def events(self, answers: Sequence[Answer]) -> AsyncIterator[str]:
        """Server-sent events of the answers, as their tokens come."""
        count = 0
        for number in range(len(answers)):
            if (opening := self.opening(number)) is not None:
                yield self._event([opening], _usage_text(answers, count) if self._counts_on else "")
        async for number, piece in _pieces(answers):
            count += len(piece.tokens)
            if piece.ended == "error":
                error = protocol.error_body(piece.error or "the engine failed", "server_error")
                yield f"data: {json.dumps(error)}\n\n"
            elif piece.text or piece.ended or piece.logprobs:
                logprobs = self.logprobs(piece.tokens, piece.logprobs)
                usage = _usage_text(answers, count) if self._counts_on else ""
                yield self._event([self.part(number, piece.text, logprobs, piece.ended)], usage)
        if self._wants_usage:
            yield self._event([], _usage_text(answers, count))
        yield DONE

    def _event(self, choices: list[dict[str, Any]], more: str = "") -> str:
        return f"data: {self._head}{_json(choices)}{more}}}\n\n"

    def _shown(self, token: int) -> str:
        return self._tokenizer.decode([token])


class Completion(Form):
    """Continuations of a text."""

    kind = chunk_kind = "text_completion"

    def choice(self, number: int, text: str, logprobs: dict[str, Any] | None, ended: str | None) -> dict[str, Any]:
        """As its interface has it."""
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": ended}

    part = choice

    def logprobs(self, tokens: Sequence[int], found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """As its interface has them."""
        if not found:
            return None
        return {
            "tokens": [self._shown(token) for token in tokens], "token_logprobs": [each.token for each in found],
            "top_logprobs": [{self._shown(token): value for token, value in each.most} for each in found],
        }  # fmt: skip


class Chat(Form):
    """Messages of a conversation."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def opening(self, number: int) -> dict[str, Any]:
        """Whose message it is."""
        return self._part(number, {"role": "assistant", "content": ""}, None, None)

    def part(self, number: int, text: str, logprobs: dict[str, Any] | None, ended: str | None) -> dict[str, Any]:
        """A piece of a message."""
        return self._part(number, {"content": text} if text else {}, logprobs, ended)

    def _part(self, number: int, delta: dict[str, Any], logprobs: Any, ended: str | None) -> dict[str, Any]:
        return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": ended}

    def choice(self, number: int, text: str, logprobs: dict[str, Any] | None, ended: str | None) -> dict[str, Any]:
        """A whole message."""
        message = {"role": "assistant", "content": text}
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": ended}

    def logprobs(self, tokens: Sequence[int], found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """As its interface has them."""
        if not found:
            return None
        content = [
            self._one(token, each.token) | {"top_logprobs": [self._one(*most) for most in each.most]}
            for token, each in zip(tokens, found)
        ]
        return {"content": content}

    def _one(self, token: int, value: float) -> dict[str, Any]:
        text = self._shown(token)
        return {"token": text, "logprob": value, "bytes": list(self._tokenizer.token_bytes(token))}


async def _joined(answer: Answer) -> Piece:
    """All pieces of an answer as one."""
    whole = Piece("")
    while whole.ended is None:
        piece = await answer.pieces.get()
        whole = Piece(
            whole.text + piece.text, whole.tokens + piece.tokens, whole.logprobs + piece.logprobs, piece.ended,
            piece.error,
        )  # fmt: skip
    return whole


async def _pieces(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Piece]]:
    """Pieces of several answers as they come, each with the number of its answer, until all have ended."""
    if len(answers) == 1:  # as almost always: no tasks between its queue and the client
        ended = None
        while ended is None:
            piece = await answers[0].pieces.get()
            ended = piece.ended
            yield 0, piece
        return
    merged: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
    readers = [asyncio.create_task(_read(i, answer, merged)) for i, answer in enumerate(answers)]
    left = len(answers)
    try:
        while left:
            number, piece = await merged.get()
            left -= piece.ended is not None
            yield number, piece
    finally:
        for reader in readers:
            reader.cancel()


async def _read(number: int, answer: Answer, merged: asyncio.Queue[tuple[int, Piece]]) -> None:
    piece = Piece("")
    while piece.ended is None:
        piece = await answer.pieces.get()
        await merged.put((number, piece))


def _usage(answers: Sequence[Answer], count: int | None = None) -> dict[str, Any]:
    """Tokens of the prompt, of it found in the cache, and of the answers; count: those told so far, None = all."""
    first = answers[0]
    new = sum(len(each.ids) for each in answers) if count is None else count
    return protocol.usage(len(first.request.prompt), first.num_cached, new)


def _usage_text(answers: Sequence[Answer], count: int) -> str:
    return f',"usage":{_json(_usage(answers, count))}'
