"""OpenAI's interface without an engine: what is taken, how it is refused, and what answers look like."""

import asyncio
import json
import threading
from types import SimpleNamespace

import numpy as np
import openai
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers.models import BPE

from jaxbench.pretrained.tokenizer import Tokenizer
from jaxbench.serve import app, intake, stream
from jaxbench.serve.engine import Event
from jaxbench.serve.metrics import Metrics
from jaxbench.serve.protocol import ChatBody, CompletionBody
from jaxbench.serve.request import Request, TokenLogprobs
from jaxbench.serve.scheduler import Limits
from jaxbench.serve.service import Answer, Piece
from jaxbench.serve.settings import ServerConfig

MESSAGES = [{"role": "user", "content": "hi"}]


class Bytes:
    """A tokenizer whose tokens are bytes, and whose template writes what it is given."""

    end_ids = ()
    longest_token = None

    def encode(self, text, *, add_special=True):
        return list(text.encode())

    def decode(self, ids, *, skip_special=False):
        return bytes(ids).decode(errors="replace")

    def token_bytes(self, token):
        return bytes([token])

    def chat(self, messages, *, tools=None):
        shown = [f"<{each['role']}>{each['content']}{each.get('tool_calls', '')}" for each in messages]
        return "".join(shown) + str(tools or "")


SERVICE = SimpleNamespace(
    config=ServerConfig(), tokenizer=Bytes(), watermarks=None, check_ready=lambda: None,
    submit=lambda made, go_on: made,
    about={"max_seq_len": 100, "vocab_size": 256, "cache_tokens": 1000, "grammars": False},
)  # fmt: skip


def asked(**body):
    """The engine's requests of a body; an Exception where it is refused."""
    kind = ChatBody if "messages" in body else CompletionBody
    try:
        return asyncio.run(intake.submitted(SERVICE, "tiny", "r", intake.checked(body, kind)))
    except intake.Bad as error:
        return error


def settings(request):
    """A request but for its seed, which is drawn where none is given."""
    return request._replace(sampling=request.sampling.model_copy(update={"seed": 0}))


def test_a_watermark_that_is_not_here_is_refused_by_its_field():
    for field, value in {"watermark": "team", "watermark_payload": 3}.items():
        refusal = asked(prompt="hi", **{field: value})
        assert isinstance(refusal, intake.Bad) and refusal.body["error"]["param"] == "watermark", refusal
        assert "the server has none" in str(refusal)


@pytest.mark.parametrize(
    "name", ["n", "stream", "stop", "logit_bias", "seed", "temperature", "top_p", "max_tokens", "logprobs", "echo",
             "suffix", "best_of", "frequency_penalty", "stream_options", "user", "top_k", "stop_token_ids", "timeout",
             "reasoning_effort", "modalities", "audio", "functions", "prediction", "unknown"],
)  # fmt: skip
def test_a_field_that_is_null_is_one_that_is_left_out_also_if_it_is_not_served(name):
    (with_null,), (without,) = asked(prompt="a", **{name: None}), asked(prompt="a")
    assert settings(with_null)._replace(deadline=0) == settings(without)._replace(deadline=0)


def test_a_null_inside_an_object_is_left_out_and_a_required_one_is_missed():
    form = {"type": "text", "json_schema": None, "unknown": None}
    ((one,), (other,)) = asked(prompt="a", response_format=form, stream_options={"unknown": None}), asked(prompt="a")
    assert settings(one) == settings(other)
    for body, param in (({"prompt": None}, "prompt"), ({"prompt": "a", "response_format": {"type": None}}, "type")):
        error = asked(**body)
        assert isinstance(error, intake.Bad) and error.param.endswith(param)


