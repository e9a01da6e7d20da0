"""The pipeline: its timetable, what moves between stages, and that memory does not grow with the micro-batches."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxbench import initial, parameters, remat, train, transformer
from jaxbench.attention import Spans
from jaxbench.measure import hlo
from jaxbench.parallel import mesh_plan, pipeline
from jaxbench.parallel.pipeline_schedule import timetable, timing
from jaxbench.parity import meshes
from jaxbench.training import optimizer_step
from jaxbench.training.step_config import RematConfig

pytestmark = pytest.mark.usefixtures("plain_codegen")

LLAMA = meshes.LLAMA
SIZES = [(stages, stages * rounds) for stages in (1, 2, 4) for rounds in (1, 2, 4)]
FIELDS = 5  # arrays of integers in a batch: tokens, targets, positions, mask, segments


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_stage_does_each_forward_and_backward_once_and_in_order(schedule, stages, micro_batches):
    work = list(timetable(schedule, stages, micro_batches))
    done = {(one.kind, one.stage, one.micro_batch): one.tick for one in work}
    assert len(done) == len(work) == micro_batches * (2 * stages - 1)
    for micro in range(micro_batches):
        for stage in range(stages):
            if stage < stages - 1:  # the last stage's forward is part of its backward
                assert done["forward", stage, micro] < done["backward", stage, micro]
                # What a stage sends arrives for the next tick, and is used then: nothing else keeps it.
                assert done["backward", stage, micro] == done["backward", stage + 1, micro] + 1
            if 0 < stage < stages - 1:
                assert done["forward", stage, micro] == done["forward", stage - 1, micro] + 1
    if stages > 1 and schedule == "1f1b":
        assert done["backward", stages - 1, 0] == done["forward", stages - 2, 0] + 1


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_no_more_micro_batches_are_under_way_than_a_stage_keeps(schedule, stages, micro_batches):
    offset, slots = timing(schedule, stages, micro_batches)
    most = 0
    for stage in range(stages):
        for tick in range(offset + micro_batches):
            arrived = {m for m in range(micro_batches) if m + stage <= tick <= offset - stage + m}
            assert len({m % slots for m in arrived}) == len(arrived), "two micro-batches share a slot"
            most = max(most, len(arrived))
    bound = 2 * stages - 1 if schedule == "1f1b" else micro_batches
    assert most <= bound and slots == bound


def test_one_forward_one_backward_takes_no_more_ticks_of_work_than_gpipe():
    spans = {}
    for schedule in ("gpipe", "1f1b"):
        ticks = collections.defaultdict(set)
        for one in timetable(schedule, 4, 8):
            ticks[one.tick].add(one.kind)
        # A tick lasts as long as its slowest stage; a backward is worth two forwards.
        spans[schedule] = sum({"forward": 1, "backward": 2}[kind] for kinds in ticks.values() for kind in kinds)
    assert spans["1f1b"] <= spans["gpipe"] == 10 + 22


@functools.cache
def compiled_gradient(schedule: str, micro_batches: int, policy: str = "none"):
    """Return the compiled gradient program of a 4-stage pipeline with two rows a micro-batch."""
    batch = 2 * micro_batches
    settings = {"stage": 4, "micro_batches": micro_batches, "schedule": schedule}
    how = meshes.form("here", **settings).parallel
    plan = mesh_plan.make_plan(LLAMA, how, batch=batch, tokens=8, devices=jax.devices()[:4])
    params = initial.initial_params(LLAMA, 0)
    settings = meshes.STEP.model_copy(update={"remat": RematConfig(policy=policy)})
    fresh = jax.eval_shape(lambda: optimizer_step.init_state(transformer.build(LLAMA, params), params, settings))
    ids, mask = jax.ShapeDtypeStruct((batch, 8), jnp.int32), jax.ShapeDtypeStruct((batch, 8), jnp.bool_)

    placed = mesh_plan.state_shardings(plan, fresh)

    def run(state, batch):
        loss = mesh_plan.loss_on(plan)
        return jax.grad(lambda params: loss(parameters.merge(state.graph, params), batch))(state.params)

    jitted = jax.jit(run, in_shardings=(placed, plan.batch), out_shardings=placed.params)
    return jitted.lower(fresh, train.Batch(ids, ids, ids, mask, ids)).compile(compiler_options=meshes.FAST_COMPILE)


def test_memory_of_1f1b_does_not_grow_with_the_micro_batches_and_of_gpipe_does():
    temp = {
        (schedule, count): compiled_gradient(schedule, count).memory_analysis().temp_size_in_bytes
        for schedule in ("gpipe", "1f1b")
        for count in (4, 16)
    }
    held = 2 * 8 * (4 * (FIELDS - 1) + 1)  # bytes of a micro-batch's integers, of which a stage streams a quarter
    kept = 4 * 2 * 8 * LLAMA.d_model  # bytes of a stage's input, float32
    assert temp["1f1b", 16] - temp["1f1b", 4] <= 2 * 12 * held // 4
    assert temp["gpipe", 16] - temp["gpipe", 4] >= 12 * (kept + held)


def test_a_pipeline_computes_its_blocks_as_often_as_the_step_says():
    flops = {policy: compiled_gradient("1f1b", 4, policy).cost_analysis()["flops"] for policy in ("none", "block")}
    # A stage's work as compiled: forward, forward again, backward; and the blocks again, less what no gradient needs.
    assert 1.1 * flops["none"] < flops["block"] < 1.25 * flops["none"]


@pytest.mark.parametrize(("settings", "inputs"), [({"policy": "block"}, 4), ({"policy": "group", "group": 3}, 2)])
def test_a_stage_with_rematerialised_blocks_keeps_the_input_of_each_group_alone(settings, inputs):
    rows, tokens = 3, 5
    params = initial.initial_params(LLAMA, 0)
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (rows, tokens))
    kept = {}
    for name, how in (("all", {"policy": "none"}), ("inputs", settings)):
        model = remat.apply(transformer.build(LLAMA, params), **how)
        one = pipeline.Pipeline(*[None] * len(pipeline.Pipeline._fields))._replace(
            layer=nnx.split(model.layers[0])[0],
            is_attention_split=False,
            remat_group=model.remat_group,
            remat_names=(),
            remat_offloads=False,
        )
        context = model.begin(jnp.zeros((rows, tokens), jnp.int32), Spans(positions, positions, None, None))[1]
        run = functools.partial(pipeline._run_blocks, one, context=context)
        layers = jax.eval_shape(lambda: pipeline._stacked(params)[0])
        pulled = jax.eval_shape(lambda *x, run=run: jax.vjp(run, *x)[1], layers, shape(rows, tokens, LLAMA.d_model))
        known = {x.shape for x in (*layers.values(), *jax.tree.leaves(context))}  # there anyway
        kept[name] = [x.shape for x in jax.tree.leaves(pulled) if x.shape not in known and x.size > 1]
    assert kept["inputs"] == [(rows, tokens, LLAMA.d_model)] * inputs
    assert len(kept["all"]) > 4 * LLAMA.num_layers


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"stage": 2, "sequence": 2, "micro_batches": 2, "sequence_attention": "gathered"}, 1e-5),
        ({"data": 4, "gradient_type": "float16"}, 2**-9),
    ],
)
def test_devices_without_targets_count_for_nothing_in_a_loss_of_ones_own(settings, bound):
    def own(logits, batch):  # 0 / 0 on a device without a target
        nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
        return jnp.sum(nll * batch.mask) / jnp.sum(batch.mask)

    how = meshes.form("here", **settings).parallel
    plan = mesh_plan.make_plan(LLAMA, how, batch=32, tokens=8, devices=jax.devices()[:4])
    batch, is_first = meshes.batch_of(0, LLAMA), (np.arange(32) < 8)[:, None] & (np.arange(8) < 3)
    batch = batch._replace(mask=batch.mask & is_first)  # in the first part of a row, on one device of those with rows
    graph, params = parameters.split(transformer.build(LLAMA, initial.initial_params(LLAMA, 0, distinct=True)))
    loss = mesh_plan.loss_on(plan, loss_of=own)
    found, grads = jax.jit(jax.value_and_grad(lambda p: loss(parameters.merge(graph, p), batch)))(params)
    alone = lambda p: own(train.predict(parameters.merge(graph, p), batch), batch)
    wanted, exact = jax.jit(jax.value_and_grad(alone))(params)
    assert float(found) == pytest.approx(float(wanted), rel=1e-6)
    for name, value in exact.items():
        assert np.linalg.norm(grads[name] - value) <= bound * np.linalg.norm(value), name


@pytest.mark.parametrize(("schedule", "ticks"), [("1f1b", 4 + 6), ("gpipe", 4 + 4 + 6)])
def test_activations_gradients_and_integers_move_once_a_tick_and_weights_once_a_step(schedule, ticks):
    found = hlo.collectives(compiled_gradient(schedule, 4).as_text(), 4)
    # Each tick: activations and integers to the next stage, a gradient and the stream of integers to the one before.
    assert found["collective-permute"].count == ticks * (1 + FIELDS + 1 + FIELDS)
    assert found["collective-permute"].unknown_loops == 0
    kernels = 7  # of a layer: one all-to-all brings their layers to each stage, one takes the gradients back
    assert found["all-to-all"].count == 2 * kernels
    assert found["all-gather"].count >= 1  # the embedding, for the first stage and the last


def test_micro_batches_are_stored_split_over_the_stages():
    how = meshes.form("here", stage=4, data=2, micro_batches=8).parallel
    plan = mesh_plan.make_plan(LLAMA, how, batch=32, tokens=8)
    tokens = mesh_plan.place_batch(plan, meshes.batch_of(0, LLAMA)).tokens
    assert tokens.sharding.shard_shape(tokens.shape) == (4, 8)
    assert len({str(shard.index) for shard in tokens.addressable_shards}) == 8


@pytest.mark.parametrize("left_out", [("segments",), ("segments", "positions")])
def test_a_loss_without_gradient_and_a_batch_without_segments_or_positions_work_too(left_out):
    how = meshes.form("here", stage=2, data=1, micro_batches=4).parallel
    plan = mesh_plan.make_plan(LLAMA, how, batch=32, tokens=8, devices=jax.devices()[:2])
    batch = meshes.batch_of(0, LLAMA)._replace(**dict.fromkeys(left_out))
    model = transformer.build(LLAMA, initial.initial_params(LLAMA, 0, distinct=True))
    loss = mesh_plan.loss_on(plan)
    alone = float(jax.jit(lambda: train.loss_fn(model, batch))())
    assert float(jax.jit(lambda: loss(model, batch))()) == pytest.approx(alone, rel=1e-6)
    graph, params = parameters.split(model)
    found, grads = jax.jit(jax.value_and_grad(lambda p: 3.0 * loss(parameters.merge(graph, p), batch)))(params)
    _, wanted = jax.jit(jax.value_and_grad(lambda p: 3.0 * train.loss_fn(parameters.merge(graph, p), batch)))(params)
    assert float(found) == pytest.approx(3 * alone, rel=1e-6)
    for name, value in wanted.items():
        error = np.linalg.norm(grads[name] - value) / np.linalg.norm(value)
        assert error <= 1e-5, name
