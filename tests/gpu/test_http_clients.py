"""Clients over HTTP at the server as it is run: records of each; bad input is refused; no server is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from jaxbench.gpu import http_clients
from jaxbench.measure.records import RecordFile
from jaxbench.serve.study import clients
from tests.structure import ROOT

TINY = ("--device=cpu", "--config=configs/lm/tiny_shape.yaml", "--prompt_tokens=16", "--new_tokens=4")


def command(folder, *words: str) -> list[str]:
    return [sys.executable, "-m", "jaxbench.gpu.http_clients", f"--output={folder / 'results.jsonl'}", *words]


def measured(folder, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(folder, *words), cwd=ROOT, capture_output=True, text=True)


def left_behind(folder) -> list[str]:
    """Command lines of processes that name the folder, as the server does, whose model is in it."""
    found = []
    for each in psutil.process_iter():
        try:
            line = " ".join(each.cmdline())
        except psutil.Error:
            continue
        found += [line] if str(folder) in line and "serve.py" in line else []
    return found


def script(folder, code: str) -> clients.Server:
    """Return a started server that is a line of Python, which nothing answers for."""
    words = [sys.executable, "-c", code]
    with clients.started("it", words, folder / "log", port=clients.free_port(), limit_s=1.0, grace_s=0.5) as server:
        return server


def test_clients_stream_from_a_server_that_is_ended_behind_them(tmp_path):
    done = measured(tmp_path, *TINY, "--clients=1,2", "--set=step.precision=bfloat16")
    assert done.returncode == 0, done.stderr[-2000:]
    kept = RecordFile(tmp_path / "results.jsonl").read()
    names = [*http_clients.UNITS, http_clients.ERRORS]
    assert [(each.metric, each.workload.batch) for each in kept] == [(name, n) for n in (1, 2) for name in names]
    assert all(len(each.samples) == 3 and each.detail["slots"] == 2 for each in kept)
    assert {each.workload.label() for each in kept} == {"decode bfloat16 b1 p16 n4", "decode bfloat16 b2 p16 n4"}
    for count in (1, 2):
        value = {each.metric: each.value for each in kept if each.workload.batch == count}
        assert value["serve_errors"] == 0
        assert 0 < value["token_gap_s"] <= value["token_gap_p99_s"] and 0 < value["first_token_s"]
        assert value["first_token_s"] <= value["first_token_p99_s"] and value["token_s"] > 0
        assert 0 <= value["server_processor"] < 4 and 0 < value["clients_processor"] < 4
        # a client has four tokens in the time of the first one at most, and medians are not means
        assert 0 < value["serve_tokens_per_s"] <= 2 * count * 4 / value["first_token_s"]
    log = (tmp_path / "server.log").read_text()
    answered = log.count('"path": "/v1/completions", "status": 200')
    assert answered == 2 * (1 + 3 * 8) and "served for" in log  # each number of clients has one that is not counted
    assert left_behind(tmp_path) == []


def test_each_token_is_a_character_that_comes_alone():
    words = http_clients.CharacterTokenizer("".join(map(chr, range(http_clients.FIRST, http_clients.FIRST + 300))))
    ids = list(range(300))
    assert words.encode(words.decode(ids)) == ids and len(words.decode([299]).encode()) == 4


@pytest.mark.parametrize(
    "words, wanted",
    [
        (("--clients=1,0",), "--clients='0' is no number"),
        (("--clients=some",), "--clients='some' is no number"),
        (("--prompt_tokens=300",), "304 tokens a row; the model's context is 256"),
        (("--new_tokens=1",), "new_tokens"),
        (("--requests=0",), "requests"),
        (("--start_s=-1",), "start_s"),
        (("--set=step.precision=float8",), "step.precision=float8"),
        (("--set=model.vocab_size=2000000",), "model.vocab_size=2000000; wanted at most 1048576"),
        (("--config=configs/lm/books_bpe.yaml",), "model.vocab_size=None"),
        (("--client=1",), "the nearest is --clients"),
        (("--output=/",), "--output=/ is a folder"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(words, wanted, tmp_path):
    done = measured(tmp_path, *TINY, *words)
    assert done.returncode == 2 and wanted in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_start_in_time_is_one_error_and_is_ended(tmp_path):
    done = measured(tmp_path, *TINY, "--clients=1", "--start_s=0.1")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert f"server did not start: not ready in 0.1 s; {tmp_path / 'server.log'} ends: " in done.stderr
    assert left_behind(tmp_path) == [] and not (tmp_path / "results.jsonl").exists()


def test_an_interrupted_call_ends_its_server(tmp_path):
    words = command(tmp_path, *TINY, "--clients=1", "--least=20000")
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log, until = tmp_path / "server.log", time.monotonic() + 120
    while not (log.exists() and "/v1/completions" in log.read_text()):
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.1)
    assert len(left_behind(tmp_path)) == 1
    running = psutil.Process(process.pid).children(recursive=True)  # the engine's worker too
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130 and said.startswith("interrupted") and len(said.strip().splitlines()) == 1, said
    assert left_behind(tmp_path) == [] and psutil.wait_procs(running, timeout=20)[1] == []


def test_the_end_of_a_servers_log_says_why_it_has_ended(tmp_path):
    with pytest.raises(ValueError, match=r"it did not start: exit code 3; .*log ends: one \| two \| why$"):
        script(tmp_path, """print('zero\\none\\n\\ntwo\\n{"event": "http"}\\nwhy'); raise SystemExit(3)""")


def test_a_server_that_does_not_heed_its_end_is_killed(tmp_path):
    code = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(100)"
    with pytest.raises(ValueError, match=r"not ready in 1 s; .* ends: \d+$"):
        script(tmp_path, code)
    assert not psutil.pid_exists(int((tmp_path / "log").read_text()))
