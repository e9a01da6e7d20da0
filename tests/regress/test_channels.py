"""Channels against real servers on this machine: they take messages, refuse, hang, drip and answer nonsense."""

import contextlib
import http.server
import json
import socket
import sys
import threading
import time

import pytest

from jaxbench.regress import channels, trees
from jaxbench.regress.alert_config import Alerts
from jaxbench.regress.alerts import Alert

SECRET = "s3cret-token-of-the-test"


def alert(**changes):
    fields = {
        "id": "abcd1234", "state": "open", "level": "critical", "confirmed": True,
        "opened_utc": "2026-11-26T12:00:00+00:00", "host": "h", "device": "cpu", "suite_id": "s", "base": "aaaa",
        "head": "bbbb", "subject": "Größer <b>&", "run": "r1",
        "runs": 2, "cases": ("decode",), "lines": ("decode.tokens_per_s: regression, critical, +30.0 %",), "sent": {},
        "note": "",
    }  # fmt: skip
    return Alert(**fields | changes)


class Server:
    """Answers every request with the same state and text, and keeps what it was sent."""

    def __init__(self, state=200, text="{}", location=None):
        self.requests, outer = [], self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests.append((self.command, self.path, dict(self.headers), json.loads(body)))
                answer = outer.states.pop(0) if outer.states else outer.state
                self.send_response(answer)
                if location:
                    self.send_header("Location", location)
                self.end_headers()
                self.wfile.write(outer.text if isinstance(outer.text, bytes) else outer.text.encode())

            do_POST = do_PATCH = answer

            def log_message(self, *_):
                pass

        self.state, self.text, self.states = state, text, []
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def start(*args, **more):
            server = Server(*args, **more)
            stack.callback(server.close)
            return server

        yield start


def sent(channel, what=None, reference="", **settings):
    config = Alerts(channels=[channel], **{"tries": 3, "pause_s": 0.0, "timeout_s": 5.0} | settings)
    paused = []
    found = channels.deliver(config.channels[0], what or alert(), reference, config, sleep=paused.append)
    return *found, paused


@pytest.fixture
def hook(monkeypatch):
    def at(url):
        monkeypatch.setenv("JAXBENCH_TEST_HOOK", url)
        return {"name": "chat", "kind": "webhook", "url_variable": "JAXBENCH_TEST_HOOK"}

    return at


def test_a_webhook_gets_words_and_everything_about_the_alert(serve, hook):
    server = serve()
    assert sent(hook(f"{server.url}/services/{SECRET}")) == (True, "", [])
    [(_, path, _, body)] = server.requests
    assert path == f"/services/{SECRET}" and body["alert"]["cases"] == ["decode"] and "sent" not in body["alert"]
    assert "Größer <b>&" in body["text"] and "alerts acknowledge --alert=abcd1234" in body["text"]


def test_a_state_that_may_pass_is_tried_again_with_longer_pauses_and_another_is_not(serve, hook):
    server = serve()
    server.states = [503, 429]
    assert sent(hook(server.url), pause_s=2.0) == (True, "", [2.0, 4.0]) and len(server.requests) == 3
    server.state, server.text = 500, "broken"
    went, reason, _ = sent(hook(server.url))
    assert not went and reason == "3 tries; OSError: HTTP 500 broken"
    for state in (400, 403, 404):
        server.state, count = state, len(server.requests)
        went, reason, paused = sent(hook(server.url))
        assert not went and f"HTTP {state}" in reason and paused == [] and len(server.requests) == count + 1


def test_a_service_that_is_not_there_hangs_or_drips_costs_its_limit_and_no_more(hook):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert "Connection refused" in sent(hook(address), tries=1)[1]
        listening.listen()
        started = time.monotonic()
        went, reason, _ = sent(hook(address), tries=2, timeout_s=0.2)
        assert not went and "2 tries" in reason and time.monotonic() - started < 4

    def drip():
        connection, _ = dripping.accept()
        with contextlib.suppress(OSError), connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            for index in range(200):
                connection.sendall(f"X-{index}: 1\r\n".encode())
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as dripping:
        threading.Thread(target=drip, daemon=True).start()
        started = time.monotonic()
        went, reason, _ = sent(hook(f"http://127.0.0.1:{dripping.getsockname()[1]}"), tries=1, timeout_s=0.5)
        assert (went, reason) == (False, "1 tries; OSError: no answer within 0.5 s") and time.monotonic() - started < 4


