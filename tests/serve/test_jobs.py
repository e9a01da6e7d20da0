"""Files of texts that a server looks for watermarks in: by HTTP, over its own end, and rules that it is held to."""

import contextlib
import json
import sys
import time
from pathlib import Path

import pytest

from jaxbench.jobs.queue import Queue
from jaxbench.native import library
from tests.serve.running import Running, folder  # noqa: F401

pytestmark = pytest.mark.skipif(not library.is_available(), reason="native kernels cannot be had here")
PATH = "/v1/watermark/jobs"
TEXTS = [{"text": f"the {'cat ' * (i % 30)}number {i}", "id": f"t{i}"} for i in range(200)]


@pytest.fixture(scope="module")
def settings(folder):  # noqa: F811
    marks = [
        f"engine.watermarks.{name}={{scheme: {{scheme: {scheme}}}, key_file: {folder / key}}}"
        for name, scheme, key in (("team", "gumbel", "one.key"), ("readers", "kgw", "two.key"))
    ]
    rules = "alerts.rules=[{name: never, figure: detect_s, most: 1e-9, least_count: 1}]"
    (folder / "channels.yaml").write_text(f"channels: [{{name: log, kind: file, path: {folder / 'said.jsonl'}}}]\n")
    return (*marks, f"jobs.folder={folder / 'queue'}", "jobs.max_bytes=200000", "jobs.max_waiting=2", rules,
            f"alerts.send={folder / 'channels.yaml'}", "alerts.every_s=0.05")  # fmt: skip


