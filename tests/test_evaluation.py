"""Evaluation over micro-batches and meshes: one device's sums, and no more memory at once than a step's part."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxbench import initial, train, transformer
from jaxbench.parallel import mesh_plan
from jaxbench.parity import meshes
from jaxbench.training import optimizer_step
from jaxbench.training.step_config import StepConfig
from torch_ref import train as torch_train
from torch_ref import transformer as torch_transformer
from torch_ref.training import optimizer_step as torch_update

FORMS = {
    "alone": {},
    "ring": {"sequence": 4, "data": 2},
    "parameters split": {"fsdp": 2, "zero": 3, "model": 2},
    "1f1b": {"stage": 2, "micro_batches": 4, "schedule": "1f1b"},
    "float16 sums": {"data": 2, "gradient_type": "float16"},
}


@functools.cache
def program(form: str, accumulation: int, rows: int = meshes.BATCH):
    """Return a form's compiled evaluation, its parameters, and where a batch lies; float64."""
    config = meshes.LLAMA
    settings = StepConfig(precision="float64", accumulation=accumulation)
    params = initial.initial_params(config, 0, distinct=True)
    state = optimizer_step.init_state(transformer.build(config, params, dtype="float64"), params, settings)
    evaluate, place = (
        functools.partial(optimizer_step.eval_step, graph=state.graph, step_config=settings),
        lambda batch: batch,
    )
    if form == "alone":
        jitted = jax.jit(evaluate)
    else:
        one = meshes.form("here", **FORMS[form])
        sizes = {"batch": rows // accumulation, "tokens": meshes.TOKENS}
        plan = mesh_plan.make_plan(config, one.parallel, **sizes, devices=jax.devices()[: one.num_devices])
        state, place = mesh_plan.place_state(plan, state), functools.partial(mesh_plan.place_batch, plan)
        jitted = mesh_plan.make_evaluation(
            plan, evaluate, loss_fn=optimizer_step.held_out_loss, accumulation=accumulation
        )
    lowered = jitted.lower(state.params, place(batch_of(rows)))
    return lowered.compile(compiler_options=meshes.FAST_COMPILE), state.params, place


def batch_of(rows: int) -> train.Batch:
    """Return a packed batch, one of whose micro-batches counts no target."""
    repeats = rows // meshes.BATCH
    batch = jax.tree.map(lambda x: np.tile(x, (repeats, 1)), meshes.batch_of(0, meshes.LLAMA))
    mask = batch.mask.copy()
    mask[1::4] = False
    return batch._replace(mask=mask)


@pytest.mark.parametrize(("form", "accumulation"), [(form, 4 if form == "alone" else 2) for form in FORMS])
def test_every_form_sums_what_one_device_sums_at_once(x64, form, accumulation):
    evaluate, params, place = program(form, accumulation)
    total, count = evaluate(params, place(batch_of(meshes.BATCH)))
    whole, params, _ = program("alone", 1)
    wanted, targets = whole(params, batch_of(meshes.BATCH))
    assert int(count) == int(targets) == int(batch_of(meshes.BATCH).mask.sum())
    assert abs(float(total) - float(wanted)) <= 1e-12 * float(wanted)
    model = transformer.build(meshes.LLAMA, jax.tree.map(np.asarray, params), dtype="float64")
    batch = jax.tree.map(jnp.asarray, batch_of(meshes.BATCH))
    assert float(wanted) == pytest.approx(float(train.loss_fn(model, batch)) * int(targets), rel=1e-12)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_twin_sums_the_same(x64, accumulation):
    evaluate, params, _ = program("alone", accumulation)
    wanted, targets = evaluate(params, batch_of(meshes.BATCH))
    named = jax.tree.map(np.asarray, params)
    model = torch_transformer.build(meshes.LLAMA, named, dtype="float64")
    batch = torch_train.Batch(*map(torch.tensor, batch_of(meshes.BATCH)))
    settings = StepConfig(precision="float64", accumulation=accumulation)
    total, count = torch_update.eval_step(model, batch, graph=None, step_config=settings)
    assert int(count) == int(targets) and float(total) == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize("form", ["alone", "1f1b"])
def test_memory_follows_the_micro_batch_not_the_batch(x64, form):
    """One micro-batch's activations; only the integers of the batch and their reordered copy grow with it."""
    small, large = (
        program(form, accumulation, rows)[0].memory_analysis().temp_size_in_bytes
        for accumulation, rows in ((2, meshes.BATCH), (8, 4 * meshes.BATCH))
    )
    integers = 3 * meshes.BATCH * meshes.TOKENS * (4 * 4 + 1)
    assert large - small <= 2 * integers
    logits = 8 * meshes.BATCH * meshes.TOKENS * meshes.LLAMA.vocab_size
    assert 3 * logits > 10 * integers, "a batch evaluated at once would show"


def test_the_ring_is_used_where_the_step_uses_it(x64):
    assert "collective-permute" in program("ring", 2)[0].as_text()
    assert "collective-permute" not in program("float16 sums", 2)[0].as_text()
