"""Replicas by Ray Serve: what begins alike goes to one of them, and one that is killed costs no other answer."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import openai
import psutil
import pytest

from jaxbench.native import library
from tests.generation import tiny

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install -e '.[ray]'")
pytestmark = pytest.mark.skipif(not library.is_available(), reason="native kernels cannot be had here")
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("name=tiny", "engine.cache_tokens=2048", "engine.limits.max_running=4", "engine.limits.max_batch_tokens=64",
            "engine.limits.max_waiting=4")  # fmt: skip


def test_beginnings_are_spread_and_keep_their_replica_when_another_goes():
    from jaxbench.serve.prefix_router import ranked

    names = ["a", "b", "c"]
    first = {f"text {i}": ranked(f"text {i}", names)[0] for i in range(300)}
    assert all(60 < list(first.values()).count(name) < 140 for name in names)
    without = {text: ranked(text, ["a", "c"])[0] for text in first}
    assert all(without[text] == name for text, name in first.items() if name != "b")
    assert sorted(ranked("\ud800", names)) == names  # no Unicode text: an error would leave its client without answer


def test_a_replica_that_refused_is_not_asked_again_and_the_least_busy_other_is():
    from jaxbench.serve.prefix_router import order, ranked

    busy = {"a": 3, "b": 1, "c": 0}
    first, *_ = ranked("text", list(busy))
    assert order("text", busy, excluded=(), most_ahead=8)[0] == first
    assert order("text", busy | {first: 20}, excluded=(), most_ahead=8)[-1] == first
    assert order("text", busy, excluded=["c"], most_ahead=8) == ["b", "a"]
    assert order("text", busy, excluded=["a", "b", "c"], most_ahead=8) == ["c", "b", "a"]
    assert order("text", {}, excluded=["a"], most_ahead=8) == []


@pytest.mark.parametrize("status", [429, 503])
def test_a_request_that_one_replica_refuses_is_answered_by_another(status):
    from jaxbench.serve import fleet
    from jaxbench.serve.settings import ServerConfig

    async def items(excluded):
        free = [name for name in names if name not in excluded]
        asked.append(free[0])
        yield (200, {"by": free[0]}) if free[0] == "idle" else (status, {"error": "full"}, free[0])

    handle = SimpleNamespace(answer=SimpleNamespace(remote=lambda *_, excluded, **__: items([*excluded])))
    handle.options = lambda **_: handle
    for names, wanted in ((["full", "idle"], 200), (["a", "b", "c", "d"], status)):
        asked = []
        gateway = fleet.Gateway(handle, ServerConfig(), None)
        response = asyncio.run(gateway._answered("/v1/completions", b"{}", "r"))
        assert response.status_code == wanted and asked == names[: fleet.ATTEMPTS]
        assert ("retry-after" in response.headers) == (wanted != 200)


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v1/models", 200, None), ("HEAD", "/v1/models", 200, None), ("GET", "/v1/models/tiny", 200, None),
        ("GET", "/v1/models/", 200, None), ("GET", "/health", 200, None), ("DELETE", "/v1/models", 405, "GET, HEAD"),
        ("POST", "/v1/models", 405, "GET, HEAD"), ("DELETE", "/v1/models/tiny", 405, "GET, HEAD"),
        ("POST", "/health", 405, "GET, HEAD"), ("GET", "/v1/completions", 405, "POST"),
        ("GET", "/v1/models/other", 404, None), ("DELETE", "/v1/nothing", 404, None), ("GET", "/", 404, None),
    ],
)  # fmt: skip
def test_each_path_has_its_methods_and_the_model_the_length_of_its_context(method, path, status, allow):
    from starlette.requests import Request

    from jaxbench.serve import fleet
    from jaxbench.serve.settings import ServerConfig

    async def longest():
        return 512

    handle = SimpleNamespace(max_seq_len=SimpleNamespace(remote=lambda beginning: longest()))
    handle.options = lambda **_: handle
    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    response = asyncio.run(fleet.Gateway(handle, ServerConfig(name="tiny"), None)(Request(scope)))
    assert (response.status_code, response.headers.get("allow")) == (status, allow)
    assert "x-request-id" not in response.headers  # Ray Serve's own would be a second one
    if status == 200 and path != "/health":
        found = json.loads(response.body)
        assert (found["data"][0] if "data" in found else found)["max_model_len"] == 512


class Endless:
    """Items of an answer that has no end, until it is cancelled."""

    def __init__(self, first):
        self._first, self._cancelled = [first], asyncio.Event()

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._first and self._first[0] is not None:
            return self._first.pop()
        await self._cancelled.wait()
        raise asyncio.CancelledError

    def cancel(self):
        self._cancelled.set()


@pytest.mark.parametrize("first", [(200, None), None])
def test_an_answer_that_does_not_end_in_time_is_cut_off_and_its_client_told(first):
    from jaxbench.serve import fleet
    from jaxbench.serve.settings import ServerConfig

    items = Endless(first)
    handle = SimpleNamespace(answer=SimpleNamespace(remote=lambda *_, **__: items))
    handle.options = lambda **_: handle

    async def read(gateway):
        response = await gateway._answered("/v1/completions", b"{}", "r")
        if first is None:
            return response.status_code, response.body.decode()
        return response.status_code, "".join([event async for event in response.body_iterator])

    async def run():
        gateway = fleet.Gateway(handle, ServerConfig(), None)
        reading = asyncio.create_task(read(gateway))
        await asyncio.sleep(0)  # the answer is begun
        assert await gateway.drain(0.0) == 1
        refused = await gateway._answered("/v1/completions", b"{}", "s")
        return await reading, (refused.status_code, refused.body), (await gateway._state("/ready")).status_code

    (status, text), (code, body), ready = asyncio.run(run())
    assert status == (503 if first is None else 200) and "the server ended before the answer did" in text
    assert code == ready == 503 and b"the server is ending" in body


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Return the address and the process of a fleet of two."""
    folder = tmp_path_factory.mktemp("fleet")
    tiny.make(folder / "model", max_seq_len=512)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "experiments/serve.py"), f"--model={folder / 'model'}", "--replicas=2"]
    command += [f"--set={each}" for each in (*SETTINGS, f"port={port}")]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=ROOT)
    line = process.stdout.readline()
    assert line.startswith("http://") and "2 replicas" in line, (line, (folder / "log").read_text())
    yield f"http://127.0.0.1:{port}", process
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    process.stdout.close()


