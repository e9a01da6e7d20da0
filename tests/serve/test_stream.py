"""What answers look like: events, log-probabilities, the places of tokens."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import openai
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers.models import BPE

from jaxbench.pretrained.tokenizer import Tokenizer
from jaxbench.serve import intake, stream
from jaxbench.serve.protocol import ChatBody, CompletionBody
from jaxbench.serve.request import TokenLogprobs
from jaxbench.serve.service import Piece
from tests.serve.asking import MESSAGES, Bytes


def answered(request, text, most):
    """An answer whose tokens are the bytes of a text, and come one by one."""
    pieces, ids = asyncio.Queue(), list(text)
    for number, byte in enumerate(ids):
        logprobs = (TokenLogprobs(-3.0, most),)
        pieces.put_nowait(Piece("", (byte,), logprobs, "stop" if number == len(ids) - 1 else None))
    return SimpleNamespace(request=request, ids=ids, num_cached=1, pieces=pieces, ended=None, goes_on=False)


def test_log_probabilities_of_a_continuation_have_the_chosen_token_and_where_it_stands():
    body = intake.checked(
        {"prompt": ["a", "bc"], "logprobs": 1, "stream_options": {"include_usage": True}}, CompletionBody
    )
    texts, most = ["xé".encode(), b"yz"], ((120, -0.5),)
    requests = [SimpleNamespace(prompt=(97,)), SimpleNamespace(prompt=(98, 99))]

    def answers():
        return [answered(*each, most) for each in zip(requests, texts)]

    async def run():
        form = stream.Completion("r", "tiny", Bytes(), body)
        events = [event async for event in stream.Completion("r", "tiny", Bytes(), body).events(answers())]
        return await form.whole(answers()), events

    (whole, error), events = asyncio.run(run())
    first, second = (each["logprobs"] for each in whole["choices"])
    assert error is None and [each["index"] for each in whole["choices"]] == [0, 1]
    assert first["text_offset"] == [0, 1, 1] and second["text_offset"] == [0, 1]  # é is two tokens
    assert second["top_logprobs"] == [{"x": -0.5, "y": -3.0}, {"x": -0.5, "z": -3.0}]
    assert first["top_logprobs"][0] == {"x": -3.0} and first["tokens"][0] == "x"
    assert whole["usage"]["prompt_tokens"] == 3 and whole["usage"]["completion_tokens"] == 5
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    parts = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    offsets = [each["choices"][0]["logprobs"]["text_offset"][0] for each in parts if each["choices"]]
    numbers = [each["choices"][0]["index"] for each in parts if each["choices"]]
    assert [[o for i, o in zip(numbers, offsets) if i == number] for number in (0, 1)] == [[0, 1, 1], [0, 1]]
    assert parts[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("form", "kind", "body"),
    [
        (stream.Completion, CompletionBody, {"prompt": "a", "logprobs": 1}),
        (stream.Chat, ChatBody, {"messages": MESSAGES}),
    ],
)
def test_an_event_is_one_line_however_a_client_tells_lines_apart(form, kind, body):
    text, pieces = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e\r\né", asyncio.Queue()
    pieces.put_nowait(Piece(text, (97,), (TokenLogprobs(-1.0, ()),), "stop"))
    answer = SimpleNamespace(
        request=SimpleNamespace(prompt=(97,)), ids=[97], num_cached=0, pieces=pieces, goes_on=False
    )

    async def run():
        return [event async for event in form("r", "tiny", Bytes(), intake.checked(body, kind)).events([answer])]

    lines = "".join(asyncio.run(run())).splitlines()
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    choices = [part["choices"][0] for part in parts]
    assert "".join(each["text"] if "text" in each else each["delta"].get("content", "") for each in choices) == text


@pytest.mark.parametrize("form", [stream.Completion, stream.Chat])
def test_a_timeout_is_told_beside_a_reason_that_openais_types_have(form):
    types = openai.types.CompletionChoice, openai.types.chat.chat_completion.Choice
    body, kind = ({"messages": MESSAGES}, ChatBody) if form is stream.Chat else ({"prompt": "a"}, CompletionBody)
    made = form("r", "tiny", Bytes(), intake.checked(body, kind))
    for make in (made.choice, lambda *given: made.parts(*given)[-1]):
        assert [make(0, "a", None, ended).get("timed_out") for ended in (None, "stop", "length")] == [None] * 3
        found = make(0, "a", None, "timeout")
        assert (found["finish_reason"], found["timed_out"]) == ("length", True)
    whole = made.choice(0, "a", None, "timeout")
    types[form is stream.Chat].model_validate(whole)


def spaced():
    """A tokenizer as SentencePiece's: a space in front of a word is the word's, and goes at a text's beginning."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581the", "the"]
    core = tokenizers.Tokenizer(BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    core.add_special_tokens(["</s>"])
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made = Tokenizer(core, eos_id=1, bos_id=None, chat_template=None)
    return made, core.token_to_id("\u2581the"), core.token_to_id("the")


def told(tokenizer, ids, most=(), *, form=stream.Completion, kind=CompletionBody, goes_on=False, **body):
    """Log-probabilities of an answer of some tokens, as an interface has them."""
    given = {"prompt": "a", "logprobs": 5} if kind is CompletionBody else {"messages": MESSAGES, "logprobs": True}
    made = form("r", "tiny", tokenizer, intake.checked(given | body, kind))
    return made.logprobs(0, ids, [TokenLogprobs(-1.0, most)] * len(ids), goes_on=goes_on)


def test_tokens_of_log_probabilities_have_the_spaces_of_the_text_and_stay_apart():
    tokenizer, first, other = spaced()
    ids = [first, first, other, first, 1]
    found = told(tokenizer, ids, ((first, -1.0), (other, -2.0)))
    text = tokenizer.decode(ids, skip_special=True)
    assert text == "the thethe the" and "".join(found["tokens"]) == f" {text}</s>"
    assert found["text_offset"] == [0, 3, 7, 10, len(text)]
    assert found["top_logprobs"][0] == {" the": -1.0, "the": -2.0}
    assert told(tokenizer, [1, *ids])["text_offset"] == [0, *found["text_offset"]]
    going_on = told(tokenizer, ids, goes_on=True)
    assert going_on["tokens"] == found["tokens"] and going_on["text_offset"] == [0, 4, 8, 11, len(text) + 1]
    said = told(tokenizer, ids[:2], ((other, -2.0),), form=stream.Chat, kind=ChatBody, top_logprobs=1)["content"]
    assert [bytes(each["bytes"]) for each in said] == [b" the"] * 2 and said[0]["top_logprobs"][0]["bytes"] == [*b"the"]


def test_parts_of_characters_are_told_apart_by_their_bytes_as_openai_writes_them():
    found = told(Bytes(), [*"é".encode()], ((0xC3, -1.0), (0xE2, -2.0), (0x41, -3.0)))
    assert found["tokens"] == [r"bytes:\xc3", r"bytes:\xa9"]
    assert found["top_logprobs"][0] == {r"bytes:\xc3": -1.0, r"bytes:\xe2": -2.0, "A": -3.0}
    most = ((0xC3, -1.0), (0xE2, -2.0), (0x41, -3.0))
    said = told(Bytes(), [*"é".encode()], most, form=stream.Chat, kind=ChatBody, top_logprobs=3)["content"]
    assert [(each["token"], each["bytes"]) for each in said] == [(r"\xc3", [0xC3]), (r"\xa9", [0xA9])]
    assert [each["token"] for each in said[0]["top_logprobs"]] == [r"\xc3", r"\xe2", "A"]


def test_a_tokens_place_counts_the_characters_that_bytes_become_which_are_none():
    whole = {each.encode(): [0] * len(each.encode()) for each in "aé€😀"}
    cut = {b"\xe2\x82": [0, 0], b"\xf0\x9f\x98": [0, 0, 0], b"\xed\xbc": [0, 1]}  # of the last none is a beginning
    odd = {b"\xff": [0], b"a\x80": [0, 1], b"a\x80\x80\x80\x80\x80": [0, 1, 2, 3, 4, 5]}
    parts, random = [*(whole | cut | odd).items()], np.random.default_rng(0)
    for _ in range(100):
        data, wanted = b"", []
        for i in random.integers(0, len(parts), 12):
            at = wanted[-1] + 1 if wanted else 0
            data, wanted = data + parts[i][0], [*wanted, *(at + each for each in parts[i][1])]
        assert told(Bytes(), list(data))["text_offset"] == wanted, data
