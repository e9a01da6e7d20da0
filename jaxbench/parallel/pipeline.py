"""Pipeline parallelism in plain SPMD over the mesh axis `stage`; for the timetable of a stage: pipeline_schedule.py.

Every device runs one program (shard_map): a scan over ticks in which stage s works on its micro-batches, then sends
activations to s + 1 and gradients to s - 1 (ppermute). lax.cond skips passes that a stage does not have in a tick. A
stage keeps the inputs of its micro-batches in flight and recomputes its forward pass in its backward pass; the last
stage does only that. With rematerialised blocks (step.remat), that backward pass holds the activations of one group of
blocks in place of the whole stage's, for one more forward pass.

The first stage embeds, the last one has the head and the loss. Micro-batches are stored split over the stages and
stream towards the first, one per tick; a micro-batch's integers travel on with its activations. Within a stage, `model`
splits heads and feed-forward width by hand (Shoeybi et al. 2019, arXiv:1909.08053, section 3: operators f and g), and
splits the last stage's tokens among its devices. `sequence` splits a row's tokens, and every layer gathers the row's
keys and values (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2). Parameters arrive unstacked; inside the
step, a view stacks them by layer, and one all-to-all sends the layers to their stages. Letters: M micro-batches, S
stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from jaxbench import attention, functional, narrow_products, parameters, remat, sharding, train
from jaxbench.attention import Context, Spans
from jaxbench.mesh import DATA, FSDP, MODEL, SEQUENCE, STAGE, ParallelConfig
from jaxbench.parallel.data_parallel import differentiated, dim_of, over_mesh, reduced, refuse_dropout, whole
from jaxbench.parallel.pipeline_schedule import timing
from jaxbench.parallel.step_plan import Plan

ENDS = ("embed", "position", "final_norm", "head")  # modules of the first and the last stage besides their layers
# Weights that every head uses: if heads are split over `model`, each device has a part of their gradient.
SHARED_BY_HEADS = ("attention.q_norm.scale", "attention.k_norm.scale")
Weights = tuple[dict[str, Array], dict[str, Array]]  # a stage's layers, stacked [L/S ..], and everything else

Hidden = Float[Array, "B T D"]  # activations of one micro-batch, or their gradient
Scalar = Float[Array, ""]


class Pipeline(NamedTuple):
    """Static description of a pipeline: modules, sizes, loss and schedule; equal on every device."""

    layer: nnx.GraphDef  # of one layer: all are alike
    ends: nnx.GraphDef  # of ENDS
    frequencies: tuple[float, ...] | None  # rotary; None with learned positions
    dtype: str  # of activations
    d_model: int
    loss_of: Callable[[Array, Any], Array]  # loss of (logits, batch): a mean over batch.mask
    config: ParallelConfig  # its micro-batches, schedule and gradient_type
    is_attention_split: bool  # over model
    num_stages: int
    num_model_devices: int  # which share a stage's layers
    num_sequence_devices: int  # which share a row's tokens
    remat_group: int  # blocks recomputed together in a stage's backward pass, 0 = none; see remat.py
    remat_names: tuple[str, ...]
    remat_offloads: bool


# One stage's work, on the local parts of everything


def _operator(value: Callable[[Hidden], Hidden], gradient: Callable[[Hidden], Hidden]) -> Callable[[Hidden], Hidden]:
    """Make a function with a custom gradient: its input's gradient depends on its output's gradient alone."""
    operator = jax.custom_vjp(value)
    operator.defvjp(lambda x: (value(x), None), lambda _, grad: (gradient(grad),))
    return operator


def _on_first(x: Hidden) -> Hidden:
    """Return the array on the first device of `model`, zeros on the others."""
    return jnp.where(lax.axis_index(MODEL) == 0, x, jnp.zeros_like(x))


_identity, _sum_over_model = lambda x: x, lambda x: lax.psum(x, MODEL)
_copied = _operator(_identity, _sum_over_model)  # Megatron's operator f
_summed = _operator(_sum_over_model, _identity)  # Megatron's operator g
_counted_once = _operator(_identity, _on_first)  # a later sum over `model` counts the gradient once


def _embedded(pipeline: Pipeline, ends: dict[str, Array], micro: train.Batch) -> Hidden:
    """Embeddings of a micro-batch's tokens plus learned positions: the input of the first stage."""
    model = _merged(pipeline.ends, ends)
    hidden = model.embed(micro.tokens)
    if model.position is not None:
        hidden = hidden + model.position(jnp.maximum(micro.positions, 0))
    return _counted_once(hidden)