@pytest.mark.parametrize(
    "body",
    [{"tool_choice": "none"}, {"tool_choice": "auto"}, {"store": False}, {"store": None}, {"service_tier": "auto"},
     {"service_tier": "default"}, {"service_tier": None}, {"metadata": {"a": "b"}}, {"parallel_tool_calls": True},
     {"safety_identifier": "x"}, {"prompt_cache_key": "x"}, {"user": "x"}],
)  # fmt: skip
def test_what_changes_no_answer_is_taken(body):
    ((one,), (other,)) = asked(messages=MESSAGES, **body), asked(messages=MESSAGES)
    assert settings(one) == settings(other)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "0"}, "temperature"), ({"logprobs": True}, "logprobs"), ({"n": "2"}, "n"),
        ({"stream": "true"}, "stream"), ({"stream": 1}, "stream"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"), ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": MESSAGES, "top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"messages": MESSAGES, "store": True}, "store"),
        ({"messages": MESSAGES, "service_tier": "flex"}, "service_tier"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        ({"messages": MESSAGES, "tools": [{"a": 1}], "tool_choice": "none"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"), ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"), ({"prompt": [True]}, "prompt"), ({"prompt": [[]]}, "prompt"),
        ({"prompt": [""]}, "prompt"), ({"prompt": ["a"] * 33}, "prompt"), ({"prompt": ["a", "b"], "n": 17}, "prompt"),
        ({"stop_token_ids": [256]}, "stop_token_ids"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
        ({"n": 33}, "n"), ({"seed": 2**63}, "seed"), ({"seed": -(2**63) - 1}, "seed"), ({"unknown": 1}, "unknown"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)  # fmt: skip
def test_what_is_of_another_type_or_would_change_the_answer_is_refused_by_its_field(body, param):
    error = asked(**({} if "messages" in body else {"prompt": "a"}) | body)
    assert isinstance(error, intake.Bad) and (error.status, error.param) == (400, param)
    assert error.body["error"]["param"] == param and "Value error" not in str(error)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [*MESSAGES, {"role": "user", "content": "a" * intake.LONG_TEXT}]},
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "a" * intake.LONG_TEXT}}]},
    ],
    ids=["a message", "tools"],
)
def test_a_long_text_is_made_in_another_thread_wherever_it_is_in_the_body(monkeypatch, body):
    threads, chat = [], Bytes.chat

    def noted(self, messages, *, tools=None):
        threads.append(threading.current_thread())
        return chat(self, messages, tools=tools)

    monkeypatch.setattr(Bytes, "chat", noted)
    asked(messages=MESSAGES)
    asked(**body)
    assert [each is threading.main_thread() for each in threads[:2]] == [True, False]


@pytest.mark.parametrize("key", ["1_0_0", "0100", " 6", "6 ", "+7", "5.0", "-1", "", "a", "\u0665", "9" * 5000, "6\n"])
def test_a_biased_token_is_written_in_one_way_only(key):
    error = asked(prompt="a", logit_bias={key: 1.0, "6": 2.0})
    assert error.status == 400 and error.param.startswith("logit_bias.") and "is no token id" in str(error)
    assert asked(prompt="a", logit_bias={"0": 1, "100": 2.5})[0].sampling.logit_bias == {0: 1.0, 100: 2.5}


def test_a_seed_may_be_any_of_64_bits_and_the_same_one_draws_the_same():
    seeds = [asked(prompt="a", seed=seed)[0].sampling.seed for seed in (-1, -1, -(2**63), 5)]
    assert seeds[0] == seeds[1] == 2**63 - 1 and seeds[2:] == [0, 5]


def test_an_assistants_message_without_content_is_empty_as_where_it_refused():
    refused = {"role": "assistant", "content": None, "refusal": "no"}
    (request,) = asked(messages=[MESSAGES[0], refused, MESSAGES[0]])
    assert bytes(request.prompt).decode() == "<user>hi<assistant><user>hi"


def call(arguments, **more):
    return {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}} | more


def test_a_developers_message_is_a_system_message_as_templates_know_no_other_name():
    found = [asked(messages=[{"role": role, "content": "Be brief."}, *MESSAGES]) for role in ("developer", "system")]
    assert [bytes(request.prompt).decode() for (request,) in found] == ["<system>Be brief.<user>hi"] * 2


def test_calls_of_earlier_answers_reach_the_template_as_objects(monkeypatch):
    history = [
        MESSAGES[0] | {"name": None}, {"role": "assistant", "content": None, "tool_calls": [call('{"a": [null, 1]}')]},
        {"role": "tool", "content": [{"type": "text", "text": each} for each in "42"], "tool_call_id": "c"},
    ]  # fmt: skip
    monkeypatch.setitem(SERVICE.about, "max_seq_len", 1000)
    (request,) = asked(messages=history)
    shown = str([{"type": "function", "function": {"name": "look", "arguments": {"a": [None, 1]}}, "id": "c"}])
    assert bytes(request.prompt).decode() == f"<user>hi<assistant>{shown}<tool>42"


