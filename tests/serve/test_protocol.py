"""OpenAI's interface without an engine: what is taken, how it is refused, and which answers an engine is asked for."""

import asyncio
import functools
import json
import threading
import time
from types import SimpleNamespace

import pytest

from jaxbench.serve import app, intake, stream
from jaxbench.serve.engine import Event
from jaxbench.serve.metrics import Metrics
from jaxbench.serve.protocol import ChatBody, CompletionBody
from jaxbench.serve.request import Request
from jaxbench.serve.scheduler import Limits
from jaxbench.serve.service import Answer
from jaxbench.serve.settings import ServerConfig
from tests.serve.asking import MESSAGES, SERVICE, Bytes, asked, settings


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
        ({"repetition_penalty": 1e-320}, "repetition_penalty"), ({"stop": ["a", "\ud800"]}, "stop"),
        ({"stream": "true"}, "stream"), ({"stream": 1}, "stream"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"), ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": MESSAGES, "top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"messages": MESSAGES, "store": True}, "store"),
        ({"messages": MESSAGES, "service_tier": "flex"}, "service_tier"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        ({"messages": MESSAGES, "tools": [{"a": 1}], "tool_choice": "none"}, "tools.0"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"), ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"), ({"prompt": [True]}, "prompt"), ({"prompt": [[]]}, "prompt"),
        ({"prompt": [""]}, "prompt"), ({"prompt": ["a"] * 33}, "prompt"), ({"prompt": ["a", "b"], "n": 17}, "prompt"),
        ({"stop_token_ids": [256]}, "stop_token_ids"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
        ({"n": 33}, "n"), ({"seed": 2**63}, "seed"), ({"seed": -(2**63) - 1}, "seed"), ({"unknown": 1}, "unknown"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"a": functools.reduce(lambda a, _: [a], range(100), [])}},
         "chat_template_kwargs"),
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
        {"messages": MESSAGES, "chat_template_kwargs": {"documents": ["a" * intake.LONG_TEXT]}},
    ],
    ids=["a message", "tools", "variables"],
)
def test_a_long_text_is_made_in_another_thread_wherever_it_is_in_the_body(monkeypatch, body):
    threads, chat = [], Bytes.chat

    def noted(self, messages, **how):
        threads.append(threading.current_thread())
        return chat(self, messages, **how)

    monkeypatch.setattr(Bytes, "chat", noted)
    asked(messages=MESSAGES)
    asked(**body)
    assert [each is threading.main_thread() for each in threads[:2]] == [True, False]


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"prompt": "a", "max_tokens": 1, "max_tokens": 2}', "'max_tokens'"),
        (b'{"prompt": "a", "logit_bias": {"5": 1, "5": -1}}', "'5'"),
        (b'{"prompt": "a", "response_format": {"type": "text", "type": "json_object"}}', "'type'"),
        (rb'{"prompt": "a", "\ud800": 1, "\ud800": 2}', r"'\ud800'"),
        (b"{" + b"".join(b'"%d": 1, ' % i for i in range(100_000)) + b'"99999": 1}', "'99999'"),
    ],
)
def test_a_key_twice_is_refused_as_only_one_of_its_values_could_be_followed(body, key):
    began = time.process_time()
    with pytest.raises(intake.Bad) as error:
        intake.parsed(body, CompletionBody)
    assert str(error.value) == f"the body has the key {key} twice in one object; wanted it once"
    assert time.process_time() - began < 5  # of many keys, too


@pytest.mark.parametrize("key", ["1_0_0", "0100", " 6", "6 ", "+7", "5.0", "-1", "", "a", "\u0665", "9" * 5000, "6\n"])
def test_a_biased_token_is_written_in_one_way_only(key):
    error = asked(prompt="a", logit_bias={key: 1.0, "6": 2.0})
    assert error.status == 400 and error.param.startswith("logit_bias.") and "is no token id" in str(error)
    assert asked(prompt="a", logit_bias={"0": 1, "100": 2.5})[0].sampling.logit_bias == {0: 1.0, 100: 2.5}


def test_a_seed_may_be_any_of_64_bits_and_the_same_one_draws_the_same():
    seeds = [asked(prompt="a", seed=seed)[0].sampling.seed for seed in (-1, -1, -(2**63), 5)]
    assert seeds[0] == seeds[1] == 2**63 - 1 and seeds[2:] == [0, 5]


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
        ({"prompt": [10**4000]}, 400, None, "prompt", f"prompt: token 1{'0' * 39}; wanted some"),
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