def _loss_share(
    pipeline: Pipeline, ends: dict[str, Array], hidden: Hidden, micro: train.Batch, num_targets: Int[Array, ""]
) -> Scalar:
    """Sum of this device's token losses divided by the number of targets in the batch; in nats."""
    model = _merged(pipeline.ends, ends)
    hidden = _copied(model.final_norm(hidden))
    length = hidden.shape[1] // pipeline.num_model_devices
    start = lax.axis_index(MODEL) * length
    hidden, micro = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, length, axis=1), (hidden, micro))
    logits = model.embed.attend(hidden) if model.head is None else model.head(hidden)
    count = jnp.sum(micro.mask)
    # A mean over no targets would be 0 / 0: any finite loss does, its share is 0.
    loss = pipeline.loss_of(logits, micro._replace(mask=micro.mask | (count == 0)))
    return loss * (count.astype(loss.dtype) / num_targets.astype(loss.dtype))


def _run_stage(
    pipeline: Pipeline, weights: Weights, received: Hidden, micro: train.Batch, num_targets: Int[Array, ""]
) -> tuple[Hidden, Scalar]:
    """Run this stage's layers forward: its output activations, and its loss share (0 except in the last stage)."""
    layers, ends = weights
    stage, last = lax.axis_index(STAGE), pipeline.num_stages - 1
    hidden = lax.cond(stage == 0, lambda: _embedded(pipeline, ends, micro), lambda: received)
    angles = None
    if pipeline.frequencies is not None:
        angles = functional.rotary_angles(micro.positions, pipeline.frequencies, dtype=pipeline.dtype)
    keys = micro.positions, micro.segments
    if pipeline.num_sequence_devices > 1:
        keys = jax.tree.map(lambda x: lax.all_gather(x, SEQUENCE, axis=1, tiled=True), keys)
    context = Context(Spans(micro.positions, keys[0], micro.segments, keys[1]), angles, None, None)
    points: dict[str, Callable] = {}
    if pipeline.num_model_devices > 1:
        points |= {"mlp_in": _copied, "mlp_out": _summed}
    if pipeline.num_model_devices > 1 and pipeline.is_attention_split:
        points |= {"attention_in": _copied, "attention_out": _summed}
    with sharding.activations(points, attention=_attend_to_row if pipeline.num_sequence_devices > 1 else None):
        hidden = _run_blocks(pipeline, layers, hidden, context)
    loss_share = functools.partial(_loss_share, pipeline, ends, hidden, micro, num_targets)
    shape = jax.eval_shape(loss_share)
    return hidden, lax.cond(stage == last, loss_share, lambda: jnp.zeros(shape.shape, shape.dtype))


def _run_blocks(pipeline: Pipeline, layers: dict[str, Array], hidden: Hidden, context: Context) -> Hidden:
    """Residual stream after a stage's layers [L/S ..], recomputed in groups if blocks are rematerialised."""

    def run(layers: dict[str, Array], hidden: Hidden, indices: range) -> Hidden:
        for i in indices:
            layer = {name: value[i] for name, value in layers.items()}
            if pipeline.is_attention_split:
                layer |= {name: _copied(layer[name]) for name in SHARED_BY_HEADS if name in layer}
            block = _merged(pipeline.layer, layer)
            if pipeline.is_attention_split:
                block.attention.num_heads //= pipeline.num_model_devices
                block.attention.num_kv_heads //= pipeline.num_model_devices
            hidden, _ = block(hidden, context, (0, 0))
        return hidden

    count = next(iter(layers.values())).shape[0]
    if not pipeline.remat_group:
        return run(layers, hidden, range(count))
    for start in range(0, count, pipeline.remat_group):
        # The slices are taken inside, so that what a group keeps is the stack, which is there anyway, and its input.
        group = functools.partial(run, indices=range(start, min(start + pipeline.remat_group, count)))
        hidden = remat.checkpointed(group, pipeline.remat_names, offload=pipeline.remat_offloads)(layers, hidden)
    return hidden


