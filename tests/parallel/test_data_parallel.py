"""Gradients added up in 16 bits: half the bytes, errors of a rounding, nothing lost at either end of the range."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxbench import functional, initial, sharding, train, transformer
from jaxbench.lora import config as lora
from jaxbench.lora import layers
from jaxbench.measure import hlo
from jaxbench.mesh import ParallelConfig
from jaxbench.parallel import data_parallel, mesh_plan
from jaxbench.parity import memory_meshes, meshes

LLAMA = meshes.LLAMA
SHAPES = initial.parameter_shapes(LLAMA)
NUM_PARAMETERS = sum(int(np.prod(shape)) for shape in SHAPES.values())


def case(**settings) -> meshes.Case:
    return meshes.form("16-bit", **settings)


@functools.cache
def compiled(gradient_type: str, **settings):
    """Return the compiled step and what it needs, in float32."""
    one = case(gradient_type=gradient_type, **settings)
    devices = jax.devices()[: one.num_devices]
    how = {"batch": meshes.BATCH, "tokens": meshes.TOKENS, "devices": devices}
    plan = mesh_plan.make_plan(LLAMA, one.parallel, **how)
    state = mesh_plan.place_state(plan, meshes.initial_state(LLAMA, "float32"))
    lowered = mesh_plan.make_step(plan, state, step=meshes.train_step).lower(
        state, mesh_plan.place_batch(plan, meshes.batch_of(0, LLAMA)), {}
    )
    return lowered.compile(compiler_options=meshes.FAST_COMPILE), plan, state


def moved(gradient_type: str, kind: str, **settings) -> hlo.Collective:
    """Return a step's collectives of one kind."""
    step, plan, _ = compiled(gradient_type, **settings)
    return hlo.collectives(step.as_text(), plan.mesh.size)[kind]


def test_float16_halves_the_bytes_of_the_gradients():
    full, half = (moved(kind, "all-reduce", data=4, zero=0) for kind in ("full", "float16"))
    # jit's partitioner adds up the gradients of a tied embedding's two uses one by one.
    others = full.result_bytes - 4 * (NUM_PARAMETERS + LLAMA.vocab_size * LLAMA.d_model)
    assert 0 < others <= 16 and full.unknown_loops == 0  # loss and number of targets
    units = 4 * len(SHAPES)  # the largest magnitude of each tensor
    assert 0 < half.result_bytes - 2 * NUM_PARAMETERS - units <= 16 and half.unknown_loops == 0


def test_scattered_gradients_travel_in_16_bits_too():
    scattered = moved("float16", "reduce-scatter", fsdp=4, zero=2)
    _, plan, _ = compiled("float16", fsdp=4, zero=2)
    parts = {name: np.prod(plan.gradients[name].shard_shape(shape)) for name, shape in SHAPES.items()}
    assert scattered.result_bytes == 2 * sum(part for name, part in parts.items() if part < np.prod(SHAPES[name]))


@pytest.mark.parametrize(
    ("gradient_type", "settings", "bound"),
    [
        ("float16", {"data": 4, "zero": 0}, 2**-9),
        ("float16", {"data": 2, "fsdp": 2, "zero": 3}, 2**-9),
        ("bfloat16", {"data": 4, "zero": 0}, 2**-7),
        ("float16", {"fsdp": 4, "zero": 2}, 2**-9),
        ("float16", {"stage": 2, "data": 2, "micro_batches": 2}, 2**-9),
    ],
)
def test_gradients_are_those_of_one_device_up_to_a_rounding(gradient_type, settings, bound):
    step, plan, state = compiled(gradient_type, **settings)
    found = meshes._train(
        state, lambda state, batch: step(state, mesh_plan.place_batch(plan, batch), {}), LLAMA
    )["gradients"]  # fmt: skip
    wanted = meshes.run_unsharded(LLAMA, "float32")["gradients"]
    errors = {
        name: np.linalg.norm(found[name] - value) / np.linalg.norm(value)
        for name, value in wanted.items()
        if name.startswith("step 0")
    }
    worst = max(errors, key=errors.get)
    assert 1e-6 < errors[worst] <= bound, worst


