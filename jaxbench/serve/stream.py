"""Answers as OpenAI's objects: whole, or in pieces as server-sent events (S file)."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from jaxbench.serve import protocol, reasoning, tools
from jaxbench.serve.request import TokenLogprobs
from jaxbench.serve.service import Answer, Piece

DONE = "data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# an event is one line, also to clients that cut a stream by str.splitlines, as httpx's and requests' iter_lines do
_LINE_ENDS = {0x85: r"\u0085", 0x2028: r"\u2028", 0x2029: r"\u2029"}


def _json(value: Any) -> str:
    text = _encode(value)
    return text if text.isascii() else text.translate(_LINE_ENDS)


class Form:
    """What both interfaces share; a subclass defines the form of a choice."""

    kind = chunk_kind = ""
    part_prefix = ""  # in front of the bytes of a part of a character

    def __init__(self, id: str, model: str, tokenizer: Any, body: Any):
        self._id, self._model, self._tokenizer = id, model, tokenizer
        options = body.stream_options or protocol.StreamOptions()
        self._n = body.n  # answers to each prompt
        self._wants_usage, self._counts_on = options.include_usage, options.continuous_usage_stats
        self._bytes: dict[int, bytes] = {}  # of tokens sent before, as the same ones recur
        # common to all events; only the choices are encoded anew
        self._head = _json(protocol.envelope(id, self.chunk_kind, model, [])).removesuffix("[]}")

    def opening(self, number: int) -> dict[str, Any] | None:
        """Return the choice of the first event, or None."""
        return None

    def parts(
        self, number: int, text: str, logprobs: dict[str, Any] | None, ended: str | None
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Return the choices of the next events, one of each; [] = there is nothing to tell yet."""
        raise NotImplementedError

    def choice(self, number: int, text: str, logprobs: dict[str, Any] | None, ended: str | None) -> dict[str, Any]:
        """Return a choice of a whole answer."""
        raise NotImplementedError

    def logprobs(
        self, number: int, tokens: Sequence[int], found: Sequence[TokenLogprobs], *, goes_on: bool
    ) -> dict[str, Any] | None:  # fmt: skip
        """Return log-probabilities of an answer's next tokens, None where there are none; goes_on: see Answer."""
        raise NotImplementedError

    def attend(self, answers: Sequence[Answer]) -> None:
        """Get to know the answers before their text comes: no other task may run between their submission and this."""

    def whole(self, answers: Sequence[Answer]) -> Coroutine[Any, Any, tuple[dict[str, Any], str | None]]:
        """Return the object with all answers, to be awaited, and the first error that one ended with, or None."""
        self.attend(answers)  # here, as what is returned may run later
        return self._whole(answers)

    async def _whole(self, answers: Sequence[Answer]) -> tuple[dict[str, Any], str | None]:
        found = [await _joined(answer) for answer in answers]
        error = next((each.error or "the engine failed" for each in found if each.ended == "error"), None)
        choices = [
            self.choice(i, each.text, self.logprobs(i, each.tokens, each.logprobs, goes_on=answer.goes_on), each.ended)
            for i, (answer, each) in enumerate(zip(answers, found))
        ]
        return protocol.envelope(self._id, self.kind, self._model, choices, usage=self._usage(answers)), error

    def events(self, answers: Sequence[Answer]) -> AsyncIterator[str]:
        """Return the server-sent events of the answers, which come as their tokens do."""
        self.attend(answers)
        return self._events(answers)

    async def _events(self, answers: Sequence[Answer]) -> AsyncIterator[str]:
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
                goes_on = answers[number].goes_on
                logprobs = self.logprobs(number, piece.tokens, piece.logprobs, goes_on=goes_on)
                usage = self._usage_text(answers, count) if self._counts_on else ""
                for part in self.parts(number, piece.text, logprobs, piece.ended):
                    yield self._event([part], usage)
        if self._wants_usage:
            yield self._event([], self._usage_text(answers, count))
        yield DONE

    def _event(self, choices: list[dict[str, Any]], more: str = "") -> str:
        return f"data: {self._head}{_json(choices)}{more}}}\n\n"

    def _usage(self, answers: Sequence[Answer], count: int | None = None) -> dict[str, Any]:
        """Count tokens of prompts, their cached part, and of answers; count: the answers' so far, None = all."""
        firsts = answers[:: self._n]  # one for each prompt
        new = sum(len(each.ids) for each in answers) if count is None else count
        prompts = sum(len(each.request.prompt) for each in firsts)
        return protocol.usage(prompts, sum(each.num_cached for each in firsts), new)

    def _usage_text(self, answers: Sequence[Answer], count: int) -> str:
        return f',"usage":{_json(self._usage(answers, count))}'

    def _bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token's text inside a text; for part of a character, the token's own bytes."""
        if token not in self._bytes:
            decode = self._tokenizer.decode
            alone = decode([token])
            # alone, and at the beginning of a text, SentencePiece's decoders leave out the space in front of a word
            text = decode([token, token])[len(alone) :]
            self._bytes[token] = self._tokenizer.token_bytes(token) if "\ufffd" in alone else text.encode()
        return self._bytes[token]

    def _name(self, token: int) -> str:
        """Return a token's text; for part of a character, its bytes in OpenAI's notation, \\xf0\\x9f."""
        own = self._bytes_of(token)
        try:
            return own.decode()
        except UnicodeDecodeError:
            return self.part_prefix + "".join(f"\\x{byte:02x}" for byte in own)


class Completion(Form):
    """Continuations of a text."""

    kind = chunk_kind = "text_completion"
    part_prefix = "bytes:"

    def __init__(self, id: str, model: str, tokenizer: Any, body: Any):
        super().__init__(id, model, tokenizer, body)
        self._places: dict[int, Place] = {}  # position in each answer's text
        self._begun: set[int] = set()  # answers that have a token with text

    def choice(self, number: int, text: str, logprobs: dict[str, Any] | None, ended: str | None) -> dict[str, Any]:
        """Return a choice in the form of this interface."""
        return {"index": number, "text": text, "logprobs": logprobs, **_ending(ended)}

    def parts(
        self, number: int, text: str, logprobs: dict[str, Any] | None, ended: str | None
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Return the next part of a text."""
        return [self.choice(number, text, logprobs, ended)]

    def logprobs(
        self, number: int, tokens: Sequence[int], found: Sequence[TokenLogprobs], *, goes_on: bool
    ) -> dict[str, Any] | None:  # fmt: skip
        """Return log-probabilities in the form of this interface."""
        if not found:
            return None
        shown = [self._name(token) for token in tokens]
        return {
            "tokens": shown, "token_logprobs": [each.token for each in found],
            "top_logprobs": [self._top(each) | {token: each.token} for token, each in zip(shown, found)],
            "text_offset": [self._offset(number, token, goes_on) for token in tokens],
        }  # fmt: skip

    def _top(self, found: TokenLogprobs) -> dict[str, float]:
        """Return the most probable tokens by name; where several share a name, the first."""
        named: dict[str, float] = {}
        for token, value in found.top:
            named.setdefault(self._name(token), value)
        return named

    def _offset(self, number: int, token: int, goes_on: bool) -> int:
        """Return the index of the character that the answer's next token begins in; a token may be part of one."""
        begins = number not in self._begun and not goes_on
        place, decode = self._places.setdefault(number, Place()), self._tokenizer.decode
        own, alone = self._bytes_of(token), decode([token])
        if begins and "\ufffd" not in alone:
            own = alone.encode()
        if alone and not decode([token], skip_special=True):  # an end token is in no text
            return place.of(b"")
        self._begun.add(number)
        return place.of(own)