def _attend_to_row(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K H S"],
    value: Float[Array, "B K S H"],
    spans: Spans,
    **settings: Any,
) -> Float[Array, "B T N H"]:
    """Attention output of this device's tokens over the whole row, whose keys and values are gathered.

    spans: positions and segments of this device's queries and of all keys.
    """
    key, value = (lax.all_gather(x, SEQUENCE, axis=axis, tiled=True) for x, axis in ((key, 3), (value, 2)))
    with sharding.activations({}):
        return attention.attention(query, key, value, spans, is_ordered=False, **settings)


# Schedules


def _shift(tree: Any, step: int, num_stages: int) -> Any:
    """Send every array to the next stage (step 1) or the previous one (step -1); the stage at the end gets zeros."""
    pairs = [(stage, stage + step) for stage in range(num_stages) if 0 <= stage + step < num_stages]
    if not pairs:
        return jax.tree.map(jnp.zeros_like, tree)
    return jax.tree.map(lambda x: lax.ppermute(x, STAGE, pairs), tree)


def _next_micro(pipeline: Pipeline, stream: train.Batch, arrived: train.Batch, tick: Array) -> tuple[train.Batch, Any]:
    """Micro-batch of this stage's forward pass, and the stream moved one place towards the first stage.

    The first stage takes the front of the stream [M/S B T]; the others take the one received with their activations.
    """
    slot = tick % (pipeline.config.micro_batches // pipeline.num_stages)
    front = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, keepdims=False), stream)
    is_first = lax.axis_index(STAGE) == 0
    micro = jax.tree.map(lambda a, b: jnp.where(is_first, a, b), front, arrived)
    moved = _shift(front, -1, pipeline.num_stages)
    return micro, jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, slot, 0), stream, moved)


class _Carry(NamedTuple):
    """State of one device between two ticks."""

    received: Hidden  # activations of the previous stage
    micro: train.Batch  # the micro-batch that they belong to
    output_grad: Hidden  # gradient of an earlier output of this stage, from the next stage
    stream: train.Batch  # [M/S B T] micro-batches on their way to the first stage
    stash: tuple[Array, train.Batch]  # inputs of the micro-batches in flight, by slot
    loss: Scalar  # share of the micro-batches done so far
    grads: Weights


def _run_schedule(
    pipeline: Pipeline, weights: Weights, stream: train.Batch, num_targets: Int[Array, ""], scale: Scalar
) -> tuple[Scalar, Weights]:
    """Loss share of this device, and the gradients of its weights times the loss scale: one scan over all ticks.

    In a tick, a stage runs one micro-batch forward and one backward, if the schedule has them.
    """
    stage = lax.axis_index(STAGE)
    micro_batches = pipeline.config.micro_batches
    offset, num_slots = timing(pipeline.config.schedule, pipeline.num_stages, micro_batches)
    run = functools.partial(_run_stage, pipeline, num_targets=num_targets)

    def run_tick(carry: _Carry, tick: Int[Array, ""]) -> tuple[_Carry, None]:
        micro, stream = _next_micro(pipeline, carry.stream, carry.micro, tick)
        forward, backward = tick - stage, tick - (offset - stage)  # which micro-batches: outside [0, M), none
        has_forward = (forward >= 0) & (forward < micro_batches)
        has_backward = (backward >= 0) & (backward < micro_batches)
        store = functools.partial(_stored, forward % num_slots, has_forward)
        stash = jax.tree.map(store, carry.stash, (carry.received, micro))
        output = lax.cond(
            has_forward & (stage != pipeline.num_stages - 1),  # the last stage's is part of its backward pass
            lambda: run(weights, carry.received, micro)[0],
            lambda: jnp.zeros_like(carry.received),
        )
        pull_back = functools.partial(_pull_back, run, weights, stash, backward % num_slots, carry.output_grad, scale)
        pass_on = lambda loss, grads: (jnp.zeros_like(carry.received), loss, grads)
        input_grad, loss, grads = lax.cond(has_backward, pull_back, pass_on, carry.loss, carry.grads)
        received, micro = _shift((output, micro), 1, pipeline.num_stages)
        return _Carry(received, micro, _shift(input_grad, -1, pipeline.num_stages), stream, stash, loss, grads), None

    micro = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), stream)
    nothing = (jnp.zeros((*micro.tokens.shape, pipeline.d_model), pipeline.dtype), micro)  # a stage's input
    stash = jax.tree.map(lambda x: jnp.zeros((num_slots, *x.shape), x.dtype), nothing)
    grads = jax.tree.map(lambda x: jnp.zeros(x.shape, narrow_products.wide_type(x.dtype)), weights)
    ticks = jnp.arange(offset + micro_batches, dtype=jnp.int32)
    start = _Carry(*nothing, nothing[0], stream, stash, jnp.zeros((), narrow_products.wide_type(pipeline.dtype)), grads)
    end, _ = lax.scan(run_tick, start, ticks)
    return end.loss, end.grads