def summed(values: np.ndarray, gradient_type: str) -> np.ndarray:
    """Return the sum over 4 devices of values [4 N], each with its row."""
    mesh = sharding.make_mesh({"data": 4}, jax.devices()[:4])
    how = {"spec": P(), "axes": ("data",), "gradient_type": gradient_type}
    add = jax.shard_map(
        lambda x: data_parallel.reduced(x[0], **how), mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False
    )
    return np.asarray(jax.jit(add)(jnp.asarray(values)))


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize(("gradient_type", "bound"), [("float16", 2**-10), ("bfloat16", 2**-7), ("full", 1e-6)])
def test_neither_large_nor_small_gradients_are_lost(gradient_type, bound, size):
    values = (size * np.random.default_rng(0).normal(size=(4, 50))).astype(np.float32)
    wanted = values.astype(np.float64).sum(axis=0)
    error = np.linalg.norm(summed(values, gradient_type) - wanted) / np.linalg.norm(wanted)
    assert error <= bound


@pytest.mark.parametrize("gradient_type", ["float16", "bfloat16"])
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(gradient_type):
    values = np.zeros((4, 3), np.float32)
    np.testing.assert_array_equal(summed(values, gradient_type), 0.0)
    for bad in (np.inf, np.nan):
        values[2, 1] = bad
        assert not np.isfinite(summed(values, gradient_type)[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": 2, "data": 4}, "gradient_type=float16 goes with data and fsdp.* not with {'model': 2}"),
        ({"sequence": 2, "data": 4}, "not with {'sequence': 2}"),
    ],
)
def test_where_gradients_cannot_be_added_up_by_hand_is_said(settings, message):
    how = {"batch": meshes.BATCH, "tokens": meshes.TOKENS}
    with pytest.raises(ValueError, match=message):
        mesh_plan.make_plan(LLAMA, case(gradient_type="float16", **settings).parallel, **how)
    with pytest.raises(ValueError, match="dropout=0.1 is not supported with gradient_type=float16"):
        model = LLAMA.model_copy(update={"dropout": 0.1})
        mesh_plan.make_plan(model, case(gradient_type="float16", data=8).parallel, **how)
    with pytest.raises(ValueError, match="gradient_type"):
        ParallelConfig(gradient_type="int8")


ADAPTED = lora.with_lora(LLAMA, lora.LoraConfig(dropout=0.5))
BANK = next(one for one in memory_meshes.FORMS if one.id == "bank")


@pytest.mark.parametrize(
    ("config", "extension", "dropout", "message"),
    [
        (
            ADAPTED,
            layers.extension(ADAPTED.lora),
            functional.DropoutStream(np.zeros(2, np.uint32), 0),
            "or that of adapters.* is not supported",
        ),
        (BANK.model, BANK.extension, None, "gradient_type=float16 adds up means over targets, and layers' own loss"),
    ],
    ids=["adapters' dropout", "a bank's loss"],
)
def test_what_a_device_cannot_compute_from_its_rows_alone_is_refused(config, extension, dropout, message):
    model = transformer.build(config, initial.initial_params(config, 0), make_layer=extension.make_layer)
    how = {"batch": meshes.BATCH, "tokens": meshes.TOKENS, "devices": jax.devices()[:2], "extension": extension}
    plan = mesh_plan.make_plan(config, case(gradient_type="float16", data=2).parallel, **how)
    batch = jax.tree.map(jnp.asarray, meshes.batch_of(0, config))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: mesh_plan.loss_on(plan)(model, batch, dropout=dropout))
    whole = mesh_plan.loss_on(mesh_plan.make_plan(config, case(data=2).parallel, **how))  # in full it goes
    assert jax.eval_shape(lambda: whole(model, batch)) == jax.eval_shape(lambda: train.loss_fn(model, batch))
