"""The engine's process: what it takes between its steps."""

import asyncio
import itertools
import multiprocessing
import os
import threading
import time

import pytest

from jaxbench.serve import worker
from jaxbench.serve.engine import Engine
from jaxbench.serve.request import Request
from jaxbench.serve.scheduler import Limits
from jaxbench.serve.settings import EngineConfig
from jaxbench.serve.study.oracle import HashRunner


@pytest.mark.parametrize(("wait_ms", "tokens", "together"), [(0, 64, 1), (10_000, 16, 2), (50, 64, 1)])
def test_the_first_request_waits_for_a_full_step_and_no_longer_than_it_may(wait_ms, tokens, together):
    limits = Limits(max_running=4, max_batch_tokens=tokens, max_waiting=4, max_wait_ms=wait_ms)
    runner = HashRunner(
        num_blocks=32, block_size=4, max_seq_len=64, vocab_size=50, sizes=(tokens,), max_wanted=limits.max_logits
    )
    engine = Engine(runner, limits)
    here, there = multiprocessing.Pipe()
    here.send(("add", Request("a", tuple(range(8)), 4)))
    later = threading.Timer(0.3, here.send, [("add", Request("b", tuple(range(8, 16)), 4))])  # fills a step of 16
    later.start()
    try:
        worker._turn(engine, there)
        reports = [here.recv()]
        while not reports[-1].events:  # while it waits it says that it does not hang
            reports.append(here.recv())
        assert len(reports) > (wait_ms > 300)
        assert len(reports[-1].events) == len(engine.scheduler.running) == together
    finally:
        later.join()
    worker._turn(engine, there)
    assert len(engine.scheduler.running) == 2 and here.recv().kind == "events"
    here.close()
    with pytest.raises(EOFError):
        while True:
            worker._turn(engine, there)


def _stub(config, line, parent, watermarks):
    """A worker that is busy while orders pile up, says how many came, sends a large report, and dies of the last."""
    line.send(worker.Report("ready"))
    time.sleep(0.5)
    for count in itertools.count(1):
        name, value = line.recv()
        if name == "big":
            line.send(worker.Report("events", about={"count": count, "text": "x" * 2**20}))
        if name == "die":
            line.send(worker.Report("events", about={"last": True}))
            os._exit(3)


@pytest.mark.parametrize("library", ["asyncio", "uvloop"])
def test_large_orders_and_reports_pass_whole_and_a_death_is_heard_behind_the_last_report(library, monkeypatch):
    loop = pytest.importorskip(library).new_event_loop()
    monkeypatch.setattr(worker, "_run", _stub)
    heard, dead = [], asyncio.Event()

    async def run():
        def listen(report):
            heard.append(report)
            if report.kind == "died":
                dead.set()

        supervisor = worker.Supervisor(EngineConfig(hang_s=30), listen, loop)
        while not (heard and heard[0].kind == "ready"):
            await asyncio.sleep(0.01)
        for number in range(100):  # more than the line holds
            assert supervisor.send("add", (number, "x" * 20_000))
        assert supervisor.send("big", None) and supervisor.send("die", None)
        started = time.monotonic()
        await asyncio.wait_for(dead.wait(), 60)
        assert time.monotonic() - started < 25  # and not when it had said nothing for long
        await asyncio.to_thread(supervisor.end)

    loop.run_until_complete(run())
    loop.close()
    kinds = [report.kind for report in heard]
    assert kinds[:4] == ["ready", "events", "events", "died"] and heard[1].about["count"] == 101
    assert len(heard[1].about["text"]) == 2**20 and heard[2].about == {"last": True} and "exit code 3" in heard[3].error


def test_numbers_of_a_busy_engine_come_now_and_then_and_behind_the_last_token():
    runner = HashRunner(num_blocks=32, block_size=4, max_seq_len=64, vocab_size=50, sizes=(8,), max_wanted=8)
    engine = Engine(runner, Limits(max_running=4, max_batch_tokens=8))
    here, there = multiprocessing.Pipe()
    here.send(("add", Request("a", (1, 2), 3)))
    told = worker._turn(engine, there, time.monotonic())
    first = here.recv()
    assert len(first.events) == 1 and first.about == {} and engine.is_busy
    told = worker._turn(engine, there, told - worker.BUSY_STATS_S)
    assert here.recv().about["running"] == 1
    worker._turn(engine, there, told)
    assert here.recv().about["running"] == 0 and not engine.is_busy


def _silent(config, line, parent, watermarks):
    """A worker that is ready and then says nothing."""
    line.send(worker.Report("ready"))
    time.sleep(600)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [(_silent, "the worker hangs and is killed: no sign of life for 1 s"), (None, "cannot be started or heard: ")],
)
def test_a_worker_that_hangs_is_told_from_one_that_cannot_be_started(make, wanted, monkeypatch):
    heard, dead, loop = [], asyncio.Event(), asyncio.new_event_loop()
    monkeypatch.setattr(worker, "_run", make)
    if make is None:
        monkeypatch.setattr(worker.Supervisor, "_start", lambda _: open("/nowhere/at/all"))

    def listen(report):
        heard.append(report)
        if report.kind == "died":
            dead.set()

    async def run():
        supervisor = worker.Supervisor(EngineConfig(hang_s=1), listen, loop)
        await asyncio.wait_for(dead.wait(), 120)
        await asyncio.to_thread(supervisor.end)

    loop.run_until_complete(run())
    loop.close()
    assert wanted in next(report.error for report in heard if report.kind == "died")
