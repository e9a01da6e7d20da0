"""The server's metrics, for Prometheus: what they say of an engine, and of one that is gone."""

import asyncio
import os
from types import SimpleNamespace

import psutil
import pytest

from jaxbench.serve.engine import Engine
from jaxbench.serve.metrics import PREFIX, Metrics, Usage, usage
from jaxbench.serve.service import Service
from jaxbench.serve.watch import Rule, Watch
from jaxbench.serve.worker import Report

RUNNER = SimpleNamespace(
    num_blocks=9, block_size=4, max_seq_len=32, vocab_size=5, sizes=(256,), max_wanted=32, segment=None
)  # fmt: skip


def shown(metrics):
    """Numbers without labels, by name."""
    lines = [line.split() for line in metrics.text().decode().splitlines() if line.startswith(PREFIX)]
    return {name.removeprefix(PREFIX): float(value) for name, value in lines if "{" not in name}


def test_every_number_of_the_engine_is_a_metric():
    engine, metrics = Engine(RUNNER), Metrics()
    engine.num_guessed, engine.num_right, engine.num_steps, engine.scheduler.num_preempted = 7, 5, 3, 2
    metrics.engine(engine.stats())
    found = shown(metrics)
    assert {name: found[name] for name in engine.stats()} == engine.stats()
    assert (found["guessed"], found["guessed_right"], found["blocks_available"]) == (7, 5, 8)


def test_an_engine_that_is_gone_runs_nothing_and_has_no_blocks():
    metrics = Metrics()
    metrics.engine(Engine(RUNNER).stats() | {"running": 2, "waiting": 3, "blocks_available": 1})
    Service._hear(SimpleNamespace(metrics=metrics, state="ready", answers={}), Report("died", error="exit code -9"))
    found = shown(metrics)
    assert [found[name] for name in ("running", "waiting", "blocks", "blocks_available")] == [0, 0, 0, 0]
    assert found["worker_deaths_total"] == 1


def test_what_the_servers_processes_take_of_the_machine_is_a_metric():
    supervisor = SimpleNamespace(process=SimpleNamespace(pid=os.getppid()))
    metrics = Metrics()
    metrics.processes(Service.usage(SimpleNamespace(_supervisor=supervisor)))
    found = dict(line.rsplit(" ", 1) for line in metrics.text().decode().splitlines())
    for name, pid in (("server", os.getpid()), ("engine", os.getppid())):
        resident = float(found[f'{PREFIX}resident_memory_bytes{{process="{name}"}}'])
        assert resident == pytest.approx(psutil.Process(pid).memory_info().rss, rel=0.2)
    assert float(found[f'{PREFIX}cpu_seconds{{process="server"}}']) == pytest.approx(sum(os.times()[:2]), rel=0.2)


@pytest.mark.parametrize("pid", [None, 2**22 + 1])
def test_an_engine_that_is_gone_takes_nothing(pid):
    assert usage(pid) == (0, 0.0)


def test_a_rule_on_memory_is_judged_by_what_server_and_engine_take_together():
    rule = Rule(name="leak", figure="memory_mib", most=1.0, least_count=2, window_s=5)

    async def judged():
        alerts = SimpleNamespace(every_s=0.01)
        service = SimpleNamespace(
            config=SimpleNamespace(alerts=alerts), answers={}, metrics=Metrics(), watch=Watch((rule,)),
            usage=lambda: {"server": Usage(2**20, 1.0), "engine": Usage(2**21, 9.0)}, _incidents=asyncio.Queue(),
        )  # fmt: skip
        watching = asyncio.ensure_future(Service._judge(service))
        try:
            return await asyncio.wait_for(service._incidents.get(), 10)
        finally:
            watching.cancel()

    incident = asyncio.run(judged())
    assert (incident.state, incident.value, incident.count) == ("open", 3.0, 2)