def _pull_back(run: Callable, weights: Weights, stash: Any, slot: Array, output_grad: Hidden, scale: Scalar,
               loss: Scalar, grads: Weights) -> tuple[Hidden, Scalar, Weights]:  # fmt: skip
    """Run a stage backward: gradient of its input in a slot of the stash; loss and weight gradients accumulate."""
    received, micro = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, keepdims=False), stash)
    (_, share), vjp = jax.vjp(lambda weights, received: run(weights, received, micro), weights, received)
    weight_grads, input_grad = vjp((output_grad, scale.astype(share.dtype)))
    return input_grad, loss + share, jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, weight_grads)


def _stored(slot: Int[Array, ""], is_new: Bool[Array, ""], kept: Array, value: Array) -> Array:
    """Slots `kept` with the value stored in one of them if it is new, else unchanged."""
    old = lax.dynamic_index_in_dim(kept, slot, keepdims=False)
    return lax.dynamic_update_index_in_dim(kept, jnp.where(is_new, value, old), slot, 0)


def _merged(graph: nnx.GraphDef, named: Mapping[str, Array]) -> Any:
    """Build a graph's module with these parameters, by dotted name."""
    flat = [(tuple(int(k) if k.isdigit() else k for k in name.split(".")), nnx.Param(x)) for name, x in named.items()]
    return nnx.merge(graph, nnx.from_flat_state(flat))


# The whole step, seen from outside


def make_loss(
    plan: Plan, *, loss_fn: Callable[..., Array], loss_of: Callable[[Array, Any], Array], scale: Array | None
) -> Callable[..., Array]:
    """Make a pipeline's loss(model, batch, dropout=None), whose gradient the schedule computes.

    Args:
      plan: of a mesh with the axes stage, data, fsdp, sequence and model.
      loss_fn: the same loss without a pipeline, for a caller that takes no gradient.
      loss_of: loss of (logits, batch) in nats per token, a mean over the targets of batch.mask. A device calls it with
        its part of the rows and of their tokens, and with at least one target.
      scale: loss scale of the step, None = 1; see data_parallel.py.

    Decoders with dropout are refused when the plan is made (mesh_checks.py).

    Raises (the loss, when traced):
      ValueError: dropout is on.
    """

    def loss(model: Any, batch: train.Batch, *, dropout: functional.DropoutStream | None = None) -> Scalar:
        refuse_dropout(plan, dropout)
        if batch.positions is None:  # a micro-batch's integers travel with it
            index = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
            batch = batch._replace(positions=jnp.broadcast_to(index, batch.tokens.shape))
        layer, _ = nnx.split(model.layers[0])
        ends, _ = nnx.split(nnx.Dict({name: getattr(model, name) for name in ENDS}))
        sizes = plan.mesh.shape
        pipeline = Pipeline(
            layer, ends, model.frequencies, model.dtype, model.embed.embedding.shape[1], loss_of, plan.config,
            is_attention_split=plan.config.heads == "split", num_stages=sizes[STAGE], num_model_devices=sizes[MODEL],
            num_sequence_devices=sizes[SEQUENCE], remat_group=model.remat_group, remat_names=model.remat_names,
            remat_offloads=model.remat_offloads,
        )  # fmt: skip
        graph, params = parameters.split(model)
        run = functools.partial(_loss_and_gradients, pipeline, plan)
        plain = lambda params, batch: loss_fn(parameters.merge(graph, params), batch)
        return differentiated(run, plain)(params, batch, scale)

    return loss


