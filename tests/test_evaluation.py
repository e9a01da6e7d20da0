"""Evaluation over micro-batches and meshes: one device's sums, and no more memory at once than a step's part."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxbench import initial, parallel, parallel_proof, train, transformer, update
from jaxbench.step_config import StepConfig
from torch_ref import train as torch_train
from torch_ref import transformer as torch_transformer
from torch_ref import update as torch_update

FORMS = {
    "alone": {},
    "ring": {"sequence": 4, "data": 2},
    "parameters split": {"fsdp": 2, "zero": 3, "model": 2},
    "1f1b": {"stage": 2, "micro_batches": 4, "schedule": "1f1b"},
    "float16 sums": {"data": 2, "gradient_type": "float16"},
}


@functools.cache
def program(form: str, accumulation: int, rows: int = parallel_proof.BATCH):
    """Return a form's compiled evaluation, its parameters, and where a batch lies; float64."""
    config = parallel_proof.LLAMA
    settings = StepConfig(precision="float64", accumulation=accumulation)
    params = initial.initial_params(config, 0, distinct=True)
    state = update.init_state(transformer.build(config, params, dtype="float64"), params, settings)
    evaluate, place = functools.partial(update.eval_step, graph=state.graph, step_config=settings), lambda batch: batch
    if form == "alone":
        jitted = jax.jit(evaluate)
    else:
        one = parallel_proof.form("here", **FORMS[form])
        sizes = {"batch": rows // accumulation, "tokens": parallel_proof.TOKENS}
        plan = parallel.make_plan(config, one.parallel, **sizes, devices=jax.devices()[: one.num_devices])
        state, place = parallel.place_state(plan, state), functools.partial(parallel.place_batch, plan)
        jitted = parallel.make_evaluation(plan, evaluate, loss_fn=update.held_out_loss, accumulation=accumulation)
    lowered = jitted.lower(state.params, place(batch_of(rows)))
    return lowered.compile(compiler_options=parallel_proof.FAST_COMPILE), state.params, place


def batch_of(rows: int) -> train.Batch:
    """Return a packed batch, one of whose micro-batches counts no target."""
    repeats = rows // parallel_proof.BATCH
    batch = jax.tree.map(lambda x: np.tile(x, (repeats, 1)), parallel_proof.batch_of(0, parallel_proof.LLAMA))
    mask = batch.mask.copy()
    mask[1::4] = False
    return batch._replace(mask=mask)


@pytest.mark.parametrize(("form", "accumulation"), [(form, 4 if form == "alone" else 2) for form in FORMS])
def test_every_form_sums_what_one_device_sums_at_once(x64, form, accumulation):
    evaluate, params, place = program(form, accumulation)
    total, count = evaluate(params, place(batch_of(parallel_proof.BATCH)))
    whole, params, _ = program("alone", 1)
    wanted, targets = whole(params, batch_of(parallel_proof.BATCH))
    assert int(count) == int(targets) == int(batch_of(parallel_proof.BATCH).mask.sum())
    assert abs(float(total) - float(wanted)) <= 1e-12 * float(wanted)
    model = transformer.build(parallel_proof.LLAMA, jax.tree.map(np.asarray, params), dtype="float64")
    batch = jax.tree.map(jnp.asarray, batch_of(parallel_proof.BATCH))
    assert float(wanted) == pytest.approx(float(train.loss_fn(model, batch)) * int(targets), rel=1e-12)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_twin_sums_the_same(x64, accumulation):
    evaluate, params, _ = program("alone", accumulation)
    wanted, targets = evaluate(params, batch_of(parallel_proof.BATCH))
    named = jax.tree.map(np.asarray, params)
    model = torch_transformer.build(parallel_proof.LLAMA, named, dtype="float64")
    batch = torch_train.Batch(*map(torch.tensor, batch_of(parallel_proof.BATCH)))
    settings = StepConfig(precision="float64", accumulation=accumulation)
    total, count = torch_update.eval_step(model, batch, graph=None, step_config=settings)
    assert int(count) == int(targets) and float(total) == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize("form", ["alone", "1f1b"])
def test_memory_follows_the_micro_batch_not_the_batch(x64, form):
    """One micro-batch's activations; only the integers of the batch and their reordered copy grow with it."""
    small, large = (
        program(form, accumulation, rows)[0].memory_analysis().temp_size_in_bytes
        for accumulation, rows in ((2, parallel_proof.BATCH), (8, 4 * parallel_proof.BATCH))
    )
    integers = 3 * parallel_proof.BATCH * parallel_proof.TOKENS * (4 * 4 + 1)
    assert large - small <= 2 * integers
    logits = 8 * parallel_proof.BATCH * parallel_proof.TOKENS * parallel_proof.LLAMA.vocab_size
    assert 3 * logits > 10 * integers, "a batch evaluated at once would show"


def test_the_ring_is_used_where_the_step_uses_it(x64):
    assert "collective-permute" in program("ring", 2)[0].as_text()
    assert "collective-permute" not in program("float16 sums", 2)[0].as_text()
