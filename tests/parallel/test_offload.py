"""Pinned host memory: the same numbers, where the arrays lie, and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbench import mesh, sharding, train, transformer
from jaxbench.parallel import mesh_plan, offload
from jaxbench.parity import cases
from jaxbench.training import optimizer_step
from jaxbench.training.step_config import OffloadConfig, RematConfig, StepConfig
from torch_ref import transformer as torch_transformer
from torch_ref.training import optimizer_step as torch_update

CASE = cases.find("transformer/llama-multi-query")
ALL = OffloadConfig(optimizer=True, gradients=True)
IN_HOST = StepConfig(offload=ALL, remat=RematConfig(policy="offload", names=("input", "mlp")))


def host_kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def test_offloaded_steps_are_those_of_device_memory_and_the_moments_stay_in_the_host():
    config, params = cases.load(CASE)
    batch = train.Batch(*(None if x is None else jnp.asarray(x) for x in cases.arrays(CASE, config)))
    found = []
    for how in (StepConfig(), IN_HOST):
        state = optimizer_step.init_state(transformer.build(config, params), params, how)
        step = jax.jit(functools.partial(optimizer_step.train_step, step_config=how), donate_argnums=0)
        for _ in range(3):
            state, metrics = step(state, batch, jnp.float32(1e-2))
        found.append((float(metrics.loss), optimizer_step.state_arrays(state)))
    assert host_kinds(state.moments) == {sharding.PINNED_HOST} and sharding.PINNED_HOST not in host_kinds(state.params)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for part, values in found[0][1].items():
        for name, value in values.items():
            np.testing.assert_allclose(found[1][1][part][name], value, rtol=1e-5, atol=1e-7)


def test_a_mesh_keeps_moments_in_the_host():
    config, params = cases.load(CASE)
    state = optimizer_step.init_state(transformer.build(config, params), params, IN_HOST)
    how = mesh.ParallelConfig(mesh=mesh.MeshConfig(data=1, fsdp=2), zero=2)
    plan = mesh_plan.make_plan(config, how, batch=2, tokens=16, devices=jax.devices()[:2])
    placed = mesh_plan.place_state(plan, state)
    assert host_kinds(placed.moments) == {sharding.PINNED_HOST} and sharding.PINNED_HOST not in host_kinds(
        placed.params
    )
    split = [leaf for leaf in jax.tree.leaves(placed.moments) if not leaf.is_fully_replicated]
    assert len(split) > 10


class Device:
    """A device without pinned memory."""

    device_kind = "abacus"

    def addressable_memories(self):
        return [type("Memory", (), {"kind": "beads"})]


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (StepConfig(offload=OffloadConfig(optimizer=True)), "optimizer need memory"),
        (StepConfig(remat=RematConfig(policy="offload")), "remat need memory"),
    ],
)
def test_a_device_without_pinned_memory_is_refused(how, named):
    with pytest.raises(ValueError, match=f"offload: {named} of kind pinned_host, but abacus has beads"):
        offload.check(how.on_host(), Device())
    offload.check(StepConfig().on_host(), Device())


def test_the_twin_refuses_offload():
    config, params = cases.load(CASE)
    with pytest.raises(ValueError, match="offload .*is not in torch_ref"):
        torch_update.init_state(torch_transformer.build(config, params), params, StepConfig(offload=ALL))