def _loss_and_gradients(
    pipeline: Pipeline, plan: Plan, params: dict[str, Array], batch: train.Batch, scale: Scalar
) -> tuple[Scalar, dict[str, Array]]:
    """Run the schedule on the whole mesh: loss in nats per token, and gradients of loss * scale by dotted name."""
    layers, ends = _stacked(params)
    layer_specs, layer_gradients = (
        {n: P(None, *where[f"layers.0.{n}"].spec) for n in layers} for where in (plan.params, plan.gradients)
    )
    end_specs, end_gradients = ({name: where[name].spec for name in ends} for where in (plan.params, plan.gradients))

    def local(weights: Weights, batch: train.Batch, num_targets: Array, scale: Array) -> tuple[Array, Weights]:
        layers, ends = weights
        layers = {name: _of_stage(pipeline, value, layer_specs[name]) for name, value in layers.items()}
        ends = {name: whole(value, end_specs[name], (STAGE, FSDP, MODEL)) for name, value in ends.items()}
        each = plan.config.micro_batches // pipeline.num_stages
        stream = jax.tree.map(lambda x: x.reshape(each, x.shape[0] // each, *x.shape[1:]), batch)
        weights = (_with_biases_once(pipeline, layers), ends)
        loss, (layers, ends) = _run_schedule(pipeline, weights, stream, num_targets, scale)
        layers = {name: _to_owners(pipeline, grad, layer_gradients[name]) for name, grad in layers.items()}
        # Embedding and head are replicated over `model`, each device of which saw a part of the tokens.
        rows = (STAGE, DATA, FSDP, SEQUENCE)
        over = {name: rows if "norm" in name else (MODEL, *rows) for name in ends}
        ends = {
            name: reduced(grad, end_gradients[name], over[name], gradient_type=plan.config.gradient_type)
            for name, grad in ends.items()
        }
        return lax.psum(loss, (*rows, MODEL)), (layers, ends)

    run = over_mesh(plan, local, (layer_specs, end_specs), (layer_gradients, end_gradients))
    loss, (layers, ends) = run((layers, ends), batch, scale)
    split = {name: name.split(".", 2) for name in params if name not in ends}  # "layers", index, name within the layer
    grads = ends | {name: layers[inner][int(index)] for name, (_, index, inner) in split.items()}
    return loss, {name: grads[name].astype(value.dtype) for name, value in params.items()}


# Weights from where they are stored to the stage that computes with them, and gradients back


def _of_stage(pipeline: Pipeline, value: Float[Array, "layers ..."], spec: P) -> Float[Array, "own_layers ..."]:
    """This stage's layers of a stacked parameter that is sharded by `spec`."""
    value, dim = whole(value, spec, (FSDP,)), dim_of(spec, STAGE)
    if dim is not None:
        return lax.all_to_all(value, STAGE, split_axis=0, concat_axis=dim, tiled=True)
    each = value.shape[0] // pipeline.num_stages
    return lax.dynamic_slice_in_dim(value, lax.axis_index(STAGE) * each, each, axis=0)


def _to_owners(pipeline: Pipeline, grad: Float[Array, "own_layers ..."], spec: P) -> Float[Array, "layers ..."]:
    """Sum the gradients of a stage's layers over the batch, and return this device's shard of all layers."""
    dim = dim_of(spec, STAGE)
    if dim is not None:
        grad = lax.all_to_all(grad, STAGE, split_axis=dim, concat_axis=0, tiled=True)
    else:
        grad = lax.all_gather(grad, STAGE, axis=0, tiled=True)
    return reduced(grad, spec, (DATA, FSDP, SEQUENCE), gradient_type=pipeline.config.gradient_type)


def _stacked(params: Mapping[str, Array]) -> Weights:
    """Parameters of the layers stacked [L ..] by name within the layer, and all others."""
    by_name: dict[str, list[Array]] = {}
    for name, value in params.items():
        if name.startswith("layers."):
            by_name.setdefault(name.split(".", 2)[2], []).append(value)
    layers = {name: jnp.stack(values) for name, values in by_name.items()}
    return layers, {name: value for name, value in params.items() if not name.startswith("layers.")}


def _with_biases_once(pipeline: Pipeline, layers: dict[str, Array]) -> dict[str, Array]:
    """Zero the layers' output biases on all devices of `model` but the first, since operator g sums them."""
    added = {"mlp.down_proj.bias"} | ({"attention.o_proj.bias"} if pipeline.is_attention_split else set())
    if pipeline.num_model_devices == 1:
        return layers
    return layers | {name: _on_first(layers[name]) for name in added & layers.keys()}
