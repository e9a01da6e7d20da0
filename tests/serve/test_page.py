"""The page, in a headless browser: a conversation, its numbers, a stop, an error, markup that stays text."""

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

from jaxbench.native import library
from tests.generation import tiny
from tests.serve.test_server import Running

client = pytest.importorskip("websockets.sync.client", reason="websockets is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(not library.is_available(), reason="native kernels cannot be had here"),
    pytest.mark.skipif(CHROMIUM is None, reason="no browser is here; Debian's package is chromium"),
]

# Pressed by the page itself: this model writes over a thousand tokens per second, a click from outside comes too late.
STOP_AT_FIRST_TEXT = """
at('temperature').value = 0;
new MutationObserver((_, observer) => {
  if (document.querySelector('.assistant')?.textContent) { observer.disconnect(); at('ask').requestSubmit(); }
}).observe(at('talk'), {childList: true, subtree: true, characterData: true});
"""


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


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return a browser that shows the page of a server with a small model."""
    folder = tmp_path_factory.mktemp("page")
    tiny.make(folder / "model", max_seq_len=2048)
    server = Running(folder)
    try:
        browser = Browser()
    except BaseException:
        server.end()
        raise
    browser.call("Page.navigate", url=f"{server.url}/")
    browser.wait("document.readyState === 'complete' && document.getElementById('model').textContent === 'tiny'")
    yield browser
    browser.end()
    assert server.end() == 0


def ask(page, text, tokens):
    page.run(f"at('max_tokens').value = {tokens}; at('seed').value = 3; at('text').value = {json.dumps(text)}")
    page.run("at('text').dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true, cancelable: true}))")


def shown(page, role):
    return page.run(f"[...document.querySelectorAll('.{role}')].map(each => each.textContent)")


def test_a_conversation_is_held_and_its_numbers_are_shown(page):
    ask(page, "<b>hello</b> & good day", 20)
    page.wait("document.querySelectorAll('.message.note').length === 1")
    assert shown(page, "user") == ["<b>hello</b> & good day"] and page.run("document.querySelector('#talk b')") is None
    (answer,) = shown(page, "assistant")
    assert answer and "first token after" in shown(page, "message.note")[0]
    ask(page, "again", 5)
    page.wait("document.querySelectorAll('.message.note').length === 2 && at('send').textContent === 'Send'")
    assert page.run("talk.length") == 4
    page.wait("at('numbers').innerText.includes('prompt tokens from cache')")
    page.wait("[...at('numbers').children].every(each => !/undefined|NaN/.test(each.textContent))")


def test_an_answer_is_stopped_and_an_error_is_said(page):
    page.run("at('clear').click()")
    page.run(STOP_AT_FIRST_TEXT)
    ask(page, "count", 1500)
    page.wait("document.querySelector('.message.note')?.textContent === 'stopped'")
    ask(page, "too much", 10**6)
    page.wait("document.querySelector('.error') !== null")
    assert "max_tokens" in shown(page, "error")[0]
    page.run("at('clear').click()")
    assert page.run("at('talk').children.length") == 0 and page.problems == []
