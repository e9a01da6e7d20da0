"""Loss scaling over meshes: losses whose gradients are computed by hand scale, skip and step as one device does."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbench import initial, train, transformer
from jaxbench.parallel import mesh_plan
from jaxbench.parity import meshes
from jaxbench.training import optimizer_step
from jaxbench.training.precision import LossScaling
from jaxbench.training.step_config import OptimizerConfig, StepConfig

LLAMA = meshes.LLAMA
SGD = OptimizerConfig(kind="sgd", momentum=0.0, weight_decay=0.0)
STEPS = 4
RATE, TOO_LARGE = 2.0**20, 2.0**50
FORMS = {
    "float16 sums": {"gradient_type": "float16", "data": 2, "zero": 0},
    "bfloat16 sums, parameters split": {"gradient_type": "bfloat16", "fsdp": 2, "zero": 3},
    "1f1b": {"stage": 2, "micro_batches": 4, "schedule": "1f1b"},
    "gpipe, split over model": {"stage": 2, "model": 2, "micro_batches": 2, "schedule": "gpipe"},
}


def small(logits, batch):
    """Return a loss whose gradients are below float16's smallest number; a pipeline once descended its own instead."""
    return train.loss_of(logits, batch) * 2.0**-20


def settings_of(accumulation: int) -> StepConfig:
    scaling = LossScaling(interval=2, backoff=2.0**-8)
    return StepConfig(
        precision="float16", optimizer=SGD, clip_norm=None, nonfinite="skip", loss_scaling=scaling,
        accumulation=accumulation,
    )  # fmt: skip


@functools.cache
def program(form: str, accumulation: int):
    """Return the compiled step of a form ("alone": one device), its first state, and where a batch lies."""
    settings = settings_of(accumulation)
    params = initial.initial_params(LLAMA, 0, distinct=True)
    state = optimizer_step.init_state(transformer.build(LLAMA, params, dtype="float16"), params, settings)
    step, place = functools.partial(optimizer_step.train_step, step_config=settings), lambda batch: batch
    if form == "alone":
        loss_fn = lambda model, batch, dropout: small(train.predict(model, batch, dropout=dropout), batch)
        jitted = jax.jit(lambda state, batch, extras: step(state, batch, loss_fn=loss_fn, **extras))
    else:
        one = meshes.form("here", **FORMS[form])
        sizes = {"batch": meshes.BATCH // accumulation, "tokens": meshes.TOKENS}
        plan = mesh_plan.make_plan(LLAMA, one.parallel, **sizes, devices=jax.devices()[: one.num_devices])
        state = mesh_plan.place_state(plan, state)
        jitted = mesh_plan.make_step(plan, state, step=step, loss_of=small)
        place = functools.partial(mesh_plan.place_batch, plan)
    lowered = jitted.lower(state, place(meshes.batch_of(0, LLAMA)), {"learning_rate": jnp.float32(RATE)})
    return lowered.compile(compiler_options=meshes.FAST_COMPILE), state, place


@functools.cache
def trained(form: str, initial: float, accumulation: int = 1):
    """Return the parameters before and after each step, and what each step measured."""
    step, state, place = program(form, accumulation)
    state = jax.tree.map(jnp.copy, state)  # the step uses it up
    state = dataclasses.replace(state, scale=jax.device_put(np.float32(initial), state.scale.sharding))
    seen, metrics = [optimizer_step.state_arrays(state)["params"]], []
    for number in range(STEPS):
        batch = place(meshes.batch_of(number, LLAMA))
        state, found = step(state, batch, {"learning_rate": jnp.float32(RATE)})
        seen.append(optimizer_step.state_arrays(state)["params"])
        metrics.append(optimizer_step.Metrics(*(np.asarray(value).item() for value in found)))
    return seen, metrics


@pytest.mark.parametrize(
    ("form", "initial", "accumulation"),
    [(form, initial, 1) for form in FORMS for initial in (65536.0, TOO_LARGE)] + [("float16 sums", 65536.0, 2)],
)
def test_a_form_skips_scales_and_steps_as_one_device(form, initial, accumulation):
    (seen, metrics), (wanted, expected) = (trained(each, initial, accumulation) for each in (form, "alone"))
    for mine, other in zip(metrics, expected):
        assert (mine.is_finite, mine.loss_scale, mine.skipped) == (other.is_finite, other.loss_scale, other.skipped)
        assert mine.loss == pytest.approx(other.loss, rel=2e-3)
        if other.is_finite:
            assert mine.grad_norm == pytest.approx(other.grad_norm, rel=5e-3) and other.grad_norm > 0
    # Gradients in float16 carry 11 bits, and each of the sums rounds once more.
    first = next(k for k, step in enumerate(expected) if step.is_finite)
    for name in wanted[0]:
        moved, other = (p[first + 1][name] - p[first][name] for p in (seen, wanted))
        assert np.linalg.norm(moved - other) <= 2e-2 * np.linalg.norm(other) and np.any(other), name


def test_the_cases_show_what_they_are_about():
    finite = [step.is_finite for step in trained("alone", 65536.0)[1]]
    assert finite == [True] * STEPS
    assert trained("alone", 65536.0)[1][0].grad_norm < 2 * np.finfo(np.float16).smallest_normal
    finite = [step.is_finite for step in trained("alone", TOO_LARGE)[1]]
    assert not finite[0] and finite[-1]


def test_a_pipeline_refuses_a_loss_of_the_model():
    one = meshes.form("here", stage=2, micro_batches=2)
    sizes = {"batch": meshes.BATCH, "tokens": meshes.TOKENS}
    plan = mesh_plan.make_plan(LLAMA, one.parallel, **sizes, devices=jax.devices()[:2])

    def distillation(model, batch, *, dropout=None):
        return jnp.zeros(())

    with pytest.raises(ValueError, match=r"loss_fn=distillation.*stage=2.*pipeline loss_of\(logits, batch\)"):
        mesh_plan.loss_on(plan, distillation)