def lines(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def ended(server, id: str) -> dict:
    until = time.monotonic() + 120
    while (found := json.loads(server.get(f"{PATH}/{id}")[1]))["status"] in ("waiting", "running"):
        assert time.monotonic() < until, found
        time.sleep(0.1)
    return found


def submitted(server, body: bytes, query: str = "") -> str:
    status, text = server.post(PATH + query, body)
    assert status == 202, text
    return json.loads(text)["id"]


@pytest.fixture(scope="module")
def server(folder, settings):  # noqa: F811
    running = Running(folder, *settings)
    yield running
    assert running.end() == 0, running.log.read_text()


def test_a_file_of_texts_is_scored_as_each_text_is_alone(server):
    job = ended(server, submitted(server, lines(TEXTS) + b"no JSON\n"))
    assert (job["status"], job["texts"], job["bad_lines"]) == ("done", 200, 1)
    assert job["first_bad"][0]["line"] == 201
    status, text = server.get(job["scores"])
    rows = [json.loads(line) for line in text.splitlines()]
    assert status == 200 and [row["id"] for row in rows] == [row["id"] for row in TEXTS]
    assert {row["file"] for row in rows} == {"texts.jsonl"}, "nothing of where it lies"
    for i in (7, 29, 133):
        alone = json.loads(server.post("/v1/watermark/detect", {"text": TEXTS[i]["text"]})[1])
        assert rows[i]["best"] == alone["best"] and rows[i]["p_value"] == pytest.approx(alone["p_value"], rel=1e-12)
        by_name = {each["watermark"]: each["p_value"] for each in alone["watermarks"]}
        assert {name: rows[i][f"p_{name}"] for name in by_name} == pytest.approx(by_name, rel=1e-12)


def test_one_watermark_may_be_looked_for_and_token_ids_given(server):
    ids = [{"text": [5, 6, 7, 8, 9, 10] * 5, "prompt_tokens": 4}] * 2
    job = ended(server, submitted(server, lines(ids), "?watermarks=team"))
    rows = [json.loads(line) for line in server.get(job["scores"])[1].splitlines()]
    alone = {"tokens": ids[0]["text"], "prompt_tokens": 4, "watermarks": ["team"]}
    found = json.loads(server.post("/v1/watermark/detect", alone)[1])
    assert [row["p_value"] for row in rows] == [found["p_value"]] * 2 and rows[0]["num_scored"] > 0


def test_a_text_that_was_scored_is_not_scored_again(server):
    found = [json.loads(server.post("/v1/watermark/detect", {"text": "once and again"})[1]) for _ in range(2)]
    assert [each.pop("is_cached") for each in found] == [False, True] and found[0] == found[1]
    assert server.metric('detected_texts_total{cached="true"}') >= 1


def test_bad_files_and_names_are_refused_and_leave_nothing(server, folder):  # noqa: F811
    for body, query, status, said in (
        (b"", "", 400, "0 bytes"),
        (b"x" * 200_001, "", 413, "larger than 200000 bytes"),
        (lines(TEXTS), "?watermarks=none", 400, "'none' is unknown here; wanted some of team, readers"),
        (lines(TEXTS), "?watermarks=", 400, "unknown here"),
        (lines(TEXTS), "?watermark=team", 400, "?'watermark' is not served here; wanted ?watermarks=NAME,NAME"),
        (lines(TEXTS), "?watermarks=none&watermarks=team", 400, "'none' is unknown here"),
    ):
        found = server.post(PATH + query, body)
        assert found[0] == status and said in found[1], found
    assert not list((folder / "queue").glob(".received-*"))
    for path in (f"{PATH}/none", f"{PATH}/..%2f..", f"{PATH}/20260101T000000-000000000000/scores"):
        assert server.get(path)[0] == 404
    failed = ended(server, submitted(server, b"no JSON at all\n"))
    assert failed["status"] == "failed" and "holds no usable text" in failed["error"]
    assert str(folder) not in json.dumps(failed)


def test_jobs_are_listed_and_removed(server):
    id = submitted(server, lines(TEXTS[:3]))
    assert id in [job["id"] for job in json.loads(server.get(PATH)[1])["data"]]
    ended(server, id)
    request = server.delete(f"{PATH}/{id}")
    assert request[0] == 204 and server.get(f"{PATH}/{id}")[0] == 404


def test_jobs_of_others_in_the_same_folder_are_not_a_clients(server, folder):  # noqa: F811
    own = submitted(server, lines(TEXTS[:2]))
    foreign = Queue(folder / "queue").submit(("experiments/parity.py", "--help")).job.id
    until = time.monotonic() + 120
    while Queue(folder / "queue").find(foreign).progress.state != "done":
        assert time.monotonic() < until
        time.sleep(0.1)
    ended(server, own)
    listed = [job["id"] for job in json.loads(server.get(PATH)[1])["data"]]
    assert own in listed and foreign not in listed
    assert server.get(f"{PATH}/{foreign}")[0] == 404 == server.delete(f"{PATH}/{foreign}")[0]
    assert server.metric('jobs{state="done"}') >= 1


def test_a_rule_that_breaks_is_told_and_shown(server, folder):  # noqa: F811
    server.post("/v1/watermark/detect", {"text": "slow, by this rule"})
    until = time.monotonic() + 30
    while not (folder / "said.jsonl").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    said = json.loads((folder / "said.jsonl").read_text().splitlines()[0])
    assert said["state"] == "open" and "server rule never is broken" in said["subject"]
    assert server.metric('rule_broken{rule="never"}') == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="a process ends with its parent on Linux alone")
def test_the_workers_of_a_server_that_is_killed_are_gone_with_it(folder, settings):  # noqa: F811
    own = (*(each for each in settings if not each.startswith("jobs.")), f"jobs.folder={folder / 'killed'}")
    running = Running(folder, *own)
    ours = f"--queue={folder / 'killed'}".encode()

    def workers() -> list[Path]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found += [path] if ours in path.read_bytes().split(b"\0") else []
        return found

    until = time.monotonic() + 60
    while not workers():
        assert time.monotonic() < until
        time.sleep(0.05)
    running.process.kill()
    while workers():
        assert time.monotonic() < until
        time.sleep(0.05)
    running.end()


def test_what_a_server_could_not_finish_its_successor_does(folder, settings):  # noqa: F811
    own = (*(each for each in settings if not each.startswith("jobs.")), f"jobs.folder={folder / 'second'}")
    first = Running(folder, *own, "jobs.workers=0")
    ids = [submitted(first, lines(TEXTS)) for _ in range(2)]
    assert first.end() == 0
    second = Running(folder, *own)
    assert [ended(second, id)["status"] for id in ids] == ["done", "done"]
    assert second.end() == 0
