"""The server's metrics, for Prometheus: what they say of an engine, and of one that is gone."""

from types import SimpleNamespace

from jaxbench.serve.engine import Engine
from jaxbench.serve.metrics import PREFIX, Metrics
from jaxbench.serve.service import Service
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
