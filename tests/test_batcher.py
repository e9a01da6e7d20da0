"""The batcher: sizes, times, order, and what a failing, cancelled or late request does to the others."""

import threading
import time

import pytest

import jaxbench.sample
import jaxbench.transformer
from jaxbench import batcher, initial
from jaxbench.config import TransformerConfig
from jaxbench.memory import decoder_config
from torch_ref import sample, transformer


class Doubler:
    """Doubles numbers; refuses negative ones, and can be held up."""

    def __init__(self):
        self.batches, self.is_free = [], threading.Event()
        self.is_free.set()

    def __call__(self, requests):
        self.batches.append(list(requests))
        self.is_free.wait(10)
        if min(requests) < 0:
            raise ValueError(f"doubler: {min(requests)} is negative")
        return [2 * request for request in requests]


def busy(run, queue):
    """Occupy the batcher's thread with request 100 until `run.is_free` is set; return its future."""
    run.is_free.clear()
    first = queue.submit(100)
    while not run.batches:
        time.sleep(0.001)
    return first


def test_results_come_in_the_order_of_the_requests_in_batches_of_at_most_the_size():
    run = Doubler()
    with batcher.Batcher(run, max_batch_size=4, timeout_ms=20) as queue:
        assert queue.map(range(10)) == list(range(0, 20, 2))
    assert sum(run.batches, []) == list(range(10)) and max(map(len, run.batches)) <= 4


def test_a_full_batch_starts_at_once_and_a_lone_request_after_the_timeout():
    run = Doubler()
    with batcher.Batcher(run, max_batch_size=3, timeout_ms=60_000) as queue:
        assert [future.result(10) for future in [queue.submit(i) for i in range(3)]] == [0, 2, 4]
    assert run.batches == [[0, 1, 2]]
    with batcher.Batcher(run, max_batch_size=3, timeout_ms=50) as queue:
        start = time.monotonic()
        assert queue.submit(7).result(10) == 14
        assert time.monotonic() - start >= 0.05


def test_a_failing_request_fails_alone():
    run = Doubler()
    with batcher.Batcher(run, max_batch_size=3, timeout_ms=60_000) as queue:
        pending = [queue.submit(request) for request in (1, -5, 3)]
        assert (pending[0].result(10), pending[2].result(10)) == (2, 6)
        with pytest.raises(ValueError, match="-5 is negative"):
            pending[1].result(10)
        assert queue.map([4, 5, 6]) == [8, 10, 12]
    assert run.batches[0] == [1, -5, 3]


def test_cancelled_and_late_requests_are_left_out_and_nobody_else_loses_a_result():
    run = Doubler()
    with batcher.Batcher(run, max_batch_size=8, timeout_ms=0) as queue:
        first = busy(run, queue)
        early, cancelled, late, last = (queue.submit(i, timeout_s=0.01 if i == 3 else None) for i in (1, 2, 3, 4))
        assert cancelled.cancel()
        with pytest.raises(TimeoutError):
            last.result(0.02)  # the caller's own patience; the request goes on
        run.is_free.set()
        assert [future.result(10) for future in (first, early, last)] == [200, 2, 8]
        with pytest.raises(TimeoutError, match="given up after waiting"):
            late.result(10)
        assert cancelled.cancelled() and not first.cancel()
    assert run.batches == [[100], [1, 4]]


def test_closing_finishes_what_waits_and_refuses_what_comes_later():
    run = Doubler()
    queue = batcher.Batcher(run, max_batch_size=2, timeout_ms=60_000)
    first = queue.submit(1)
    queue.close()
    assert first.result(0) == 2
    with pytest.raises(ValueError, match="closed, request 5 comes too late"):
        queue.submit(5)


def test_a_run_that_loses_results_is_an_error():
    with batcher.Batcher(lambda requests: [], max_batch_size=1, timeout_ms=0) as queue:
        with pytest.raises(ValueError, match="run returned 0 results for 1 requests"):
            queue.submit(1).result(10)


def test_generation_gives_every_request_what_it_gets_alone():
    shape = {"vocab_size": 61, "d_model": 16, "d_ff": 24, "num_layers": 1, "max_seq_len": 32}
    config = TransformerConfig(**shape, num_heads=2, num_kv_heads=1, head_dim=8)
    model = transformer.build(config, initial.initial_params(config, 0, distinct=True))
    generator = sample.Generator(model, eos_id=None, sampling=sample.SamplingParams(temperature=0.02))
    run = batcher.generation(generator, max_new_tokens=5, seed=3)
    prompts = [[1, 2, 3], [4], [5] * 40, [6, 7]]  # the third is too long
    with batcher.Batcher(run, max_batch_size=4, timeout_ms=60_000) as queue:
        pending = [queue.submit(prompt) for prompt in prompts]
        with pytest.raises(ValueError, match="40"):
            pending[2].result(60)
        found = [pending[i].result(60) for i in (0, 1, 3)]
    assert found == [run([prompts[i]])[0] for i in (0, 1, 3)] and len({tuple(each) for each in found}) == 3
    together = run([prompts[0], prompts[1], prompts[3]])
    assert found == together and {len(each) for each in found} == {5}


def test_a_decoder_with_memory_answers_a_batch_of_prompts_as_it_answers_each_alone():
    shape = {"vocab_size": 61, "d_ff": 24, "num_layers": 1, "num_kv_heads": 2, "max_seq_len": 32}
    sizes, memory = {"d_model": 16, "num_heads": 2, "head_dim": 8}, {"kind": "mag", "window": 2}
    memory |= {"neural": sizes | {"chunk_size": 4, "conv_size": 1, "initial_theta": 0.1}}
    config = decoder_config.MemoryTransformerConfig(**shape, **sizes, memory=memory, tie_embeddings=False)
    params = decoder_config.initial_params(config, 0, distinct=True)

    def generation(build, backend):
        generator = backend.Generator(build(config, params), eos_id=None, sampling=backend.SamplingParams())
        return batcher.generation(generator, max_new_tokens=6, seed=0)

    # The last two end alike, further back than the window: their answers differ by what the memory learned before.
    prompts = [[7], [8, 9, 10], [*range(20, 29), 3, 1, 4, 1, 5], [50, 51, 3, 1, 4, 1, 5]]
    twin = generation(transformer.build, sample)
    wanted = [twin([prompt])[0] for prompt in prompts]  # in PyTorch, which compiles nothing for a batch of one
    assert len({tuple(each) for each in wanted}) == 4 and {len(each) for each in wanted} == {6}
    for generate in (twin, generation(jaxbench.transformer.build, jaxbench.sample)):
        with batcher.Batcher(generate, max_batch_size=4, timeout_ms=60_000) as queue:
            assert queue.map(prompts) == wanted


@pytest.mark.parametrize(
    ("size", "timeout", "message"), [(0, 1, "max_batch_size=0"), (1, -1, "timeout_ms=-1"), (1, float("nan"), "=nan")]
)
def test_limits_out_of_range_are_refused(size, timeout, message):
    with pytest.raises(ValueError, match=message):
        batcher.Batcher(list, max_batch_size=size, timeout_ms=timeout)


def test_a_request_without_time_is_refused():
    with batcher.Batcher(list, max_batch_size=1, timeout_ms=0) as queue:
        with pytest.raises(ValueError, match="timeout_s=0 must be above 0"):
            queue.submit(1, timeout_s=0)
