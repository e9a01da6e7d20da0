"""Replicas by Ray Serve: what begins alike goes to one of them, and one that is killed costs no other answer."""

import concurrent.futures
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai
import psutil
import pytest

from jaxbench.native import library
from tests.generation import tiny

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'jaxbench[ray]'")
pytestmark = pytest.mark.skipif(not library.is_available(), reason="native kernels cannot be had here")
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("name=tiny", "engine.cache_tokens=2048", "engine.limits.max_running=4", "engine.limits.max_batch_tokens=64")


def test_beginnings_are_spread_and_keep_their_replica_when_another_goes():
    from jaxbench.serve.prefix_router import ranked

    names = ["a", "b", "c"]
    first = {f"text {i}": ranked(f"text {i}", names)[0] for i in range(300)}
    assert all(60 < list(first.values()).count(name) < 140 for name in names)
    without = {text: ranked(text, ["a", "c"])[0] for text in first}
    assert all(without[text] == name for text, name in first.items() if name != "b")


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


def test_two_replicas_answer_alike_and_one_that_is_killed_is_made_up_for(fleet):
    url, process = fleet
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        assert [each.id for each in client.models.list()] == ["tiny"]
        how = {"model": "tiny", "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
        texts = [f"{number} " + "abcdefgh " * 20 for number in range(6)]
        first = [client.completions.create(prompt=text, **how) for text in texts]
        again = [client.completions.create(prompt=text, **how) for text in texts]
        assert [each.choices[0].text for each in again] == [each.choices[0].text for each in first]
        assert [cached(each) for each in again] == [128] * 6  # whole blocks, each at the replica that knows the text
        chunks = client.completions.create(prompt=texts[0], stream=True, **how)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == first[0].choices[0].text
        for body, status in ((b"{", 400), (b'{"prompt": "a", "max_tokens": -1}', 400)):
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
