"""The largest batch that fits."""

import functools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxbench.parity import cases
from jaxbench.training import batch_size, optimizer_step
from jaxbench.training.step_config import RematConfig, StepConfig
from jaxbench.training.train_config import TrainConfig


@pytest.mark.parametrize(
    ("limit", "multiple", "wanted"), [(100, 1, 9), (109, 1, 9), (110, 1, 10), (95, 4, 8), (20, 1, 1)]
)
def test_the_largest_batch_within_the_limit_is_found(limit, multiple, wanted):
    found = batch_size.find_optimal_batch_size(lambda n: 10 + 10 * n, limit_bytes=limit, multiple=multiple)
    assert found.batch_size == wanted and found.run_bytes == 10 + 10 * wanted
    assert len(found.tried) <= 4 and all(n % multiple == 0 for n in found.tried)


@given(
    steps=st.lists(st.integers(0, 1000), min_size=1, max_size=60), limit=st.integers(1, 40_000),
    multiple=st.sampled_from((1, 4)),
)  # fmt: skip
def test_bytes_that_grow_by_no_line_end_at_the_same_batch(steps, limit, multiple):
    needed = [1 + sum(steps[: count + 1]) for count in range(len(steps))]

    def bytes_of(rows):
        count = rows // multiple
        return needed[count - 1] if count <= len(needed) else 10**6 + count

    fitting = [count for count in range(1, len(needed) + 1) if needed[count - 1] <= limit]
    assume(fitting)
    found = batch_size.find_optimal_batch_size(bytes_of, limit_bytes=limit, multiple=multiple)
    assert found.batch_size == max(fitting) * multiple
    assert len(found.tried) <= 16  # twice the halvings of sixty rows


def run_bytes(model, step, rows, *, seq_len, **settings):
    """Return the bytes of a run of a decoder."""
    settings |= {"steps": 1, "learning_rate": 1e-3, "step": step, "batch_size": rows, "data": {"seq_len": seq_len}}
    return batch_size.run_bytes(TrainConfig(model=model.model_dump(), **settings), model)


def test_a_limit_that_holds_nothing_is_refused():
    with pytest.raises(ValueError, match="a step of 2 rows needs 30 bytes, the limit is 29"):
        batch_size.find_optimal_batch_size(lambda n: 10 + 10 * n, limit_bytes=29, multiple=2)


def test_a_step_s_bytes_grow_with_its_rows_and_hold_its_state():
    count = sum(a * (b if b else 1) for a, b in ((64, 32),))
    how = StepConfig()
    one, four = (run_bytes(cases.LLAMA, how, n, seq_len=32) for n in (2, 8))
    assert 3 * 4 * count < one < four
    remat = StepConfig(remat=RematConfig(policy="block"))
    deep = cases.LLAMA.model_copy(update={"num_layers": 6})
    plain, spared = (run_bytes(deep, each, 8, seq_len=64) for each in (how, remat))
    assert spared < plain


def test_an_evaluation_that_needs_more_than_the_step_counts(monkeypatch):
    """Evaluated all at once, as a run once did, a batch of many micro-batches needs more than its step."""
    how = StepConfig(accumulation=16, remat=RematConfig(policy="block"))
    sizes = {"seq_len": 64, "scan_layers": True}
    spared = run_bytes(cases.LLAMA, how, 64, **sizes)
    at_once = functools.partial(optimizer_step.eval_step, count=1)
    monkeypatch.setattr(batch_size.optimizer_step, "eval_step", at_once)
    assert run_bytes(cases.LLAMA, how, 64, **sizes) > spared
