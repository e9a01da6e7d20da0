"""The pipe to a worker: answers, errors, deaths and hangs, with a real process of the lightest arm."""

import os
import signal

import pytest

from jaxbench.bench import launch
from jaxbench.measure.process import Worker, WorkerError


@pytest.fixture
def worker(tmp_path):
    environment = launch.worker_environment("cpu", cache=tmp_path / "cache", threads=1)
    found = Worker("llama_cpp", environment=environment, log=tmp_path / "logs" / "worker.log", threads=1)
    yield found
    found.close()
    assert not found.alive


def test_answers_errors_and_death(worker):
    answer = worker.request("start", timeout_s=60, device="cpu", checkpoint="")
    assert answer["skip"] and answer["level_bytes"] > 2**20 and "numpy" in answer["versions"]
    with pytest.raises(WorkerError, match="llama_cpp: dance: ValueError: worker: unknown operation 'dance'") as caught:
        worker.request("dance", timeout_s=60)
    assert not caught.value.fatal and worker.alive
    assert worker.request("memory", timeout_s=60)["peak_bytes"] >= 0
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="signal 9") as caught:
        worker.request("memory", timeout_s=60)
        worker.request("memory", timeout_s=60)
    assert caught.value.fatal


def test_a_hanging_request_ends_the_worker(worker):
    with pytest.raises(WorkerError, match="start took longer than 0 s") as caught:
        worker.request("start", timeout_s=0.001, device="cpu", checkpoint="")
    assert caught.value.fatal and not worker.alive
