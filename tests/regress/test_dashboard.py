"""The dashboard: the pages and live samples, read-only, behind a token where others can reach it."""

import collections
import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxbench.measure.environment import ROOT
from jaxbench.regress.history import History
from jaxbench.regress.pairs import SAMPLES
from jaxbench.regress.site import samples
from tests.browser import Browser, needs_browser
from tests.regress.test_site import run

TOKEN = "a-token-of-sixteen-or-more"


class Dashboard:
    """The command, as its own process."""

    def __init__(self, folder, *words, **variables):
        command = [sys.executable, "experiments/benchmarks.py", "dashboard", f"--history={folder}", "--port=0", *words]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        line = self.process.stdout.readline().strip()
        assert line.startswith("http://"), self.process.communicate()
        self.url, self.port = line, int(line.rpartition(":")[2])

    def ask(self, path, method="GET", **headers):
        """State, headers and body of a request; the path goes out as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def end(self):
        self.process.terminate()
        self.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("dashboard")
    History(found / "history").add(run(0))
    (found / "runs" / "quick-1").mkdir(parents=True)
    row = {"launch": 2, "side": "head", "series": "decode.tokens_per_s", "samples": [1.0]}
    (found / "runs" / "quick-1" / SAMPLES).write_text(json.dumps(row) + "\n" + '{"lau')
    return found


@pytest.fixture(scope="module")
def dashboard(folder):
    running = Dashboard(folder / "history", f"--runs={folder / 'runs'}", "--interval_s=0.1")
    yield running
    running.end()


def test_the_pages_are_those_of_the_site_and_a_new_run_appears(dashboard, folder):
    state, headers, body = dashboard.ask("/")
    assert state == 200 and headers["content-type"].startswith("text/html") and b"1 runs" in body
    assert "default-src 'self'" in headers["Content-Security-Policy".lower()]
    assert dashboard.ask("/data/index.js")[1]["content-type"].startswith(("text/javascript", "application/javascript"))
    History(folder / "history").add(run(1))
    assert b"2 runs" in dashboard.ask("/index.html")[2]
    assert dashboard.ask("/", "HEAD")[2] == b""


def test_samples_come_as_events(dashboard):
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/events")
        answer = connection.getresponse()
        assert answer.getheader("content-type").startswith("text/event-stream")
        found = []
        while len(found) < 3:
            line = answer.readline().decode()
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
    last = found[-1]
    assert 0 <= last["cpu_percent"] <= 100 and 0 < last["memory_bytes"] < last["memory_total_bytes"]
    assert last["own_bytes"] > 1e7 and last["work"] == ["quick-1: launch 2, decode.tokens_per_s of head"]


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ((10.0, 5.0, 80.0, 5.0), (12.0, 6.0, 86.0, 6.0), 30.0),  # 3 of 10 seconds were spent
        ((1e9, 0.1, 0.2, 0.3), (1e9, 0.1, 0.9, 0.4), 0.0),  # all were idle; the sums round to -6e-6 %
        ((10.0, 5.0, 80.0, 5.0), (12.0, 5.0, 80.0, 4.0), 100.0),  # iowait fell
        ((10.0, 5.0, 80.0, 5.0), (10.0, 5.0, 80.0, 5.0), 0.0),
    ],
)
def test_the_processors_share_stays_between_none_and_all_where_its_counters_round(before, after, wanted):
    counts = collections.namedtuple("counts", "user system idle iowait")
    assert samples.busy_percent(counts(*before), counts(*after)) == pytest.approx(wanted)


def test_no_other_method_and_no_other_path_is_served(dashboard):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        state, headers, body = dashboard.ask("/", method)
        assert state == 405 and headers["allow"] == "GET, HEAD" and b"read-only" in body
    for path in ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/data/../../index.sqlite", "//etc/passwd",
                 "/data/", "/\x00", "/" + "a" * 5000, "/base.html", "/..%5c..%5cx"):  # fmt: skip
        with contextlib.suppress(http.client.HTTPException, ValueError):
            assert dashboard.ask(path)[0] in (400, 404)
    assert dashboard.ask("/")[0] == 200


def test_ten_thousand_requests_at_once_are_answered_or_refused_and_it_goes_on(dashboard):
    with ThreadPoolExecutor(600) as pool:
        states = list(pool.map(lambda _: dashboard.ask("/site.js")[0], range(10_000)))
    assert set(states) <= {200, 503} and states.count(200) > 5000
    assert dashboard.ask("/")[0] == 200


def test_a_token_is_wanted_where_others_can_reach_it(folder):
    running = Dashboard(folder / "history", "--host=0.0.0.0", "--token_variable=A_TOKEN", A_TOKEN=TOKEN)
    try:
        for path in ("/", "/events", "/data/index.js", "/?token=wrong", "/?token="):
            state, _, body = running.ask(path)
            assert state == 401 and TOKEN.encode() not in body
        assert running.ask("/", Authorization=f"Bearer {TOKEN}")[0] == 200
        state, headers, _ = running.ask(f"/trends.html?token={TOKEN}")
        assert state == 303 and headers["location"] == "/trends.html"
        cookie = headers["set-cookie"].partition(";")[0]
        assert "HttpOnly" in headers["set-cookie"] and running.ask("/trends.html", Cookie=cookie)[0] == 200
        assert running.ask("/", Cookie="jaxbench_token=\xff")[0] in (400, 401)
    finally:
        running.end()


def test_a_history_without_runs_says_so(tmp_path):
    running = Dashboard(tmp_path / "history")
    try:
        state, _, body = running.ask("/")
        assert state == 200 and b"holds no run that can be read" in body
        History(tmp_path / "history").add(run(0))
        assert b"1 runs" in running.ask("/")[2]
    finally:
        running.end()


def test_a_run_that_ended_long_ago_is_not_at_work(folder):
    assert len(samples.at_work(folder / "runs")) == 1
    path = folder / "runs" / "old" / SAMPLES
    path.parent.mkdir()
    path.write_text('{"launch": 1, "side": "head", "series": "a.b", "samples": []}\n')
    os.utime(path, (time.time() - 1000, time.time() - 1000))
    (folder / "runs" / "broken").mkdir()
    (folder / "runs" / "broken" / SAMPLES).write_text("[]\n")
    assert len(samples.at_work(folder / "runs")) == 1 and samples.at_work(folder / "none") == []


@needs_browser
def test_samples_are_drawn_as_they_come(dashboard):
    browser = Browser()
    try:
        browser.call("Page.navigate", url=f"{dashboard.url}/live.html")
        browser.wait("document.querySelectorAll('#tiles .card').length >= 3")
        browser.wait("document.querySelectorAll('#cpu .scatterlayer .trace').length === 1")
        assert "quick-1: launch 2" in browser.run("document.getElementById('work').textContent")
        assert not browser.problems
    finally:
        browser.end()
