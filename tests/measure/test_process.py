"""The pipe to a worker: answers, errors, deaths and hangs, with a real process of the lightest arm."""

import itertools
import os
import signal

import pytest

from jaxbench.measure import process
from jaxbench.measure.process import Worker, WorkerError


@pytest.fixture
def worker(tmp_path):
    environment = process.environment("cpu", threads=1)
    log = tmp_path / "logs" / "worker.log"
    with Worker("llama_cpp", "jaxbench.bench.worker", environment=environment, log=log, timeout_s=60) as found:
        yield found
    assert not found.alive


def test_answers_errors_and_death(worker):
    answer = worker.request("start", device="cpu", checkpoint="", programs="")
    assert "llama" in (answer["skip"] or "llama") and answer["level_bytes"] > 2**20  # skipped where it is not installed
    assert "numpy" in answer["versions"]
    with pytest.raises(WorkerError, match="llama_cpp: dance: ValueError: worker: unknown operation 'dance'") as caught:
        worker.request("dance")
    assert not caught.value.fatal and worker.alive
    assert worker.request("memory")["peak_memory_bytes"] >= 0
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="signal 9") as caught:
        worker.request("memory")
        worker.request("memory")
    assert caught.value.fatal


def test_a_hanging_request_ends_the_worker(worker):
    with pytest.raises(WorkerError, match="start took longer than 0 s") as caught:
        worker.request("start", timeout_s=0.001, device="cpu", checkpoint="")
    assert caught.value.fatal and not worker.alive


def test_every_name_comes_first_as_often_as_the_others():
    orders = [process.turn("abcd", number) for number in range(4)]
    assert orders[0] == list("abdc") and process.turn("abcd", 4) == orders[0] and process.turn("a", 3) == ["a"]
    for place in range(4):
        assert sorted(order[place] for order in orders) == list("abcd")
    pairs = [pair for order in orders for pair in itertools.pairwise(order)]
    assert sorted(pairs) == sorted(itertools.permutations("abcd", 2))  # each follows each other once
    odd = [process.turn("abc", number) for number in range(3)]
    pairs = [pair for order in odd for way in (order, order[::-1]) for pair in itertools.pairwise(way)]
    assert sorted(pairs) == sorted([*itertools.permutations("abc", 2)] * 2)


def test_a_peer_that_is_not_installed_is_named_with_the_cure():
    with pytest.raises(ValueError, match=r"\.venvs/nobody/bin/python is not there: run `make peers`"):
        process.peer_python("nobody")


@pytest.mark.parametrize(
    ("text", "last"),
    [("first\n  second \n\n \n", "second"), (" \n", "no message"), (None, "no message"), ("x" * 400, "x" * 300)],
)
def test_the_last_line_is_the_last_that_is_not_blank(text, last):
    assert process.last_line(text) == last