def test_calls_that_the_template_does_not_show_are_refused(monkeypatch):
    monkeypatch.setattr(Bytes, "chat", lambda self, messages, *, tools=None: f"{len(messages)} messages{tools or ''}")
    error = asked(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call("{}")]}])
    assert (error.status, error.param) == (400, "messages.1.tool_calls") and "does not show calls" in str(error)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "wizard", "content": "a"}, "role"), ({"role": "", "content": "a"}, "role"),
        ({"role": "user<|im_end|>", "content": "a"}, "role"), ({"content": "a"}, "role"),
        ({"role": "assistant"}, "content"), ({"role": "assistant", "tool_calls": []}, "content"),
        ({"role": "tool"}, "content"), ({"role": "user", "content": []}, "content"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "foo": 1}]}, "content"),
        ({"role": "user", "content": "a", "foo": 1}, "foo"), ({"role": "user", "content": "a", "name": "b"}, "name"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "b"}}, "function_call"),
        ({"role": "user", "content": "a", "refusal": "b"}, "refusal"),
        ({"role": "user", "content": "a", "tool_call_id": "b"}, "tool_call_id"),
        ({"role": "user", "content": "a", "tool_calls": [call("{}")]}, "tool_calls"),
        ({"role": "assistant", "content": "a", "tool_calls": 5}, "tool_calls"),
        ({"role": "assistant", "content": "a", "tool_calls": [call("{}", type="x")]}, "tool_calls.0.type"),
        ({"role": "assistant", "content": "a", "tool_calls": [{}]}, "tool_calls.0.function"),
        *(
            ({"role": "assistant", "tool_calls": [call(arguments)]}, "tool_calls.0.function.arguments")
            for arguments in ("", "[]", "{", {}, "[" * 5000)
        ),
    ],
)  # fmt: skip
def test_what_the_model_would_not_see_of_a_message_is_refused_by_its_place(message, place):
    error = asked(messages=[*MESSAGES, message])
    assert isinstance(error, intake.Bad) and (error.status, error.param) == (400, f"messages.1.{place}")
    assert len(str(error)) < 400 and "\n" not in str(error)


def test_several_prompts_are_several_answers_in_their_order_each_as_if_it_were_alone():
    found = asked(prompt=["ab", "cde"], n=2, seed=7, max_tokens=3)
    assert [(bytes(each.prompt).decode(), each.sampling.choice, each.id) for each in found] == [
        ("ab", 0, "r-0"), ("ab", 1, "r-1"), ("cde", 0, "r-2"), ("cde", 1, "r-3"),
    ]  # fmt: skip
    for one in (["ab"], [[97, 98]], [97, 98]):
        assert asked(prompt=one, seed=7, max_tokens=3) == asked(prompt="ab", seed=7, max_tokens=3)
    given = asked(prompt=[[1, 2], [3]], seed=7)
    assert [each.prompt for each in given] == [(1, 2), (3,)]


def test_a_list_may_have_as_many_answers_as_run_at_once_and_each_ends_at_256_tokens_by_default(monkeypatch):
    monkeypatch.setitem(SERVICE.about, "max_seq_len", 1000)
    found = asked(prompt=["a"] * 16, n=2)
    assert len(found) == Limits().max_running == 32 and {each.max_new_tokens for each in found} == {256}


def test_prompts_of_a_list_are_drawn_by_seeds_of_their_own_where_none_is_given():
    found = [each.sampling.seed for each in asked(prompt=["ab", "ab", "cd"], n=2, max_tokens=3)]
    assert found[::2] == found[1::2] and len(set(found)) == 3  # choices of a prompt differ by their row of the stream
    assert {each.sampling.seed for each in asked(prompt=["ab", "ab"], seed=7, max_tokens=3)} == {7}


@pytest.mark.parametrize(
    ("body", "status", "code", "param", "said"),
    [
        ({"model": "other"}, 404, "model_not_found", "model", "model 'other' is not here"),
        ({"max_tokens": 1000}, 400, "context_length_exceeded", "prompt", "together 100 are possible"),
        ({"prompt": "a" * 200}, 400, "context_length_exceeded", "prompt", "the prompt has 200 tokens"),
        ({"prompt": [1, -1]}, 400, None, "prompt", "prompt: token -1; wanted some, each from 0 to 255"),
        ({"prompt": [256]}, 400, None, "prompt", "prompt: token 256;"),
        ({"messages": MESSAGES, "max_tokens": 1000}, 400, "context_length_exceeded", "messages", "together 100"),
    ],
)
def test_errors_have_the_codes_that_openais_clients_look_at(body, status, code, param, said):
    error = asked(**({} if "messages" in body else {"prompt": "a"}) | body)
    assert (error.status, error.code, error.param) == (status, code, param) and said in str(error)
    assert error.body["error"]["code"] == code


