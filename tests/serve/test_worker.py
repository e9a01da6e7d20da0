"""The engine's process: what it takes between its steps."""

import multiprocessing
import threading

import pytest

from jaxbench.serve import worker
from jaxbench.serve.engine import Engine
from jaxbench.serve.request import Request
from jaxbench.serve.scheduler import Limits
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
        assert len(here.recv().events) == len(engine.scheduler.running) == together
    finally:
        later.join()
    worker._turn(engine, there)
    assert len(engine.scheduler.running) == 2 and here.recv().kind == "events"
    here.close()
    with pytest.raises(EOFError):
        while True:
            worker._turn(engine, there)
