"""The speed table of a pair: its arms, its rows, and the tour that a reader runs."""

import importlib
import os
import subprocess
import sys

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
import torch
from flax import linen

import jaxbench
from jaxbench.measure.records import Record, Workload
from jaxbench.pair import proof, public_types, speed, speed_arms, speed_report, speed_worker
from tests.structure import ROOT
from tests.test_cli import shell_environment

X = np.random.default_rng(0).standard_normal((6, 4))


class Norm(linen.Module):
    """A layer with batch statistics."""

    @linen.compact
    def __call__(self, x, train=False):
        return linen.Dense(3)(linen.BatchNorm(not train, momentum=0.9, epsilon=1e-5)(x))


def with_statistics():
    modes = {"eval": {"train": False}, "train": {"train": True}}
    twin = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    optimizers = (optax.sgd(0.1), lambda params: torch.optim.SGD(params, 0.1))
    return public_types.checked(jaxbench.Pair(Norm(), twin, X, jax_modes=modes, optimizers=optimizers))


def without_a_batch_axis():
    layer = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    return public_types.checked(jaxbench.Pair(layer, torch.nn.Linear(4, 3), X, per_example=True))


@pytest.mark.parametrize("make", [with_statistics, without_a_batch_axis])
def test_arms_of_both_sides_have_the_same_objective_and_train_alike(make):
    pair = make()
    weights = proof.weights(pair)
    assert weights.is_training == (make is with_statistics)
    losses = {}
    for name in ("jax_compiled", "jax_eager", "torch_eager"):
        arm = speed_arms.arm(name, pair, weights, dtype="float32")
        losses[name] = []
        for part in speed.PARTS if pair.optimizers else speed.PARTS[:2]:
            timed = arm.timed(part)
            losses[name] += [timed.loss(timed.call()) for _ in range(2)]  # the second step is on other parameters
    for mine in losses.values():
        np.testing.assert_allclose(mine, losses["torch_eager"], rtol=1e-5)
    if pair.optimizers:
        assert losses["torch_eager"][5] < 0.99 * losses["torch_eager"][4]


def test_a_loss_without_parameters_is_differentiated_by_its_inputs():
    class Square(torch.nn.Module):
        def forward(self, x):
            return x * x

    pair = public_types.checked(jaxbench.Pair(lambda x: x * x, Square(), X))
    timed = speed_arms.arm("jax_compiled", pair, proof.weights(pair), dtype="float32").timed("forward_backward")
    (_, _), (gradient,) = timed.call()
    np.testing.assert_allclose(gradient, 2 * X**3 / X.size, rtol=1e-5)
    arm = speed_arms.arm("torch_eager", pair, proof.weights(pair), dtype="float32")
    arm.timed("forward_backward").call()
    np.testing.assert_allclose(arm.inputs[0].grad, 2 * X**3 / X.size, rtol=1e-5)


