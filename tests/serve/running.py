"""A server process with a small model, and what tests do with one."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest

from jaxbench.watermark import keys
from tests.generation import tiny

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "port=0", "name=tiny", "engine.cache_tokens=2048", "engine.limits.max_running=4", "engine.limits.max_waiting=4",
    "engine.limits.max_batch_tokens=64", "engine.threads=1", "max_body_bytes=100000", "drain_s=20",
)  # fmt: skip


class Running:
    """A server process."""

    def __init__(self, folder, *settings, **variables):
        command = [sys.executable, str(ROOT / "experiments/serve.py"), f"--model={folder / 'model'}"]
        command += [f"--set={each}" for each in (*SETTINGS, *settings)]
        self.log = folder / f"log-{time.monotonic_ns()}"
        self._file, self.client = open(self.log, "w"), None
        environment = os.environ | variables
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._file, text=True, env=environment, cwd=ROOT
        )
        line = self.process.stdout.readline()
        if not line.startswith("http://"):
            self.end()
            raise AssertionError((line, self.log.read_text()))
        self.url = line.split()[0]
        self.port = int(self.url.rpartition(":")[2])
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self.wait()

    def wait(self):
        """Wait until it takes requests."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(urllib.error.URLError):
                if self.get("/ready")[0] == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def get(self, path, **headers):
        """Status and text of a path."""
        return self.send(urllib.request.Request(self.url + path, headers=headers))

    def post(self, path, body, **headers):
        """Status and text of a posted body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send(urllib.request.Request(self.url + path, data=data, headers=headers))

    def delete(self, path):
        """Status and text of what is deleted."""
        return self.send(urllib.request.Request(self.url + path, method="DELETE"))

    def send(self, request):
        """Status and text of a request."""
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, name):
        """A number of /metrics."""
        return float(re.search(rf"^jaxbench_serve_{re.escape(name)} (\S+)", self.get("/metrics")[1], re.M)[1])

    def cancelled(self):
        """Answers that were given up."""
        found = re.search(r'answers_total{ended="cancelled"} (\S+)', self.get("/metrics")[1])
        return float(found[1]) if found else 0.0

    def idle(self):
        """True where nothing runs or waits and no block is read."""
        return self.metric("running") == self.metric("waiting") == 0 and self.metric("blocks_available") == 32

    def worker(self):
        """Process number of the engine's worker."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = [int(each) for path in tasks for each in path.read_text().split()]
        (worker,) = (each for each in children if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes())
        return worker

    def end(self):
        """End it as an operating system does; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        if self.client is not None:
            self.client.close()
        self._file.close()
        self.process.stdout.close()
        return code


# tells the model of tools, and shows it calls between tags
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ tools if tools and loop.first }}{{ m.content }}"
TEMPLATE += "{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>{% endfor %}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a small model and two keys."""
    folder = tmp_path_factory.mktemp("server")
    path = tiny.make(folder / "model", max_seq_len=2048) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    for number, name in enumerate(("one", "two")):
        keys.write_key_file(folder / f"{name}.key", keys.Key(17 + number))
    return folder


def eventually(condition, seconds=20.0):
    """Wait until something is so."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not become so"
        time.sleep(0.05)


def exchange(port, data, seconds=10.0):
    """What the server says to bytes on a socket."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as line:
        with contextlib.suppress(OSError):
            line.sendall(data)
        found = b""
        with contextlib.suppress(OSError):
            while chunk := line.recv(65536):
                found += chunk
        return found


def opened(port, body):
    """A connection that has asked, and reads nothing."""
    line = socket.create_connection(("127.0.0.1", port), timeout=30)
    data = json.dumps(body).encode()
    line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    return line