def test_nonsense_a_redirect_and_another_scheme_are_no_harm(serve, hook):
    other = serve()
    for text in ("<html>" * 30_000, "[" * 70_000, b"\xff\xfe", "7"):
        server = serve(text=text)
        assert sent(hook(server.url))[0] and len(server.requests) == 1, text[:10]
    went, reason, _ = sent(hook(serve(302, location=other.url).url))
    assert not went and "HTTP 302" in reason and other.requests == []
    for address in ("file:///etc/passwd", "ftp://127.0.0.1/x", "no address"):
        went, reason, _ = sent(hook(address))
        assert not went and "wanted http or https" in reason


def test_no_reason_holds_a_secret(serve, hook):
    server = serve(400)
    server.text = f"bad token {SECRET} at {server.url}/{SECRET}"
    went, reason, _ = sent(hook(f"{server.url}/{SECRET}"))
    assert not went and SECRET not in reason and "$JAXBENCH_TEST_HOOK" in reason


def test_an_issue_is_opened_once_commented_and_closed_when_it_is_over(serve, monkeypatch):
    monkeypatch.setenv("GITHUB_TOKEN", SECRET)
    server = serve(text='{"number": 7}')
    github = {
        "name": "issue",
        "kind": "github",
        "repository": "me/it",
        "api_url": server.url,
        "labels": ["performance"],
    }
    assert sent(github)[:2] == (True, "7")
    assert sent(github, reference="7")[:2] == (True, "7")
    assert sent(github, alert(state="over", note="mended"), "7")[:2] == (True, "7")
    calls = [(method, path) for method, path, _, _ in server.requests]
    comments = ("POST", "/repos/me/it/issues/7/comments")
    assert calls == [("POST", "/repos/me/it/issues"), comments, ("PATCH", "/repos/me/it/issues/7"), comments]
    assert server.requests[0][2]["Authorization"] == f"Bearer {SECRET}" and server.requests[0][3]["labels"] == [
        "performance"
    ]
    assert server.requests[2][3] == {"state": "closed"} and "mended" in server.requests[3][3]["body"]
    server.text = "[]"
    went, reason, _ = sent(github)
    assert not went and "answer without an issue's number, got None" in reason


def test_a_check_fails_a_commit_by_a_critical_alert_alone(serve, monkeypatch):
    monkeypatch.setenv("GITHUB_TOKEN", SECRET)
    server = serve(text='{"id": 11}')
    check = {"name": "check", "kind": "github", "repository": "me/it", "api_url": server.url, "mode": "check"}
    for level, conclusion in (("critical", "failure"), ("warning", "neutral")):
        assert sent(check, alert(level=level, head="none+1f"))[:2] == (True, "11")
        body = server.requests[-1][3]
        assert body["conclusion"] == conclusion and body["head_sha"] == "none"
    head = trees.resolved("HEAD")
    assert sent(check, alert(head=head[:12]))[0] and server.requests[-1][3]["head_sha"] == head


def test_a_file_gets_a_line_each(tmp_path):
    log = {"name": "log", "kind": "file", "path": str(tmp_path / "deep" / "alerts.jsonl")}
    assert sent(log)[0] and sent(log, alert(state="over"))[0]
    rows = [json.loads(line) for line in (tmp_path / "deep" / "alerts.jsonl").read_text().splitlines()]
    assert [row["state"] for row in rows] == ["open", "over"] and rows[1]["subject"].startswith("over: critical")
    (tmp_path / "folder").mkdir()
    went, reason, _ = sent(log | {"path": str(tmp_path / "folder")})
    assert not went and "IsADirectoryError" in reason


def test_an_address_that_is_no_url_is_refused_and_its_secret_not_said(monkeypatch):
    monkeypatch.setenv("JAXBENCH_TEST_HOOK", "https://[hooks.example/s3cret")
    went, reason, paused = sent({"name": "chat", "kind": "webhook", "url_variable": "JAXBENCH_TEST_HOOK"})
    assert not went and reason.startswith("the address is no URL") and "s3cret" not in reason and paused == []


@pytest.mark.parametrize("before", [" " * 190, "x" * 190, "x" * 290, " " * (2**16 - 20)])
def test_a_secret_at_the_end_of_what_is_kept_of_an_answer_is_removed_whole(monkeypatch, serve, before):
    server = serve(403, before + " /s3cretT0ken0123456789")
    monkeypatch.setenv("JAXBENCH_TEST_HOOK", f"{server.url}/s3cretT0ken0123456789")
    went, reason, _ = sent({"name": "chat", "kind": "webhook", "url_variable": "JAXBENCH_TEST_HOOK"})
    assert not went and "HTTP 403" in reason and "s3cret" not in reason and len(reason) <= 300