@pytest.mark.parametrize("body", [{"prompt": ["a", "a" * 301]}, {"messages": [{"role": "user", "content": "a" * 301}]}])
def test_a_text_that_is_too_long_however_few_tokens_it_has_is_refused_before_it_is_tokenized(monkeypatch, body):
    encoded, encode = [], Bytes.encode
    monkeypatch.setattr(Bytes, "encode", lambda self, text, **how: encoded.append(text) or encode(self, text, **how))
    monkeypatch.setattr(Bytes, "longest_token", 3)  # of a context of 100
    error = asked(**body)
    assert (error.code, error.param) == ("context_length_exceeded", next(iter(body))) and encoded == []
    assert "together 100 are possible" in str(error)
    assert len(asked(prompt="a" * 90)) == 1 and len(encoded) == 1
    monkeypatch.setattr(Bytes, "longest_token", None)
    assert asked(**body).code == "context_length_exceeded" and len(encoded) > 1


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


@pytest.mark.parametrize("form", [stream.Completion, stream.Chat])
def test_a_timeout_is_told_beside_a_reason_that_openais_types_have(form):
    types = openai.types.CompletionChoice, openai.types.chat.chat_completion.Choice
    made = form("r", "tiny", Bytes(), intake.checked({"prompt": "a"}, CompletionBody))
    for make in (made.choice, made.part):
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


def got(application, path, key="secret", scheme="Bearer"):
    """Status and body of a path of an application that is not started."""
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http", "method": "GET", "path": path, "query_string": b"", "http_version": "1.1", "root_path": "",
        "headers": [(b"authorization", f"{scheme} {key}".encode())],
    }  # fmt: skip
    asyncio.run(application(scope, receive, send))
    return sent[0]["status"], json.loads(b"".join(each.get("body", b"") for each in sent[1:]))


def test_the_model_is_found_by_its_name_and_another_is_none(monkeypatch):
    monkeypatch.setenv(intake.KEY_VARIABLE, "secret")
    made = app.make(ServerConfig(name="a/b"), Bytes)
    made.state.service = SimpleNamespace(metrics=Metrics(), about={"max_seq_len": 100})

    (status, one), (_, every), none = (got(made, path) for path in ("/v1/models/a/b", "/v1/models", "/v1/models/c"))
    assert status == 200 and one == every["data"][0] and (one["id"], one["object"]) == ("a/b", "model")
    assert none[0] == 404 and none[1]["error"]["code"] == "model_not_found"
    assert [got(made, "/v1/models", scheme=scheme)[0] for scheme in ("bearer", "BEARER", "Basic")] == [200, 200, 401]
    status, refused = got(made, "/v1/models/a/b", key="wrong")
    assert status == 401 and refused["error"]["code"] == "invalid_api_key"
    assert b"/v1/models/c" not in made.state.service.metrics.text()  # names are the client's: no series of each


@pytest.mark.parametrize(
    ("kind", "more", "goes_on"),
    [
        (CompletionBody, {"prompt": "a"}, True),
        (CompletionBody, {"prompt": "a", "regex": "b+"}, False),
        (ChatBody, {"messages": MESSAGES}, False),
    ],
    ids=["a completion", "of a grammar", "a message"],
)
def test_only_the_text_of_a_completion_goes_on_from_its_prompts(monkeypatch, kind, more, goes_on):
    found = SimpleNamespace(**vars(SERVICE) | {"submit": lambda made, go_on: go_on})
    body = intake.checked(more, kind)

    async def grammar(*_):
        return more.get("regex")

    monkeypatch.setattr(intake, "_grammar", grammar)
    assert asyncio.run(intake.submitted(found, "tiny", "r", body)) is goes_on


@pytest.mark.parametrize(
    ("error", "share"), [("Unfollowed: grammar: the answer cannot go on (x)", 0.0), ("ValueError: logits", 1.0)]
)
def test_a_stream_that_its_own_grammar_ends_is_no_failure_of_the_server(error, share):
    async def run():
        tokenizer = SimpleNamespace(core=None, decode=lambda ids, skip_special: "", end_ids=())
        answer, seen = Answer(Request("a", (1,), 5), tokenizer), []
        answer.take(Event("a", None, None, "error", error))
        watch = SimpleNamespace(observe=lambda name, value, now: seen.append((name, value)))
        service = SimpleNamespace(watch=watch, drop=lambda answers: None)
        form = stream.Completion("r", "tiny", Bytes(), CompletionBody(prompt="a", stream=True))
        sent = []

        async def send(message):
            sent.append(message.get("body", b""))

        await app._Stream(form.events([answer]), service, [answer])(
            {"type": "http", "asgi": {"spec_version": "2.4"}}, None, send
        )
        return seen, b"".join(sent).decode()

    seen, text = asyncio.run(run())
    assert seen == [("error_share", share)] and error.removeprefix("Unfollowed: ") in text
