"""Processes of one thread, or threads, that share work: results, errors, settings, what is left behind."""

import functools
import os
import signal
import threading
import time

import pytest

from jaxbench import cli, worker_pool


def setting(name):
    if name == "bad":
        raise ValueError("bad: item cannot be done")
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return name, os.environ.get(name), os.getpid()


def test_results_come_from_other_processes_that_have_one_thread_each(monkeypatch):
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    names = ["OMP_NUM_THREADS", "RAYON_NUM_THREADS"] * 4
    found = list(worker_pool.results(setting, names, processes=2))
    assert sorted(each[0] for each in found) == sorted(names)
    assert {each[1] for each in found} == {"1"} and os.getpid() not in {each[2] for each in found}
    assert "RAYON_NUM_THREADS" not in os.environ
    flags = {each for _, each, _ in worker_pool.results(setting, ["XLA_FLAGS"], processes=1)}
    own, one = "--xla_cpu_enable_fast_math=false", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    assert flags == {f"{own} {one}"}  # the user's are kept


def test_an_error_of_a_worker_is_raised_here_and_no_process_is_left():
    pids = []
    with pytest.raises(ValueError, match="bad: item cannot be done"):
        for each in worker_pool.results(setting, ["HOME", "bad", *["HOME"] * 20], processes=1):
            pids.append(each[2])
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_process_that_is_killed_is_one_line_that_says_so():
    with pytest.raises(OSError, match="a worker process was killed: one of 2 .* memory ran out.* parts are kept") as e:
        list(worker_pool.results(setting, ["HOME", "killed", *["HOME"] * 20], processes=2))
    assert cli.explain(e.value).startswith("a worker process was killed: one of 2 ended")


def test_workers_of_one_process_work_at_once_each_on_one_item_at_a_time():
    meeting, busy = threading.Barrier(2, timeout=60), [0, 0]

    def work(number: int, item: int) -> int:
        busy[number] += 1
        assert busy[number] == 1
        meeting.wait()  # passes only where the other one works too
        busy[number] -= 1
        return item

    workers = [functools.partial(work, number) for number in range(2)]
    assert sorted(worker_pool.by_threads(workers, range(8))) == list(range(8))


def test_an_error_of_a_thread_is_raised_and_what_waits_is_dropped():
    def work(item: int) -> int:
        done.append(item)
        if item == 1:
            raise ValueError(f"row {item} is bad")
        return item

    done: list[int] = []
    with pytest.raises(ValueError, match="row 1 is bad"):
        list(worker_pool.by_threads([work, work], range(1000)))
    assert len(done) < 100