@pytest.mark.parametrize("library", ["torchax", "torch2jax"])
def test_a_wrapped_module_computes_the_same(library):
    try:
        importlib.import_module(library)
    except (ImportError, AttributeError) as error:  # torchax 0.0.13 names operators that PyTorch 2.13 has no more
        pytest.skip(f"{library} is not here, or not for this PyTorch: {error}")
    pair = without_a_batch_axis()
    weights = proof.weights(pair)
    with jax.numpy_rank_promotion("allow"):  # the libraries add biases [C] to rows [B C]
        arms = [speed_arms.arm(name, pair, weights, dtype="float32") for name in (library, "torch_eager")]
        losses = [timed.loss(timed.call()) for timed in (arm.timed("forward_backward") for arm in arms)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def record(metric, arm, launch, value, **fields):
    samples = () if value is None else (value,)
    load = Workload(dtype="float32")
    return Record(metric=metric, arm=arm, launch=launch, value=value, samples=samples, workload=load, **fields)


REFERENCE = (1.0, 2.0)


def records():
    times = {"torch_eager": (1.0, 1.1, 0.9), "jax_compiled": (0.5, 0.55, 0.44), "jax_eager": (3.0, 3.2, 2.8)}
    made = [record("forward_s", arm, i, x) for arm, values in times.items() for i, x in enumerate(values, 1)]
    outputs = {"torch_eager": (1.0, 2.0000002), "jax_compiled": (1.0, 1.9999998), "jax_eager": (1.0, 2.00001)}
    made += [record("forward_first_cold_s", arm, 1, 9.0, detail={"quantiles": x}) for arm, x in outputs.items()]
    return made + [record("open", "torchax", i, None, status="error", reason="not there") for i in (1, 2, 3)]


def test_rows_that_jax_loses_come_first_and_missing_arms_are_named_once():
    rows, notes = speed.summary(records(), REFERENCE)
    assert [(row["arm"], row["verdict"]) for row in rows] == [
        ("jax_eager", "slower"), ("jax_compiled", "faster"), ("torch_eager", ""),
    ]  # fmt: skip
    point, low, high = rows[1]["ratio"]
    assert low < point < high and point == pytest.approx(2.015, abs=0.01)  # the geometric mean of 2, 2 and 2.045
    assert notes[0] == "torchax was left out of open float32: not there"
    assert len(notes) == 2 and notes[1].startswith("jax_eager computes something else")


def test_a_busy_machine_is_not_judged():
    rows, _ = speed.summary(records(), REFERENCE, is_judged=False)
    assert {row["verdict"] for row in rows} == {""} and rows[0]["arm"] == "jax_compiled"


def test_quantiles_are_the_same_for_every_layout():
    images = np.random.default_rng(0).standard_normal((2, 3, 20, 20))
    assert speed_worker.quantiles([images]) == speed_worker.quantiles([images.transpose(0, 2, 3, 1)])
    assert len(speed_worker.quantiles([images])) == speed_worker.NUM_QUANTILES and speed_worker.quantiles(
        [X[0]]
    ) == sorted(X[0])


def test_one_launch_gives_a_ratio_without_an_interval():
    rows, _ = speed.summary([each for each in records() if each.launch == 1], REFERENCE)
    assert rows[0]["ratio"] == [2.0, 0.0, None] and speed_report.ratio(rows[0]["ratio"]) == "2.00 (too few launches)"


def test_warm_up_ends_when_the_median_no_longer_falls():
    assert not speed_worker.is_settled([1.0] * 9)
    assert speed_worker.is_settled([1.0] * 10)
    assert not speed_worker.is_settled([2.0] * 5 + [1.0] * 5)
    assert speed_worker.is_settled([2.0] * 5 + [1.0] * 5 + [1.01] * 5)


@pytest.mark.parametrize(
    "settings", [{"dtypes": ("float8",)}, {"arms": ()}, {"launches": 0}, {"seconds": 0.0}, {"threads": 10_000}]
)
def test_wrong_settings_are_named(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        speed.checked(speed.Settings(**settings))


@pytest.mark.timeout(600)
def test_the_tour_blames_the_planted_bug_proves_the_mended_port_and_times_it(tmp_path):
    line = [sys.executable, str(ROOT / "experiments" / "pairs" / "tour.py"), "--fast"]
    done = subprocess.run(line, cwd=tmp_path, env=shell_environment(), capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    blamed, proven, timed = (done.stdout.index(words) for words in (
        "likely: GELU of act: tanh form", "the same function: 12 gates passed", "first two calls",
    ))  # fmt: skip
    assert blamed < proven < timed
    for part in ("forward ", "forward + backward", "step "):
        assert sum(part in each and "float32" in each for each in done.stdout.splitlines()) >= 4  # two arms, two tables
    assert "left out" not in done.stdout and "computes something else" not in done.stdout
    assert os.listdir(tmp_path) == []
