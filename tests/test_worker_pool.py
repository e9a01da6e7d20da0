"""Processes of one thread that share work: results, errors, settings, what is left behind."""

import os
import time

import pytest

from jaxbench import worker_pool


def setting(name):
    if name == "bad":
        raise ValueError("bad: item cannot be done")
    return name, os.environ.get(name), os.getpid()


def test_results_come_from_other_processes_that_have_one_thread_each(monkeypatch):
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    names = ["OMP_NUM_THREADS", "RAYON_NUM_THREADS"] * 4
    found = list(worker_pool.results(setting, names, processes=2))
    assert sorted(each[0] for each in found) == sorted(names)
    assert {each[1] for each in found} == {"1"} and os.getpid() not in {each[2] for each in found}
    assert "RAYON_NUM_THREADS" not in os.environ


def test_an_error_of_a_worker_is_raised_here_and_no_process_is_left():
    pids = []
    with pytest.raises(ValueError, match="bad: item cannot be done"):
        for each in worker_pool.results(setting, ["HOME", "bad", *["HOME"] * 20], processes=1):
            pids.append(each[2])
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
