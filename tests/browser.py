"""A headless browser that tests drive."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

client = pytest.importorskip("websockets.sync.client", reason="websockets is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no browser is here; Debian's package is chromium")


class Browser:
    """One tab of a headless browser, by Chrome's DevTools protocol."""

    def __init__(self):
        self._stack = contextlib.ExitStack()
        # the browser's socket lies in TMPDIR, whose path may be too long for one
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True)))
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        command += [f"--user-data-dir={folder}", "--no-first-run", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        variables = os.environ | {"TMPDIR": str(folder)}
        self._process = self._stack.enter_context(subprocess.Popen(command, env=variables, **quiet))
        self._stack.callback(self._process.terminate)
        port, until = folder / "DevToolsActivePort", time.monotonic() + 60
        while not (port.exists() and port.read_text().count("\n")):
            assert time.monotonic() < until and self._process.poll() is None, "the browser did not start"
            time.sleep(0.05)
        address = f"http://127.0.0.1:{port.read_text().split()[0]}"
        with urllib.request.urlopen(f"{address}/json/list", timeout=30) as response:
            (tab, *_) = [each for each in json.load(response) if each["type"] == "page"]
        self._socket = self._stack.enter_context(client.connect(tab["webSocketDebuggerUrl"], max_size=None))
        self._numbers, self.problems = itertools.count(1), []
        self.call("Runtime.enable")
        self.call("Page.enable")

    def call(self, method, **params):
        """Call a method, and take note of exceptions of the page on the way."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("method") == "Runtime.exceptionThrown":
                self.problems.append(message["params"]["exceptionDetails"])
            if message.get("id") == number:
                return message["result"]

    def run(self, script):
        """Return the value of an expression of the page."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script):
        """Wait until an expression is true."""
        until = time.monotonic() + 60
        while not self.run(script):
            assert time.monotonic() < until, (script, self.run("document.body.innerText"))
            time.sleep(0.05)

    def end(self):
        """End the browser, and its own processes with it."""
        self.call("Browser.close")
        self._stack.close()