@pytest.fixture
def mail():
    controller = pytest.importorskip("aiosmtpd.controller", reason="aiosmtpd is not installed")

    class Box:
        def __init__(self):
            self.mails, self.state = [], "250 OK"

        async def handle_RCPT(self, server, session, envelope, address, options):
            if address.startswith("nobody"):
                return "550 no such user"
            envelope.rcpt_tos.append(address)
            return "250 OK"

        async def handle_DATA(self, server, session, envelope):
            if self.state.startswith("250"):
                self.mails.append(envelope)
            return self.state

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    box = Box()
    running = controller.Controller(box, hostname="127.0.0.1", port=port)
    running.start()
    settings = {
        "name": "mail", "kind": "smtp", "host": "127.0.0.1", "port": port, "security": "none",
        "sender": "a@example.org",
        "recipients": ["team@example.org"],
    }  # fmt: skip
    yield box, settings
    running.stop()


def test_mail_goes_out_and_what_is_refused_for_good_is_not_tried_again(mail):
    box, settings = mail
    assert sent(settings)[0]
    [got] = box.mails
    text = got.content.decode()
    assert got.rcpt_tos == ["team@example.org"] and "Subject: critical performance regression" in text
    went, reason, paused = sent(settings | {"recipients": ["nobody@example.org"]})
    assert not went and "SMTPRecipientsRefused" in reason and paused == []
    went, reason, paused = sent(settings | {"recipients": ["team@example.org", "nobody@example.org"]})
    assert not went and reason.startswith("refused for nobody@example.org, the others were sent it") and paused == []
    assert len(box.mails) == 2
    box.state = "451 come back later"
    went, reason, paused = sent(settings)
    assert not went and "451" in reason and len(paused) == 2
    went, reason, _ = sent(settings | {"security": "starttls"}, tries=1)
    assert not went and "STARTTLS" in reason.upper()


def mail_by(port, **changes):
    return {
        "name": "mail", "kind": "smtp", "host": "127.0.0.1", "port": port, "security": "none",
        "sender": "a@example.org", "recipients": ["team@example.org"],
    } | changes  # fmt: skip


def test_a_mail_server_that_hangs_or_answers_nonsense_costs_its_limit_and_no_more():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        went, reason, _ = sent(mail_by(silent.getsockname()[1]), tries=1, timeout_s=0.3)
        assert not went and "1 tries" in reason and time.monotonic() - started < 4

    def babble():
        with contextlib.suppress(OSError):  # of the end below
            for _ in range(2):
                connection, _ = babbling.accept()
                with contextlib.suppress(OSError), connection:
                    connection.sendall(b"hello\r\n\xff\xff\r\n" * 100)
                    connection.recv(100)

    with socket.create_server(("127.0.0.1", 0)) as babbling:
        thread = threading.Thread(target=babble, daemon=True)
        thread.start()
        went, reason, _ = sent(mail_by(babbling.getsockname()[1]), tries=1)
        babbling.shutdown(socket.SHUT_RDWR)  # or the thread would accept from whatever has this descriptor next
        thread.join(20)
        assert not thread.is_alive() and not went and reason.startswith("1 tries; SMTP")


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # apprise's own import
def test_apprise_is_an_extra_that_says_what_it_did(monkeypatch, serve):
    pytest.importorskip("apprise", reason="apprise is not installed")
    server = serve()
    monkeypatch.setenv("JAXBENCH_TEST_HOOK", server.url.replace("http://", "json://"))
    channel = {"name": "any", "kind": "apprise", "url_variable": "JAXBENCH_TEST_HOOK"}
    assert sent(channel)[0] and len(server.requests) == 1
    monkeypatch.setenv("JAXBENCH_TEST_HOOK", "nothing://")
    assert "no address that apprise knows" in sent(channel)[1]


def test_a_slow_import_of_apprise_is_no_slow_service_and_sends_once(monkeypatch, tmp_path):
    (tmp_path / "apprise.py").write_text(
        "import time\ntime.sleep(0.6)\nnotified = []\n"
        "class Apprise:\n"
        "    def add(self, url): return True\n"
        "    def notify(self, **said): return notified.append(said) is None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "apprise", raising=False)
    monkeypatch.setenv("JAXBENCH_TEST_HOOK", "json://127.0.0.1")
    channel = {"name": "any", "kind": "apprise", "url_variable": "JAXBENCH_TEST_HOOK"}
    assert sent(channel, timeout_s=0.3) == (True, "", [])
    assert len(sys.modules["apprise"].notified) == 1
