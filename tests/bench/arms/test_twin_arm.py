"""The run's step as an arm: both backends' engines take the same step, and nothing of a run but its step."""

import numpy as np
import pytest

from jaxbench import initial
from jaxbench.bench import plan
from jaxbench.bench.arms import arm_table
from jaxbench.measure.records import Workload
from jaxbench.pretrained import weights

LOAD = Workload(kind="train", dtype="float32", batch=2, prompt_tokens=8)
TRAIN = {"form": "run", "learning_rate": 1e-2, "batch": 2, "seq_len": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    weights.save_checkpoint(path, plan.TINY, initial.initial_params(plan.TINY, seed=0, distinct=True))
    return str(path)


def losses(name, folder, steps=3, **train):
    arm = arm_table.create(name, device="cpu", threads=2, checkpoint=folder)
    assert arm.start() == ""
    arm.load(LOAD.dtype, num_layers=1, train=TRAIN | train)
    facts = arm.prepare(LOAD)
    inputs = np.random.default_rng(0).integers(0, 128, (2, 9)).tolist()
    answers = [arm.warm(LOAD, inputs)] + [arm.measure(LOAD, inputs) for _ in range(steps - 1)]
    arm.unload()
    assert all(answer["step_s"] > 0 for answer in answers)
    return facts, [answer["loss"] for answer in answers]


def test_flax_and_torch_take_the_same_steps_and_say_what_compiled(folder):
    facts, ours = losses("flax", folder)
    eager_facts, theirs = losses("torch_eager", folder)
    assert ours == pytest.approx(theirs, rel=1e-5) and ours[-1] < ours[0] - 0.05
    assert facts["compile_s"] > 0 and "compile_s" not in eager_facts
    assert facts["device_kind"] == eager_facts["device_kind"] == "cpu"


def test_micro_batches_and_another_attention_kernel_compute_the_same_step(folder):
    _, whole = losses("torch_eager", folder, steps=2)
    _, parts = losses("torch_eager", folder, steps=2, accumulation=2, implementation="fused")
    assert parts == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", ["flax", "equinox", "transformers"])
def test_arms_give_the_same_float32_logits_of_a_context(name, folder):
    found = []
    for each in (name, "torch_eager"):
        arm = arm_table.create(each, device="cpu", threads=2, checkpoint=folder)
        assert arm.start() == ""
        arm.load("float32", num_layers=None, train=None)
        found.append(arm.logits([5, 1, 99, 7]))
        assert found[-1].shape == (plan.TINY.vocab_size,)
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-5)
