"""A file of requests, answered through the engine's process: every line in order, interrupted work goes on."""

import asyncio
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxbench import store
from jaxbench.native import library
from jaxbench.pretrained.tokenizer import load_tokenizer
from jaxbench.serve import batch
from jaxbench.serve.engine import Event
from jaxbench.serve.request import Request
from jaxbench.serve.scheduler import Limits
from jaxbench.serve.service import Answer, Refused, Service
from jaxbench.serve.settings import EngineConfig, ServerConfig
from tests.generation import tiny
from tests.test_cli import command, refused

pytestmark = pytest.mark.skipif(not library.is_available(), reason="native kernels cannot be had here")
ROOT = Path(__file__).resolve().parents[2]
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


class Silent:
    """A tokenizer whose tokens have no text."""

    core, end_ids = None, ()

    def decode(self, ids, *, skip_special=False):
        return ""


def request(number, url=COMPLETION, **body):
    given = {"prompt": "abcd"} if url == COMPLETION else {"messages": [{"role": "user", "content": "hello"}]}
    body = given | {"max_tokens": 9, "temperature": 0} | body
    return {"custom_id": f"line {number}", "method": "POST", "url": url, "body": body}


def requests():
    return [
        *(request(i, prompt="xyz" * (i + 1), max_tokens=5 + 3 * (i % 4), ignore_eos=True) for i in range(8)),
        request(8, CHAT), request(9, CHAT, n=2, temperature=1, seed=4), request(10, max_tokens=10**6),
        request(11, temperature=-1), request(12, stream=True), request(13, watermark="nobody"),
        request(14, model="other"), request(15, prompt="xyz", max_tokens=5, ignore_eos=True),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a small model and a file of requests."""
    folder = tmp_path_factory.mktemp("batch")
    tiny.make(folder / "model", max_seq_len=512)
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, requests())) + "\n\n")
    return folder


def config(folder):
    limits = Limits(max_running=3, max_batch_tokens=32, max_waiting=2)
    return ServerConfig(engine=EngineConfig(model=str(folder / "model"), cache_tokens=1024, threads=1, limits=limits))


def answer(folder, output, *, until=None):
    """Answer the file; until: rows after which the run is given up."""
    count = 0

    def advance(rows):
        nonlocal count
        count += rows
        if until is not None and count >= until:
            raise KeyboardInterrupt

    async def run():
        service = Service(config(folder).model_copy(update={"drain_s": 0}), load_tokenizer(str(folder / "model")))
        try:
            return await batch.run(service, "model", job, advance)
        finally:
            await service.end()

    job = batch.check(str(folder / "in.jsonl"), str(output), [1], overwrite=True)
    return job, asyncio.run(run())


def test_answers_come_in_the_files_order_each_with_its_status(folder):
    job, failed = answer(folder, folder / "out.jsonl")
    rows = [json.loads(row) for row in store.rows(folder / "out.jsonl")]
    assert [row["custom_id"] for row in rows] == [each["custom_id"] for each in requests()] and not job.part.exists()
    statuses = [row["response"]["status_code"] for row in rows]
    assert statuses == [200] * 10 + [400, 400, 400, 400, 404, 200] and failed == 5
    assert all(row["error"] is None for row in rows)
    for row, asked in zip(rows, requests()):
        body = row["response"]["body"]
        if row["response"]["status_code"] == 200:
            assert len(body["choices"]) == asked["body"].get("n", 1)
            if asked["body"].get("ignore_eos"):
                assert body["usage"]["completion_tokens"] == asked["body"]["max_tokens"]
        else:
            assert len(body["error"]["message"]) > 10
    text = [rows[i]["response"]["body"]["choices"][0]["text"] for i in (0, 15)]
    assert text[0] == text[1]  # the same request, in other company


@pytest.mark.parametrize(
    ("error", "status", "kind", "attempts"),
    [
        ("Unfollowed: grammar: the answer cannot go on (x)", 400, "invalid_request_error", 1),
        ("the worker ended with exit code -9", 500, "server_error", batch.ATTEMPTS),
    ],
)
def test_an_answer_that_its_own_grammar_ends_is_the_requests_error_and_not_asked_for_again(
    error, status, kind, attempts, monkeypatch
):
    tokenizer, asked = Silent(), []

    async def submitted(service, name, id, body):
        asked.append(id)
        answer = Answer(Request(id, (1,), 5), tokenizer)
        answer.take(Event(id, None, None, "error", error))
        return [answer]

    monkeypatch.setattr(batch.intake, "submitted", submitted)
    line = batch.Line.model_validate(request(0, regex="a"))
    row = asyncio.run(batch._answered(SimpleNamespace(tokenizer=tokenizer), "tiny", "batch-0", line, batch.Turns()))
    assert row["response"]["status_code"] == status and len(asked) == attempts
    said = row["response"]["body"]["error"]
    assert said["type"] == kind and said["message"] == error.removeprefix("Unfollowed: ")


@pytest.mark.parametrize("deadly", [{3}, {3, 9}, {0, 4, 5}], ids=str)
def test_requests_that_the_engine_dies_of_cost_no_other(deadly, folder, monkeypatch):
    tokenizer, here = Silent(), {}

    def end(answer, ended, error=None):
        if here.pop(answer.request.id, None):
            answer.take(Event(answer.request.id, None, None, ended, error))

    async def submitted(service, name, id, body):
        here[id] = answer = Answer(Request(id, (1,), 5), tokenizer)
        loop = asyncio.get_running_loop()
        if int(id.split("-")[1]) in deadly:  # and all that are computed beside it
            loop.call_later(0.01, lambda: [end(each, "error", "the worker ended") for each in list(here.values())])
        loop.call_later(0.02, end, answer, "length")
        return [answer]

    monkeypatch.setattr(batch.intake, "submitted", submitted)
    answers = folder / f"dies-{len(deadly)}.jsonl"
    job = batch.check(str(folder / "in.jsonl"), str(answers), [1], overwrite=False)
    service = SimpleNamespace(tokenizer=tokenizer, config=config(folder))
    assert asyncio.run(batch.run(service, "tiny", job, lambda rows: None)) == len(deadly) + 2  # and two that are none
    rows = [json.loads(row)["response"] for row in store.rows(answers)]
    statuses = {number: row["status_code"] for number, row in enumerate(rows) if row["status_code"] != 200}
    assert statuses == dict.fromkeys(sorted(deadly), 500) | {11: 400, 12: 400}


def test_what_was_interrupted_goes_on_and_ends_the_same(folder):
    whole = (folder / "out.jsonl").read_bytes() if (folder / "out.jsonl").exists() else None
    if whole is None:
        answer(folder, folder / "out.jsonl")
        whole = (folder / "out.jsonl").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        answer(folder, folder / "again.jsonl", until=4)
    (part,) = folder.glob("again.jsonl.*.part")
    held = part.read_bytes()
    assert 0 < held.count(b"\n") < len(requests()) and not (folder / "again.jsonl").exists()
    part.write_bytes(held + b'{"id": "batch-')  # cut short by a power failure
    answer(folder, folder / "again.jsonl")

    def texts(data):
        rows = [json.loads(line) for line in data.splitlines()]
        return [(row["custom_id"], row["response"]["body"].get("choices")) for row in rows]

    assert texts((folder / "again.jsonl").read_bytes()) == texts(whole) and not part.exists()


def test_answers_that_finish_before_an_earlier_one_are_kept_and_not_asked_for_again(folder, monkeypatch):
    tokenizer, asked = Silent(), []

    async def submitted(service, name, id, body):
        asked.append(int(id.split("-")[1]))
        answer = Answer(Request(id, (1,), 5), tokenizer)
        if asked[-1] or len(asked) > len(requests()):  # the first is slow, until the command runs again
            answer.take(Event(id, None, None, "length", None))
        return [answer]

    monkeypatch.setattr(batch.intake, "submitted", submitted)
    job = batch.check(str(folder / "in.jsonl"), str(folder / "slow.jsonl"), [1], overwrite=False)
    service, count = SimpleNamespace(tokenizer=tokenizer, config=config(folder)), 0

    def advance(rows):
        nonlocal count
        count += rows
        if count == len(requests()) - 1:
            raise KeyboardInterrupt

    async def timed():  # not by wait_for, whose task would keep the interrupt and log it when it is collected
        async with asyncio.timeout(60):
            await batch.run(service, "tiny", job, advance)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(timed())
    assert len(store.rows(job.part)) == len(requests()) - 1
    asked += range(100)
    asyncio.run(batch.run(service, "tiny", job, lambda rows: None))
    assert asked[-2:] == [99, 0]
    rows = [json.loads(row)["custom_id"] for row in store.rows(folder / "slow.jsonl")]
    assert rows == [each["custom_id"] for each in requests()] and not job.part.exists()


def test_a_request_that_waits_for_room_is_not_read_again_and_again(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(request(i, n=3)) + "\n" for i in range(8)))
    job = batch.check(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), [], overwrite=False)
    service, asked = SimpleNamespace(tokenizer=Silent(), config=config(tmp_path), state="ready", room=5), []

    def end(answers):
        service.room += len(answers)
        for each in answers:
            each.take(Event(each.request.id, None, None, "length", None))

    async def submitted(service, name, id, body):
        asked.append(id)
        if body.n > service.room:
            raise Refused(429, "full")
        service.room -= body.n
        answers = [Answer(Request(f"{id}-{i}", (1,), 5), service.tokenizer) for i in range(body.n)]
        asyncio.get_running_loop().call_later(0.2, end, answers)
        return answers

    monkeypatch.setattr(batch.intake, "submitted", submitted)
    assert asyncio.run(batch.run(service, "tiny", job, lambda rows: None)) == 0
    assert len(asked) <= 2 * 8 and len(store.rows(job.output)) == 8  # each while it is full, and once there is room


def test_a_part_file_is_read_line_by_line_and_a_row_cut_short_is_removed(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(request(i)) + "\n" for i in range(12)))
    job = batch.check(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), [], overwrite=False)
    row = '{{"id": "batch-{}", "response": {{"status_code": {}, "body": "{}"}}}}\n'
    size, numbers = 2**20, [*range(11, -1, -1)]
    held = [row.format(number, 200 if number else 500, "x" * size) for number in numbers]
    job.part.write_text("".join(held) + '{"id": "batch-')
    tracemalloc.start()
    assert asyncio.run(batch.run(None, "model", job, lambda rows: None)) == 1
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < len(held) * size / 2  # two rows and what the parser holds, not the file
    assert (tmp_path / "out.jsonl").read_text() == "".join(held[::-1])


def test_the_command_answers_a_file(folder):
    settings = ("limits.max_running=2", "limits.max_batch_tokens=16", "cache_tokens=512", "threads=1")
    command = [sys.executable, str(ROOT / "experiments/serve.py"), f"--model={folder / 'model'}"]
    command += [f"--input={folder / 'in.jsonl'}", f"--output={folder / 'command.jsonl'}"]
    command += [f"--set=engine.{each}" for each in settings]
    ran = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert "(16 answers, 5 of them errors)" in ran.stdout and len(store.rows(folder / "command.jsonl")) == 16


def test_a_file_that_another_process_writes_is_refused_at_once(folder):
    output = folder / "twice.jsonl"
    with store.alone(output):
        done = command(
            "serve.py", f"--model={folder / 'model'}", f"--input={folder / 'in.jsonl'}", f"--output={output}"
        )
        refused(done, f"another process writes {output}; wait for its end, or name another output")
    assert list(folder.glob("twice*")) == []


def test_an_output_that_appeared_meanwhile_is_not_replaced(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps(request(0)) + "\n")
    output = tmp_path / "out.jsonl"
    job = batch.check(str(tmp_path / "in.jsonl"), str(output), [], overwrite=False)
    job.part.write_text('{"id": "batch-0", "response": {"status_code": 200}}\n')
    with pytest.raises(ValueError, match="exists"):
        asyncio.run(batch.run(None, "model", job, lambda rows: output.write_text("mine")))
    assert output.read_text() == "mine" and job.part.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds 0 requests"), ("\n\n", "holds 0 requests"), ("{", "line 1: "), ("[]\n", "line 1: "),
        (json.dumps(request(1)) + "\n" + json.dumps(request(1)), "request 2 has custom_id 'line 1' of another one"),
        (json.dumps(request(1)) + "\n\n{}\n", "line 3: custom_id is missing"),
        (json.dumps(request(1) | {"url": "/v1/embeddings"}), "line 1: url: .*embeddings"),
        (json.dumps(request(1) | {"method": "GET"}), "line 1: method: .*GET"),
        (json.dumps(request(1) | {"body": 3}), "line 1: body: .*3"),
        (json.dumps(request(1) | {"more": 3}), "line 1: more is not served here"),
        (json.dumps(request(1)).replace('"temperature": 0', '"max_tokens": 8'), "line 1 has the key 'max_tokens' t"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_request_is_named_before_anything_starts(tmp_path, text, said):
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(ValueError, match=said):
        batch.check(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), [], overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_file_may_begin_with_a_byte_order_mark_and_a_message_names_the_line(tmp_path):
    path = tmp_path / "in.jsonl"
    line = json.dumps(request(0)).encode()
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\n" + line)
    assert [each.custom_id for each in batch.lines(path)] == ["line 0", "line 0"]
    path.write_bytes(line + b"\n3")
    with pytest.raises(ValueError, match="line 2: Input should be an object"):
        list(batch.lines(path))
    path.write_bytes(line + b"\n\xef\xbb\xbf" + line)  # a mark is one at the beginning alone
    with pytest.raises(ValueError, match="line 2: Invalid JSON"):
        list(batch.lines(path))
