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
        self._n = body.n  # answers to each prompt
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

    def logprobs(
        self, number: int, tokens: Sequence[int], found: Sequence[TokenLogprobs]
    ) -> dict[str, Any] | None:  # fmt: skip
        """Log-probabilities of an answer's next tokens, None where there are none."""
        raise NotImplementedError

    async def whole(self, answers: Sequence[Answer]) -> tuple[dict[str, Any], str | None]:
        """All of the answers, and an error where one ended with it."""
        found = [await _joined(answer) for answer in answers]
        error = next((each.error or "the engine failed" for each in found if each.ended == "error"), None)
        choices = [
            self.choice(i, each.text, self.logprobs(i, each.tokens, each.logprobs), each.ended)
            for i, each in enumerate(found)
        ]
        return protocol.envelope(self._id, self.kind, self._model, choices, usage=self._usage(answers)), error

    async def events(self, answers: Sequence[Answer]) -> AsyncIterator[str]:
        """Server-sent events of the answers, as their tokens come."""
        count = 0
        for number in range(len(answers)):
            if (opening := self.opening(number)) is not None:
                yield self._event([opening], self._usage_text(answers, count) if self._counts_on else "")
        async for number, piece in _pieces(answers):
            count += len(piece.tokens)
            if piece.ended == "error":
                kind = "invalid_request_error" if answers[number].is_refused else "server_error"
                error = protocol.error_body(piece.error or "the engine failed", kind)
                yield f"data: {json.dumps(error)}\n\n"
            elif piece.text or piece.ended or piece.logprobs:
                logprobs = self.logprobs(number, piece.tokens, piece.logprobs)
                usage = self._usage_text(answers, count) if self._counts_on else ""
                yield self._event([self.part(number, piece.text, logprobs, piece.ended)], usage)
        if self._wants_usage:
            yield self._event([], self._usage_text(answers, count))
        yield DONE

    def _event(self, choices: list[dict[str, Any]], more: str = "") -> str:
        return f"data: {self._head}{_json(choices)}{more}}}\n\n"

    def _usage(self, answers: Sequence[Answer], count: int | None = None) -> dict[str, Any]:
        """Tokens of prompts, of them found in the cache, and of answers; count: those told so far, None = all."""
        firsts = answers[:: self._n]  # one for each prompt
        new = sum(len(each.ids) for each in answers) if count is None else count
        prompts = sum(len(each.request.prompt) for each in firsts)
        return protocol.usage(prompts, sum(each.num_cached for each in firsts), new)

    def _usage_text(self, answers: Sequence[Answer], count: int) -> str:
        return f',"usage":{_json(self._usage(answers, count))}'

    def _shown(self, token: int) -> str:
        return self._tokenizer.decode([token])


class Completion(Form):
    """Continuations of a text."""

    kind = chunk_kind = "text_completion"

    def __init__(self, id: str, model: str, tokenizer: Any, body: Any):
        super().__init__(id, model, tokenizer, body)
        self._begun: dict[int, int] = {}  # characters of each answer that its tokens have begun

    def choice(self, number: int, text: str, logprobs: dict[str, Any] | None, ended: str | None) -> dict[str, Any]:
        """As its interface has it."""
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": ended}

    part = choice

    def logprobs(
        self, number: int, tokens: Sequence[int], found: Sequence[TokenLogprobs]
    ) -> dict[str, Any] | None:  # fmt: skip
        """As its interface has them."""
        if not found:
            return None
        shown = [self._shown(token) for token in tokens]
        return {
            "tokens": shown, "token_logprobs": [each.token for each in found],
            "top_logprobs": [
                {self._shown(other): value for other, value in each.most} | {token: each.token}
                for token, each in zip(shown, found)
            ],
            "text_offset": [self._offset(number, token) for token in tokens],
        }  # fmt: skip

    def _offset(self, number: int, token: int) -> int:
        """Character of the answer's text that its next token begins in; tokens may be parts of one."""
        begun = self._begun.get(number, 0)
        starts = [byte & 0xC0 != 0x80 for byte in self._tokenizer.token_bytes(token)]  # of characters, in UTF-8
        self._begun[number] = begun + sum(starts)
        return begun if not starts or starts[0] else max(0, begun - 1)


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

    def logprobs(
        self, number: int, tokens: Sequence[int], found: Sequence[TokenLogprobs]
    ) -> dict[str, Any] | None:  # fmt: skip
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