def engines(process):
    """The engines' processes: spawned by Ray's replicas."""
    found = []
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ServeReplica:jaxbench:replica" in " ".join(each.cmdline()):
                found.append(each)
    return found


def cached(answer):
    return answer.usage.prompt_tokens_details.cached_tokens


def test_what_one_full_replica_refuses_the_idle_one_answers(fleet):
    url, _ = fleet
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        how = {"model": "tiny", "prompt": "the old mill", "n": 8, "max_tokens": 300, "extra_body": {"ignore_eos": True}}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            answers = [each.result(60) for each in [pool.submit(client.completions.create, **how) for _ in range(2)]]
    assert [len(each.choices) for each in answers] == [8, 8]  # as many as one replica takes, twice


def test_two_replicas_answer_alike_and_one_that_is_killed_is_made_up_for(fleet):
    url, process = fleet
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        assert [(each.id, each.max_model_len) for each in client.models.list()] == [("tiny", 512)]
        raw = client.models.with_raw_response.retrieve("tiny", extra_headers={"x-request-id": "mine"})
        assert raw.parse().id == "tiny" and raw.headers.get_list("x-request-id") == ["mine"]
        with pytest.raises(openai.NotFoundError) as none:
            client.models.retrieve("other")
        assert none.value.code == "model_not_found"
        how = {"model": "tiny", "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
        texts = [f"{number} " + "abcdefgh " * 20 for number in range(6)]
        first = [client.completions.create(prompt=text, **how) for text in texts]
        again = [client.completions.create(prompt=text, **how) for text in texts]
        assert [each.choices[0].text for each in again] == [each.choices[0].text for each in first]
        assert [cached(each) for each in again] == [128] * 6  # whole blocks, each at the replica that knows the text
        chunks = client.completions.create(prompt=texts[0], stream=True, **how)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == first[0].choices[0].text
        for body, status in ((b"{", 400), (b'{"prompt": "a", "max_tokens": -1}', 400), (b'{"prompt": "\\ud800"}', 400)):
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", data=body), timeout=60)
            assert error.value.code == status and b"message" in error.value.read()
            error.value.close()
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{url}/v1/nothing", timeout=60)
        assert error.value.code == 404
        error.value.close()

        replicas = engines(process)
        assert len(replicas) == 2

        def ask(number):
            return client.completions.create(prompt=texts[number % 6], **how | {"max_tokens": 60}).choices[0].text

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            running = [pool.submit(ask, number) for number in range(24)]
            time.sleep(0.2)
            replicas[0].kill()
            answers = [future.result(60) for future in running]  # whole answers are begun again elsewhere
        assert all(text.startswith(first[number % 6].choices[0].text) for number, text in enumerate(answers))
        until = time.monotonic() + 60
        while len(engines(process)) < 2:
            assert time.monotonic() < until, "no replica came in place of the one that was killed"
            time.sleep(0.2)


def test_a_fleet_that_is_told_to_end_lets_its_answers_end_and_takes_no_more(fleet):
    url, process = fleet
    body = {"prompt": "the old mill", "max_tokens": 450, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(f"{url}/v1/completions", data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        response.readline()
        process.send_signal(signal.SIGTERM)
        rest = response.read().decode()
    assert '"finish_reason":"length"' in rest and rest.endswith("[DONE]\n\n")
    assert process.wait(120) == 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/health", timeout=10)