class Place:
    """Character position in a text that comes as bytes; invalid UTF-8 becomes U+FFFD, as in byte-level tokenizers.

    SentencePiece's byte fallback makes one U+FFFD of every byte of a damaged run; this count does not.
    """

    def __init__(self) -> None:
        self._count = 0  # characters in front of `_last`
        self._last = b""  # bytes from the start of the last character

    def of(self, data: bytes) -> int:
        """Return the index of the character that the text's next bytes begin in."""
        if not data:
            return self._count + _characters(self._last)
        place = self._count + _characters(self._last + data[:1]) - 1
        whole = self._last + data
        begun = max((i for i, byte in enumerate(whole) if byte & 0xC0 != 0x80), default=0)
        self._count, self._last = self._count + _characters(whole[:begun]), whole[begun:]
        return place


def _characters(data: bytes) -> int:
    return len(data.decode(errors="replace"))


class Chat(Form):
    """Messages of a conversation."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, id: str, model: str, tokenizer: Any, body: Any):
        super().__init__(id, model, tokenizer, body)
        # of calls, which are looked for
        self._notation = tools.learned(tokenizer, body.chat_template_kwargs) if body.shown_tools else None
        most = 1 if body.is_call or body.parallel_tool_calls is False else None
        self._how = {"names": {each["name"] for each in body.functions}, "most": most, "is_begun": body.is_call}
        self._finders: dict[int, tools.Finder] = {}  # of each answer
        self._tags = None if body.is_call else reasoning.learned(tokenizer)
        self._reasoning: list[reasoning.Finder] = []  # of each answer

    def attend(self, answers: Sequence[Answer]) -> None:
        """Find out whether the answers begin inside their reasoning; let them end where all else would be dropped."""
        self._reasoning = [reasoning.Finder(self._tags, is_begun=each) for each in self._are_begun(answers)]
        if self._notation is None or self._how["most"] is None:
            return
        thoughts = [reasoning.Finder(self._tags, is_begun=each) for each in self._are_begun(answers)]
        for number, answer in enumerate(answers):
            own = tools.Finder(self._notation, **self._how), thoughts[number] if thoughts else None
            answer.is_over = functools.partial(_is_full, *own)

    def _are_begun(self, answers: Sequence[Answer]) -> list[bool]:
        """Return of each answer whether it begins inside its reasoning; [] = no reasoning is known."""
        tags = self._tags
        return [] if tags is None else [tags.are_open(self._tokenizer, answer.request.prompt) for answer in answers]

    def opening(self, number: int) -> dict[str, Any]:
        """Return the choice that gives the message's role."""
        return self._part(number, {"role": "assistant", "content": ""}, None, None)

    def parts(
        self, number: int, text: str, logprobs: dict[str, Any] | None, ended: str | None
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Return pieces of a message: its end behind a call, as OpenAI's client tells of no call that ends it."""
        thought, text, calls, ended = self._found(number, text, ended)
        delta = ({"reasoning_content": thought} if thought else {}) | ({"content": text} if text else {})
        if calls:
            first = len(self._finders[number].calls) - len(calls)
            delta["tool_calls"] = [{"index": first + i} | call.shown for i, call in enumerate(calls)]
            if ended:
                return [self._part(number, delta, logprobs, None), self._part(number, {}, None, ended)]
        return [self._part(number, delta, logprobs, ended)] if delta or logprobs or ended else []

    def _part(self, number: int, delta: dict[str, Any], logprobs: Any, ended: str | None) -> dict[str, Any]:
        return {"index": number, "delta": delta, "logprobs": logprobs, **_ending(ended)}

    def choice(self, number: int, text: str, logprobs: dict[str, Any] | None, ended: str | None) -> dict[str, Any]:
        """Return a whole message."""
        thought, text, calls, ended = self._found(number, text, ended)
        message = {"role": "assistant", "content": text}
        if thought:
            message |= {"content": text or None, "reasoning_content": thought}
        if calls:
            message |= {"content": text or None, "tool_calls": [call.shown for call in calls]}
        return {"index": number, "message": message, "logprobs": logprobs, **_ending(ended)}

    def _found(self, number: int, text: str, ended: str | None) -> tuple[str, str, list[tools.Call], str | None]:
        """Return reasoning, content and calls that further text of an answer makes certain, and why it ended."""
        thought = ""
        if self._reasoning:
            thought, text = self._reasoning[number].update(text, is_whole=ended is not None)
        if self._notation is None:
            return thought, text, [], ended
        finder = self._finders.setdefault(number, tools.Finder(self._notation, **self._how))
        text, calls = finder.update(text, is_whole=ended is not None)
        is_call = (ended == "stop" and finder.calls) or (ended == "length" and finder.is_full)  # nothing was cut off
        return thought, text, calls, "tool_calls" if is_call else ended

    def logprobs(
        self, number: int, tokens: Sequence[int], found: Sequence[TokenLogprobs], *, goes_on: bool
    ) -> dict[str, Any] | None:  # fmt: skip
        """Return log-probabilities in the form of this interface."""
        if not found:
            return None
        content = [
            self._one(token, each.token) | {"top_logprobs": [self._one(*pair) for pair in each.top]}
            for token, each in zip(tokens, found)
        ]
        return {"content": content}

    def _one(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": value, "bytes": list(self._bytes_of(token))}


def _is_full(calls: tools.Finder, thought: reasoning.Finder | None, text: str) -> bool:
    """Take further text of an answer; return whether it has all calls that are taken. thought: of its reasoning."""
    if thought is not None:
        _, text = thought.update(text, is_whole=False)
    calls.update(text, is_whole=False)
    return calls.is_full


def _ending(ended: str | None) -> dict[str, Any]:
    """Return why a choice ended; OpenAI's types have no reason for a time-out, which is told beside theirs."""
    return {"finish_reason": "length", "timed_out": True} if ended == "timeout" else {"finish_reason": ended}


async def _joined(answer: Answer) -> Piece:
    """Collect all pieces of an answer into one."""
    whole = Piece("")
    while whole.ended is None:
        piece = await answer.pieces.get()
        whole = Piece(
            whole.text + piece.text, whole.tokens + piece.tokens, whole.logprobs + piece.logprobs, piece.ended,
            piece.error,
        )  # fmt: skip
    return whole


async def _pieces(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Piece]]:
    """Yield pieces of several answers as they come, each with the number of its answer, until all have ended."""
    if len(answers) == 1:  # the usual case: no tasks between its queue and the client
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
