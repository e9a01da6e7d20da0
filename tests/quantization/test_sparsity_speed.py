"""What the speed of sparsity is measured with: programs, turns, ratios."""

import jax
import numpy as np
import pytest

from jaxbench.block_pattern import BlockPattern
from jaxbench.quantization import sparsity_speed
from jaxbench.quantization.sparsity_speed import Arm


@pytest.fixture(scope="module")
def arms():
    return {arm.name.partition(",")[0]: arm for arm in sparsity_speed.feed_forward_arms(8, 32, 48)}


def test_zeros_stored_dense_are_multiplied_and_removed_units_are_not(arms):
    dense, half = arms["dense"], arms["structured"]
    for name in ("50 % unstructured", "2:4"):
        assert arms[name].flops >= dense.flops
    assert half.flops == pytest.approx(dense.flops / 2, rel=0.1) and half.bytes < 0.75 * dense.bytes


def test_stored_sparse_and_stored_dense_are_the_same_layer():
    found = {arm.name: np.asarray(arm.run()) for arm in sparsity_speed.feed_forward_arms(8, 32, 48)}
    stored_dense = found["50 % unstructured, stored dense"]
    np.testing.assert_allclose(found["50 % unstructured, stored sparse (BCOO)"], stored_dense, rtol=0, atol=1e-5)
    assert np.abs(found["dense"] - stored_dense).max() > 0.01
    assert all(value.shape == (8, 32) for value in found.values())


def test_half_of_the_weights_are_zero_where_the_arm_says_so(monkeypatch):
    seen = {}

    def keep(name, call, *args):
        seen[name] = args[1:]
        return Arm(name, lambda: None, 0.0, 0.0)

    monkeypatch.setattr(sparsity_speed, "compiled", keep)
    sparsity_speed.feed_forward_arms(8, 32, 48)
    for name in ("50 % unstructured, stored dense", "2:4, stored dense"):
        assert [float((np.asarray(x) == 0).mean()) for x in seen[name]] == [0.5] * 3
    stored = seen["50 % unstructured, stored sparse (BCOO)"]
    assert [x.nse for x in stored] == [32 * 48 // 2] * 3
    assert [x.shape for x in seen["structured, half of the units"]] == [(32, 24), (32, 24), (24, 32)]


def test_block_sparse_attention_counts_fewer_flops_than_dense():
    pattern = BlockPattern(block_size=16, local=2)
    dense, blocked, sparse = sparsity_speed.attention_arms(512, pattern, num_heads=2, num_kv_heads=1, head_dim=16)
    assert sparse.flops < 0.25 * dense.flops and "12% of the blocks" in sparse.name
    np.testing.assert_allclose(np.asarray(blocked.run()), np.asarray(dense.run()), rtol=0, atol=1e-5)
    assert np.asarray(dense.run()).shape == np.asarray(sparse.run()).shape == (1, 512, 2, 16)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_arm_comes_first_and_last_equally_often(count):
    found = sparsity_speed.orders(count, 2 * count)
    assert all(sorted(order) == list(range(count)) for order in found)
    assert sorted(order[0] for order in found) == sorted(order[-1] for order in found) == sorted([*range(count)] * 2)


def test_ratios_are_of_the_first_arm_and_their_interval_holds_the_mean():
    costs, now = {"dense": 4.0, "half": 2.0}, [0.0]

    def arm(name):
        def run():
            now[0] += costs[name]

        return Arm(name, run, 8.0, 16.0)

    rows = sparsity_speed.measure("work", [arm("dense"), arm("half")], rounds=6, repeats=3, clock=lambda: now[0])
    assert [row.seconds for row in rows] == [4.0, 2.0] and rows[0].ratio == 1.0
    assert rows[1].ratio == pytest.approx(2.0) and rows[1].low <= rows[1].ratio <= rows[1].high
    text = sparsity_speed.table(rows)
    assert "2.00 [2.00, 2.00]" in text and len(text.splitlines()) == 3
    with pytest.raises(ValueError, match="rounds=1 give no interval"):
        sparsity_speed.measure("work", [arm("dense")], rounds=1, repeats=1, clock=lambda: now[0])


def test_a_compiled_arm_waits_for_its_result():
    arm = sparsity_speed.compiled("sum", lambda x: x @ x, np.ones((8, 8), np.float32))
    assert isinstance(arm.run(), jax.Array) and arm.flops >= 2 * 8**3 and arm.bytes > 0
