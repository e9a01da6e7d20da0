"""The server as its clients see it: a process with a small model, driven by OpenAI's client and by sockets."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai
import pytest

from jaxbench.native import library
from tests.serve.running import ROOT, Running, eventually, exchange, opened
from tests.serve.running import folder as folder  # a fixture

pytestmark = pytest.mark.skipif(not library.is_available(), reason="native kernels cannot be had here")


@pytest.fixture(scope="module")
def server(folder):
    """Return a server that runs."""
    marks = {"one": ("scheme=kgw", "delta=6"), "two": ("scheme=gumbel",)}
    watermarks = [f"{name}.scheme.{each}" for name, fields in marks.items() for each in fields]
    watermarks += [f"{name}.key_file={folder / name}.key" for name in marks]
    running = Running(folder, *(f"engine.watermarks.{each}" for each in watermarks))
    yield running
    assert running.end() == 0


def test_openais_client_gets_models_answers_streams_choices_and_log_probabilities(server):
    client = server.client
    assert [model.id for model in client.models.list().data] == ["tiny"] == [client.models.retrieve("tiny").id]
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"
    asked = {"model": "tiny", "prompt": "The mill " * 12, "max_tokens": 12, "seed": 5, "temperature": 0.8}
    whole = client.completions.create(**asked, logprobs=2)
    again = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    pieces = list(again)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert (
        pieces[-1].usage.prompt_tokens_details.cached_tokens == 64
        and whole.usage.prompt_tokens_details.cached_tokens == 0
    )
    counted = client.completions.create(**asked, stream=True, stream_options={"continuous_usage_stats": True})
    counts = [piece.usage.completion_tokens for piece in counted]
    assert counts == sorted(counts) and counts[-1] == whole.usage.completion_tokens and len(counts) > 3
    assert len(whole.choices[0].logprobs.token_logprobs) == whole.usage.completion_tokens
    assert whole.choices[0].logprobs.text_offset[:2] == [0, len(whole.choices[0].logprobs.tokens[0])]
    tokens = server.metric("prompt_tokens_total"), server.metric("cached_tokens_total")
    both = client.completions.create(**asked | {"prompt": ["a", asked["prompt"]]}, n=2)
    assert server.metric("prompt_tokens_total") - tokens[0] == both.usage.prompt_tokens  # each prompt once
    assert server.metric("cached_tokens_total") - tokens[1] == both.usage.prompt_tokens_details.cached_tokens
    assert [each.index for each in both.choices] == [0, 1, 2, 3] and both.choices[2].text == whole.choices[0].text
    three = client.completions.create(**asked, n=3)
    assert three.choices[0].text == whole.choices[0].text and len({each.text for each in three.choices}) > 1


def test_answers_follow_the_schema_that_openais_client_asks_for(server):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    messages = [{"role": "user", "content": "yes or no"}]
    found = server.client.chat.completions.create(
        model="tiny", messages=messages, response_format=asked, max_tokens=200, seed=1
    )
    assert isinstance(json.loads(found.choices[0].message.content)["a"], bool)
    assert found.choices[0].finish_reason == "stop"


NO_TEXT = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"regex": "(a{1000}){1000}{1000}"}, "regex: it is too large to be followed ("),
        ({"response_format": NO_TEXT}, "json_schema: no text follows it"),
        ({"choice": ["a", "\ud800"]}, "choice.1 has a lone surrogate, which is no Unicode text: "),
    ],
)
def test_a_grammar_that_nothing_can_follow_is_refused_by_its_field(server, body, said):
    status, text = server.post("/v1/completions", {"prompt": "a"} | body)
    error = json.loads(text)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error") and error["param"] in body
    assert error["message"].startswith(said) and len(error["message"]) < 200 and "\n" not in error["message"]


def test_a_grammar_that_grows_too_large_is_no_failure_of_the_server(server):
    body = {"prompt": "a", "regex": "a(b{1000}){1000}{1000}|z", "logit_bias": {str(ord("a")): 100}, "temperature": 0}
    status, text = server.post("/v1/completions", body)
    error = json.loads(text)["error"]
    assert status == 400 and error["message"].startswith("grammar: the answer cannot go on (lexer error"), text
    assert 'jaxbench_serve_answers_total{ended="refused"} 1.0' in server.get("/metrics")[1]
    status, text = server.post("/v1/completions", body | {"stream": True})
    assert status == 200 and "grammar: the answer cannot go on (lexer error" in text
    eventually(server.idle)


def test_metrics_say_what_memory_the_server_and_its_engine_hold(server):
    for name in ("server", "engine"):
        assert server.metric(f'resident_memory_bytes{{process="{name}"}}') > 2**24
        assert server.metric(f'cpu_seconds{{process="{name}"}}') > 0.1


def test_answers_are_marked_under_the_key_that_a_request_names_and_found_again(server):
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 120, "temperature": 1, "seed": 3}
    for name in ("one", "two", None):
        extra = {"regex": "[a-z ]{120}"} | ({} if name is None else {"watermark": name})  # a text of 120 tokens again
        text = server.client.completions.create(**asked, extra_body=extra).choices[0].text
        status, found = server.post("/v1/watermark/detect", {"text": text, "prompt_tokens": 0})
        found = json.loads(found)
        assert status == 200 and [each["watermark"] for each in found["watermarks"]] == ["one", "two"]
        assert found["best"] == name and found["p_value"] < 1e-6 if name else found["p_value"] > 1e-4, (name, found)
    for body in (
        {}, {"text": "a", "tokens": [1]}, {"text": 3}, {"tokens": []}, {"tokens": [-1]}, {"tokens": [10**9]},
        {"text": "a", "watermarks": ["three"]}, {"text": "a", "watermarks": []}, {"text": "\ud800"},
        {"text": "a", "prompt_tokens": -1}, {"text": "a", "level": 1}, {"tokens": [10**30]},
        {"text": ""},
    ):  # fmt: skip
        status, text = server.post("/v1/watermark/detect", json.dumps(body).encode())
        assert status == 400 and len(json.loads(text)["error"]["message"]) > 10, (status, text, body)
    assert json.loads(server.post("/v1/watermark/detect", {"text": "a"})[1])["p_value"] > 1e-4
    drawing = {"prompt": "a", "watermark": "two"}
    unknown, payload = {"prompt": "a", "watermark": "three"}, {"prompt": "a", "watermark_payload": 3}
    for field, body in (
        ("temperature", drawing | {"temperature": 0}), ("n", drawing | {"n": 2}), ("watermark", unknown),
        ("watermark_payload", payload),
    ):  # fmt: skip
        status, text = server.post("/v1/completions", body)
        assert status == 400 and json.loads(text)["error"]["param"] == field, text
        assert "watermark two" in text or field.startswith("watermark")


def test_an_answer_ends_with_the_only_call_that_is_taken_as_what_follows_would_be_dropped(server):
    call = '<call>{"name": "look", "arguments": {"at": "sea"}}'
    asked = {
        "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1500, "temperature": 0,
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "extra_body": {"choice": ["So. " + call + "</call>" + "and so on " * 100]}, "parallel_tool_calls": False,
    }  # fmt: skip
    for _ in range(2):
        whole = server.client.chat.completions.create(**asked, n=2, logprobs=True)
        for each in whole.choices:
            assert (each.finish_reason, each.message.content, len(each.message.tool_calls)) == ("tool_calls", "So.", 1)
            assert len(each.logprobs.content) == len("So. " + call)
        assert whole.usage.completion_tokens == 2 * len("So. " + call)  # a token is a byte
    *_, last = server.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens == len("So. " + call)
    eventually(server.idle)


def test_a_stop_string_ends_a_text_before_it_and_gives_the_blocks_back(server):
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}
    text = server.client.completions.create(**asked).choices[0].text
    stop = text[5:7]
    found = server.client.completions.create(**asked, stop=[stop]).choices[0]
    assert (found.text, found.finish_reason) == (text[: text.index(stop)], "stop")
    eventually(server.idle)


BODIES = {
    "completions": {
        "prompt": [None, 3, {}, "", [], ["a", 1], [1.5], [-1], [10**9], "x" * 3000, "\ud800"],
        "max_tokens": [0, -1, 1.5, "many", [], 10**9, 10**30],
        "temperature": [-1, 3, "warm", [], 1e400, 1e-300], "top_p": [0, 1.1, "x"], "top_k": [-1, 0.5, "x"],
        "min_p": [-0.1, 1, "x"], "n": [0, -1, 9, 10**9, "x", 1.5], "stop": [3, {}, "", [""], ["a"] * 17, ["x" * 2000]],
        "seed": [-(2**63) - 1, 2**64, "x", 0.5],
        "logit_bias": [3, [], {"a": 1}, {"-1": 1}, {"5": 1000}, {"99999999": 1}],
        "frequency_penalty": [3, "x"], "presence_penalty": [-3, "x"], "repetition_penalty": [0, -1, "x"],
        "stop_token_ids": [3, ["a"], [1] * 65], "priority": [101, "x"], "timeout": [0, -1, "x"],
        "stream": ["perhaps", [], 7], "stream_options": [3, {"include": True}], "model": ["other", 3],
        "logprobs": [-1, 21, "x"], "echo": [True], "suffix": ["x"], "best_of": [2], "messages": [[]],
        "regex": ["(a", "", 3], "choice": [[], [""], "x"], "unknown": [1, "x"], "a\nb": [1],
        "ignore_eos": ["x", []], "user": [3], "watermark": ["unknown", 3, [], ""], "watermark_payload": [1, -1, "x"],
    },
    "chat/completions": {
        "messages": [
            None, [], {}, "hello", [3], [{}], [{"role": 3, "content": "a"}], [{"role": "user"}],
            [{"role": "user", "content": 3}], [{"role": "user", "content": [{"type": "image_url"}]}],
            [{"role": "user", "content": [3]}], [{"role": "user", "content": "\ud800"}],
            [{"role": "user", "content": "x" * 3000}], [{"role": "\ud800", "content": "a"}],
        ],
        "max_completion_tokens": [0, "x"], "top_logprobs": [-1, 21, "x"], "logprobs": [3, "x"], "tools": [3, [3], "x"],
        "response_format": [
            3, {"type": "xml"}, {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
        ],
        "functions": [[]], "temperature": [-1, "x"], "prompt": ["x"],
    },
}  # fmt: skip
RAW = [
    b"", b"{", b"nothing", b"[]", b"3", b"null", b"\xff\xfe", b'{"prompt": "a"', b"[" * 5000, b'{"a":' * 3000,
    b'{"prompt": NaN}', b'{"prompt": "a", "temperature": Infinity}', b"\x00" * 100,
]  # fmt: skip


def test_two_hundred_malformed_requests_are_each_a_sentence_and_cost_nothing(server):
    good = {"completions": {"prompt": "a"}, "chat/completions": {"messages": [{"role": "user", "content": "a"}]}}
    count = 0
    for path, fields in BODIES.items():
        bodies = [good[path] | {name: value} for name, values in fields.items() for value in values]
        for body in [
            *(json.dumps(each).encode() for each in bodies),
            *RAW,
            *(each + end for each in RAW for end in (b"]", b",")),
        ]:
            status, text = server.post(f"/v1/{path}", body)
            assert status >= 400, (status, text, body[:100])
            message = json.loads(text)["error"]["message"]
            assert 400 <= status < 500 and len(message) > 10 and "\n" not in message, (status, message, body[:100])
            count += 1
    for path in ("/v1/nothing", "/../etc/passwd", "/v1/%2e%2e/completions", "/v1//completions", "/%00", "/v1/models/x"):
        status, text = server.get(path)
        assert 400 <= status < 500 and json.loads(text)["error"]["message"], (status, text)
        count += 1
    assert server.get("/v1/completions")[0] == 405 and server.post("/tokenize", {"text": 3})[0] == 400
    assert count >= 200 and server.post("/v1/completions", good["completions"] | {"max_tokens": 1})[0] == 200
    eventually(server.idle)


def test_bodies_without_end_and_floods_of_headers_are_cut_off(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    large = head + b"Content-Length: 2147483648\r\n\r\n" + b" " * 200_000
    assert b" 413 " in exchange(server.port, large).splitlines()[0]
    flood = head + b"".join(b"X-%d: %s\r\n" % (i, b"y" * 1000) for i in range(200)) + b"\r\n"
    assert b"the request's line and headers are over 65536 bytes" in exchange(server.port, flood)
    endless = head + b"X-1: " + b"y" * 300_000  # of one header, which never ends
    assert b"the request's line and headers are over 65536 bytes" in exchange(server.port, endless)
    assert b" 400 " in exchange(server.port, b"nonsense\r\n\r\n").splitlines()[0]
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_goes_leaves_nothing_behind(server, is_streamed):
    body = {"prompt": "abc", "max_tokens": 1500, "ignore_eos": True, "stream": is_streamed}
    before, times, tokens = (
        server.cancelled(),
        server.metric("answer_seconds_count"),
        server.metric("prompt_tokens_total"),
    )
    with opened(server.port, body) as line:
        if is_streamed:
            line.recv(500)
        else:
            time.sleep(0.02)
    eventually(lambda: server.cancelled() == before + 1)
    eventually(server.idle)
    assert server.metric("answer_seconds_count") == times and server.metric("prompt_tokens_total") == tokens


def test_a_slow_reader_holds_nobody_up_and_gets_all_of_its_answer(server):
    body = {"prompt": "abc", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", server.port))
        line.settimeout(60)
        data = json.dumps(body).encode()
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        found = line.recv(100)
        assert server.post("/v1/completions", {"prompt": "abc", "max_tokens": 5})[0] == 200
        time.sleep(2)  # by then all of it has been computed
        while b"data: [DONE]" not in found[-200:]:
            found += line.recv(4096)
    assert b'"completion_tokens":1500' in found and b'"finish_reason":"length"' in found
    eventually(server.idle)


def test_a_client_that_goes_before_its_request_is_whole_leaves_nothing_behind(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as line:
        line.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"prompt": "a')
    assert server.post("/v1/completions", {"prompt": "abc", "max_tokens": 1})[0] == 200
    eventually(server.idle)


def test_more_than_there_is_room_for_is_refused_with_a_time_to_come_back(server):
    body = {"prompt": "abc", "max_tokens": 250, "ignore_eos": True, "n": 8, "stream": True}
    with opened(server.port, body) as line:
        line.recv(500)
        request = urllib.request.Request(f"{server.url}/v1/completions", data=b'{"prompt": "a"}')
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=30)
        error.value.close()
        assert error.value.code == 429 and error.value.headers["Retry-After"] == "1"
    eventually(server.idle)


def test_an_answer_that_takes_too_long_is_cut_off_at_its_time(server):
    body = {"prompt": "abc", "max_tokens": 1500, "ignore_eos": True, "timeout": 0.02}
    status, text = server.post("/v1/completions", body)
    choice = json.loads(text)["choices"][0]
    assert status == 200 and (choice["finish_reason"], choice["timed_out"]) == ("length", True)


TOOL = {"type": "object", "properties": {"at": {"enum": ["sky", "sea"]}}, "required": ["at"]}


def test_a_call_that_is_asked_for_follows_its_schema_whole_and_streamed_and_can_be_answered(server):
    tools = [{"type": "function", "function": {"name": "look", "parameters": TOOL | {"additionalProperties": False}}}]
    history = [{"role": "user", "content": "Is it blue?"}]
    asked = {"model": "tiny", "tools": tools, "tool_choice": "required", "seed": 3, "max_tokens": 200}
    choice = server.client.chat.completions.create(messages=history, **asked).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "look")
    assert json.loads(call.function.arguments)["at"] in ("sky", "sea")
    pieces = [each.choices[0] for each in server.client.chat.completions.create(messages=history, **asked, stream=True)]
    (streamed,) = (each for piece in pieces for each in piece.delta.tool_calls or [])
    assert streamed.function == type(streamed.function)(name="look", arguments=call.function.arguments)
    assert pieces[-1].finish_reason == "tool_calls" and not any(piece.delta.content for piece in pieces)
    history += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "yes"}]
    again = server.client.chat.completions.create(messages=history, **asked | {"tool_choice": "auto", "max_tokens": 3})
    assert again.choices[0].message.tool_calls is None and again.usage.completion_tokens <= 3
    assert server.post("/v1/chat/completions", {"messages": history[:1], "max_tokens": 2, "tools": []})[0] == 200


def test_a_long_text_is_cut_into_tokens_beside_the_answers(server):
    status, text = server.post("/tokenize", {"text": "mill " * 15_000})
    assert status == 200 and json.loads(text)["count"] == 75_000
    assert "together" in server.post("/v1/completions", {"prompt": "mill " * 15_000})[1]


def test_a_key_is_asked_for_and_a_worker_that_is_killed_or_hangs_is_started_again(folder):
    server = Running(folder, "engine.hang_s=6", JAXBENCH_API_KEY="secret")
    assert server.post("/v1/completions", {"prompt": "a"}, Host="x/health?")[0] in (400, 401)
    assert server.get("/v1/models")[0] == 401 == server.get("/v1/models", Authorization="Bearer wrong")[0]
    assert server.get("/v1/models", Authorization="Bearer secret")[0] == server.get("/health")[0] == 200
    asked = {"prompt": "the old mill", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    data = json.dumps(asked).encode()
    request = urllib.request.Request(
        f"{server.url}/v1/completions", data=data, headers={"Authorization": "Bearer secret"}
    )
    worker = server.worker()
    with urllib.request.urlopen(request, timeout=60) as response:
        response.readline()
        os.kill(worker, signal.SIGKILL)
        rest = response.read().decode()
    assert "exit code -9" in rest and rest.endswith("[DONE]\n\n")
    status, text = server.post("/v1/completions", {"prompt": "a"}, Authorization="Bearer secret")
    assert status == 503 and "loading" in text
    server.wait()
    status, text = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, Authorization="Bearer secret")
    assert status == 200
    line = [json.loads(each) for each in server.log.read_text().splitlines()]
    assert any(each["event"] == "worker lost" for each in line) and "old mill" not in server.log.read_text()
    with urllib.request.urlopen(request, timeout=60) as response:
        response.readline()
        os.kill(server.worker(), signal.SIGSTOP)  # a step that does not end
        rest = response.read().decode()
    assert "no sign of life for 6 s" in rest and rest.endswith("[DONE]\n\n")
    server.wait()
    whole = asked | {"stream": False}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/completions", whole, Authorization="Bearer secret")
        time.sleep(0.2)
        os.kill(server.worker(), signal.SIGKILL)
        status, text = answer.result(60)
    assert status == 500 and "exit code -9" in text and "choices" not in text
    server.wait()
    with urllib.request.urlopen(request, timeout=60) as response:  # in progress when the server is told to end
        response.readline()
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.get("/ready")[0] == 503)  # it listens until the answer has ended
        assert "draining" in server.get("/ready")[1] and server.get("/health")[0] == 200
        status, text = server.post("/v1/completions", {"prompt": "a"}, Authorization="Bearer secret")
        assert status == 503 and "the server is ending" in text
        rest = response.read().decode()
    assert '"finish_reason":"length"' in rest and rest.endswith("[DONE]\n\n")
    assert server.end() == 0


def test_a_second_interrupt_ends_the_answers_at_once_and_tells_their_clients(folder):
    server = Running(folder, "drain_s=300")
    with opened(server.port, {"prompt": "abc", "max_tokens": 1500, "ignore_eos": True, "stream": True}) as line:
        line.recv(500)
        os.kill(server.worker(), signal.SIGSTOP)  # the answer does not end by itself
        server.process.send_signal(signal.SIGINT)
        eventually(lambda: server.get("/ready")[0] == 503)
        server.process.send_signal(signal.SIGINT)
        rest = b""
        while part := line.recv(65536):
            rest += part
    assert b"the server ended before the answer did" in rest and server.process.wait(60) == 0
    assert "Traceback" not in server.log.read_text()
    server.end()


def test_a_server_is_not_opened_to_other_machines_without_a_key(folder):
    command = [sys.executable, str(ROOT / "experiments/serve.py"), "--set=host=0.0.0.0", "--set=port=0"]
    environment = {name: value for name, value in os.environ.items() if name != "JAXBENCH_API_KEY"}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120)
    assert found.returncode == 2 and "set JAXBENCH_API_KEY" in found.stderr
    blank = environment | {"JAXBENCH_API_KEY": " \n"}
    found = subprocess.run(command, capture_output=True, text=True, env=blank, cwd=ROOT, timeout=120)
    assert found.returncode == 2 and "JAXBENCH_API_KEY=' \\n' is blank" in found.stderr
