"""Pipeline parallelism in plain SPMD over the mesh axis `stage`; when a stage does what: pipeline_schedule.py.

Every device runs one program (shard_map): a scan over ticks in which stage s works on its micro-batches, then hands
activations to s + 1 and gradients to s - 1 (ppermute). What a stage has nothing to do for is skipped by lax.cond. A
stage keeps the inputs of the micro-batches under way and computes its forward again in its backward pass; the last
stage does only that.

The first stage embeds, the last one has the head and the loss. Micro-batches are stored split over the stages and
stream towards the first, one a tick; a micro-batch's integers travel on with its activations. Within a stage, `model`
splits heads and feed-forward width by hand (Shoeybi et al. 2019, arXiv:1909.08053, section 3: operators f and g), and
the last stage's tokens among the devices of `model`. Parameters come unstacked; stacked by layer they are a view
inside the step, which one all-to-all hands to the stages. Letters: M micro-batches, S stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxbench import functional, sharding, train
from jaxbench.data_parallel import differentiated, dim_of, reduced, whole
from jaxbench.mesh import DATA, FSDP, MODEL, STAGE
from jaxbench.pipeline_schedule import timing
from jaxbench.transformer import Context

ROWS = (STAGE, DATA, FSDP)  # the axes that split the rows of a batch
Weights = tuple[dict[str, Array], dict[str, Array]]  # parameters of the layers, stacked, and of everything else


class Parts(NamedTuple):
    """What the program of every device needs; static."""

    graph: nnx.GraphDef  # of one layer
    ends: nnx.GraphDef  # of embedding, positions, final norm, head
    frequencies: tuple[float, ...] | None  # rotary; None with learned positions
    dtype: str  # of activations
    d_model: int
    is_attention_split: bool  # over model
    stages: int
    micro_batches: int
    model: int  # devices that share a stage's layers
    loss_of: Callable[[Array, Any], Array]  # loss of (logits, batch): a mean over batch.mask
    schedule: str  # gpipe or 1f1b
    gradient_type: str  # in which gradients are added up


# One stage's work, on the local parts of everything


@functools.partial(jax.custom_vjp)
def _copied(x: Array) -> Array:
    """Operator f: the same values on every device of `model`, whose gradients add up."""
    return x


_copied.defvjp(lambda x: (x, None), lambda _, grad: (lax.psum(grad, MODEL),))


@functools.partial(jax.custom_vjp)
def _summed(x: Array) -> Array:
    """Operator g: the sum of what the devices of `model` computed; the gradient is the same for each."""
    return lax.psum(x, MODEL)


_summed.defvjp(lambda x: (lax.psum(x, MODEL), None), lambda _, grad: (grad,))


@functools.partial(jax.custom_vjp)
def _counted_once(x: Array) -> Array:
    """Every device of `model` computed this; the gradient stays on the first, to be added up over `model` later."""
    return x


_counted_once.defvjp(
    lambda x: (x, None), lambda _, grad: (jnp.where(lax.axis_index(MODEL) == 0, grad, jnp.zeros_like(grad)),)
)


def _enter(parts: Parts, ends: dict[str, Array], micro: Any) -> Array:
    model = nnx.merge(parts.ends, _state(ends))
    hidden = model.embed(micro.tokens)
    if model.position is not None:
        hidden = hidden + model.position(jnp.maximum(micro.positions, 0))
    return _counted_once(hidden)


def _leave(parts: Parts, ends: dict[str, Array], hidden: Array, micro: Any, total: Array) -> Array:
    """Return this device's share of the loss: its part of the tokens' losses over all targets of the batch."""
    model = nnx.merge(parts.ends, _state(ends))
    hidden = _copied(model.final_norm(hidden))
    length = hidden.shape[1] // parts.model
    start = lax.axis_index(MODEL) * length
    hidden, micro = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, length, axis=1), (hidden, micro))
    logits = model.embed.attend(hidden) if model.head is None else model.head(hidden)
    loss = parts.loss_of(logits, micro)
    return loss * (jnp.sum(micro.mask).astype(loss.dtype) / total.astype(loss.dtype))


def _run_stage(parts: Parts, weights: Weights, received: Array, micro: Any, total: Array) -> tuple[Array, Array]:
    """Return what the stage hands on and its share of the loss; 0 but in the last stage."""
    layers, ends = weights
    stage, last = lax.axis_index(STAGE), parts.stages - 1
    hidden = lax.cond(stage == 0, lambda: _enter(parts, ends, micro), lambda: received)
    angles = None
    if parts.frequencies is not None:
        angles = functional.rotary_angles(micro.positions, parts.frequencies, dtype=parts.dtype)
    context = Context(micro.positions, micro.positions, micro.segments, micro.segments, angles, None, None)
    points = {"mlp_in": _copied, "mlp_out": _summed}
    if parts.is_attention_split:
        points |= {"attention_in": _copied, "attention_out": _summed}
    with sharding.activations(points if parts.model > 1 else {}):
        for i in range(next(iter(layers.values())).shape[0]):
            block = nnx.merge(parts.graph, _state({name: value[i] for name, value in layers.items()}))
            if parts.is_attention_split:
                block.attention.num_heads //= parts.model
                block.attention.num_kv_heads //= parts.model
            hidden, _ = block(hidden, context, (0, 0))
    nothing = jax.eval_shape(lambda: _leave(parts, ends, hidden, micro, total))
    loss = lax.cond(
        stage == last,
        lambda: _leave(parts, ends, hidden, micro, total),
        lambda: jnp.zeros(nothing.shape, nothing.dtype),
    )
    return hidden, loss


# Schedules


def _shift(tree: Any, step: int, stages: int) -> Any:
    """Hand every array to the next stage (step 1) or the previous one (step -1); the end gets zeros."""
    pairs = [(stage, stage + step) for stage in range(stages) if 0 <= stage + step < stages]
    if not pairs:
        return jax.tree.map(jnp.zeros_like, tree)
    return jax.tree.map(lambda x: lax.ppermute(x, STAGE, pairs), tree)


def _next_micro(parts: Parts, stream: Any, arrived: Any, tick: Array) -> tuple[Any, Any]:
    """Return the micro-batch this stage works on forward, and the stream moved one place towards the first stage."""
    slot = tick % (parts.micro_batches // parts.stages)
    front = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, keepdims=False), stream)
    is_first = lax.axis_index(STAGE) == 0
    micro = jax.tree.map(lambda a, b: jnp.where(is_first, a, b), front, arrived)
    moved = _shift(front, -1, parts.stages)
    return micro, jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, slot, 0), stream, moved)


def _run_schedule(parts: Parts, weights: Weights, stream: Any, total: Array, scale: Array) -> tuple[Array, Weights]:
    """Return this device's share of the loss, and the gradients of its weights times the loss scale."""
    stage, run = lax.axis_index(STAGE), functools.partial(_run_stage, parts)
    offset, slots = timing(parts.schedule, parts.stages, parts.micro_batches)
    nothing = _empty(parts, stream)
    stash = jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), nothing)
    grads = jax.tree.map(lambda x: jnp.zeros(x.shape, _wide(x.dtype)), weights)

    def tick(carry: tuple, tick: Array) -> tuple[tuple, None]:
        received, arrived, returned, stream, stash, loss, grads = carry
        micro, stream = _next_micro(parts, stream, arrived, tick)
        forward, backward = tick - stage, tick - (offset - stage)
        has_forward = (forward >= 0) & (forward < parts.micro_batches)
        has_backward = (backward >= 0) & (backward < parts.micro_batches)
        stash = jax.tree.map(functools.partial(_stored, forward % slots, has_forward), stash, (received, micro))
        sent = lax.cond(
            has_forward & (stage != parts.stages - 1),
            lambda: run(weights, received, micro, total)[0],
            lambda: jnp.zeros_like(received),
        )

        def pull_back(loss: Array, grads: Weights) -> tuple[Array, Array, Weights]:
            kept, old = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, backward % slots, keepdims=False), stash)
            (_, share), vjp = jax.vjp(lambda weights, kept: run(weights, kept, old, total), weights, kept)
            found, down = vjp((returned, scale.astype(share.dtype)))
            return down, loss + share, jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, found)

        def pass_on(loss: Array, grads: Weights) -> tuple[Array, Array, Weights]:
            return jnp.zeros_like(received), loss, grads

        down, loss, grads = lax.cond(has_backward, pull_back, pass_on, loss, grads)
        received, arrived = _shift((sent, micro), 1, parts.stages)
        return (received, arrived, _shift(down, -1, parts.stages), stream, stash, loss, grads), None

    ticks = jnp.arange(offset + parts.micro_batches, dtype=jnp.int32)
    start = (*nothing, nothing[0], stream, stash, jnp.zeros((), _wide(parts.dtype)), grads)
    (*_, loss, grads), _ = lax.scan(tick, start, ticks)
    return loss, grads


def _stored(slot: Array, is_new: Array, kept: Array, value: Array) -> Array:
    old = lax.dynamic_index_in_dim(kept, slot, keepdims=False)
    return lax.dynamic_update_index_in_dim(kept, jnp.where(is_new, value, old), slot, 0)


def _empty(parts: Parts, stream: Any) -> tuple[Array, Any]:
    """Return zeros of a stage's input and of a micro-batch."""
    micro = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), stream)
    return jnp.zeros((*micro.tokens.shape, parts.d_model), parts.dtype), micro


def _wide(dtype: Any) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _state(named: Mapping[str, Array]) -> nnx.State:
    flat = [(tuple(int(k) if k.isdigit() else k for k in name.split(".")), nnx.Param(x)) for name, x in named.items()]
    return nnx.from_flat_state(flat)


# The whole step, seen from outside


def make_loss(
    mesh: Mesh,
    *,
    schedule: str,
    micro_batches: int,
    stored: Mapping[str, NamedSharding],
    gradients: Mapping[str, NamedSharding],
    is_attention_split: bool,
    gradient_type: str = "full",
    loss_fn: Callable[..., Array] = train.loss_fn,
    loss_of: Callable[[Array, Any], Array] = train.loss_of,
    scale: Array | None = None,
) -> Callable[..., Array]:
    """Return loss(model, batch, dropout=None), whose gradient is what the schedule computes.

    Args:
      mesh: with the axes stage, data, fsdp, sequence (1) and model.
      schedule: gpipe or 1f1b.
      micro_batches: parts of the batch, a multiple of the stages.
      stored: where each parameter lives.
      gradients: where the optimiser reads each gradient.
      is_attention_split: heads are split over model.
      gradient_type: in which gradients are added up over the mesh, see data_parallel.reduced.
      loss_fn: the same loss without a pipeline, for a caller that takes no gradient.
      loss_of: loss of (logits, batch), a mean over the targets of batch.mask.
      scale: loss scale of the step, None = 1; see data_parallel.py.
    """

    def loss(model: Any, batch: Any, *, dropout: tuple[Array, Array] | None = None) -> Array:
        if dropout is not None and any(layer.dropout for layer in model.layers):
            raise ValueError(f"pipeline: dropout={model.layers[0].dropout} is not supported over micro-batches, use 0")
        graph, params = nnx.split(model, nnx.Param)
        paths = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(params)}
        parts = _parts(model, mesh, schedule, micro_batches, is_attention_split, loss_of, gradient_type)
        run = functools.partial(_loss_and_gradients, parts, mesh, stored, gradients)

        def plain(named: dict[str, Array], batch: Any) -> Array:
            flat = [(path, leaf.replace(named[name])) for name, (path, leaf) in paths.items()]
            return loss_fn(nnx.merge(graph, nnx.from_flat_state(flat)), batch)

        return differentiated(run, plain)({name: leaf[...] for name, (_, leaf) in paths.items()}, batch, scale)

    return loss


def _parts(
    model: Any,
    mesh: Mesh,
    schedule: str,
    micro_batches: int,
    is_attention_split: bool,
    loss_of: Any,
    gradient_type: str,
) -> Parts:
    graph, _ = nnx.split(model.layers[0])
    names = ("embed", "position", "final_norm", "head")
    ends, _ = nnx.split(nnx.Dict({name: getattr(model, name) for name in names}))
    return Parts(
        graph,
        ends,
        model.frequencies,
        model.dtype,
        model.embed.embedding.shape[1],
        is_attention_split,
        mesh.shape[STAGE],
        micro_batches,
        mesh.shape[MODEL],
        loss_of,
        schedule,
        gradient_type,
    )


def _loss_and_gradients(
    parts: Parts,
    mesh: Mesh,
    stored: Mapping[str, NamedSharding],
    gradients: Mapping[str, NamedSharding],
    params: dict[str, Array],
    batch: Any,
    scale: Array,
) -> tuple[Array, dict[str, Array]]:
    """Run the schedule on every device of the mesh; parameters and scaled gradients unstacked, by dotted name."""
    layers, ends = _stacked(params)
    layer_specs, layer_gradients = (
        {n: P(None, *where[f"layers.0.{n}"].spec) for n in layers} for where in (stored, gradients)
    )
    end_specs, end_gradients = ({name: where[name].spec for name in ends} for where in (stored, gradients))

    def local(weights: Weights, batch: Any, total: Array, scale: Array) -> tuple[Array, Weights]:
        layers, ends = weights
        layers = {name: _of_stage(parts, value, layer_specs[name]) for name, value in layers.items()}
        ends = {name: whole(value, end_specs[name], (STAGE, FSDP, MODEL)) for name, value in ends.items()}
        each = parts.micro_batches // parts.stages
        stream = jax.tree.map(lambda x: x.reshape(each, x.shape[0] // each, *x.shape[1:]), batch)
        loss, (layers, ends) = _run_schedule(parts, (_with_biases_once(parts, layers), ends), stream, total, scale)
        layers = {name: _to_owners(parts, grad, layer_gradients[name]) for name, grad in layers.items()}
        # Embedding and head lie whole on every device of `model`, each of which saw a part of the tokens.
        over = {name: (STAGE, DATA, FSDP) if "norm" in name else (MODEL, STAGE, DATA, FSDP) for name in ends}
        how = {"gradient_type": parts.gradient_type}
        ends = {name: reduced(grad, end_gradients[name], over[name], **how) for name, grad in ends.items()}
        return lax.psum(loss, (STAGE, DATA, FSDP, MODEL)), (layers, ends)

    placed = ((layer_specs, end_specs), P(ROWS), P(), P())
    specs = {"in_specs": placed, "out_specs": (P(), (layer_gradients, end_gradients))}
    run = jax.shard_map(local, mesh=mesh, check_vma=False, **specs)
    loss, (layers, ends) = run((layers, ends), batch, jnp.maximum(jnp.sum(batch.mask), 1), scale)
    found = ends | {name: layers[name.split(".", 2)[2]][_layer(name)] for name in params if name not in ends}
    return loss, {name: found[name].astype(value.dtype) for name, value in params.items()}


# Weights from where they are stored to the stage that computes with them, and gradients back


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def _of_stage(parts: Parts, value: Array, spec: P) -> Array:
    """Return the stage's layers [L/S ...] of a stacked parameter [L ...] stored as `spec` says."""
    value, dim = whole(value, spec, (FSDP,)), dim_of(spec, STAGE)
    if dim is not None:
        return lax.all_to_all(value, STAGE, split_axis=0, concat_axis=dim, tiled=True)
    each = value.shape[0] // parts.stages
    return lax.dynamic_slice_in_dim(value, lax.axis_index(STAGE) * each, each, axis=0)


def _to_owners(parts: Parts, grad: Array, spec: P) -> Array:
    """Return the gradients of a stage's layers [L/S ...] as parts of all layers [L ...], added up over the batch."""
    dim = dim_of(spec, STAGE)
    if dim is not None:
        grad = lax.all_to_all(grad, STAGE, split_axis=dim, concat_axis=0, tiled=True)
    else:
        grad = lax.all_gather(grad, STAGE, axis=0, tiled=True)
    return reduced(grad, spec, (DATA, FSDP), gradient_type=parts.gradient_type)


def _stacked(params: Mapping[str, Array]) -> Weights:
    """Return the layers' parameters stacked by name within the layer, and all others."""
    by_name: dict[str, list[Array]] = {}
    for name, value in params.items():
        if name.startswith("layers."):
            by_name.setdefault(name.split(".", 2)[2], []).append(value)
    layers = {name: jnp.stack(values) for name, values in by_name.items()}
    return layers, {name: value for name, value in params.items() if not name.startswith("layers.")}


def _with_biases_once(parts: Parts, layers: dict[str, Array]) -> dict[str, Array]:
    """Zero what is added before operator g on all devices of `model` but the first."""
    added = {"mlp.down_proj.bias"} | ({"attention.o_proj.bias"} if parts.is_attention_split else set())
    if parts.model == 1:
        return layers
    is_first = lax.axis_index(MODEL) == 0
    once = {name: jnp.where(is_first, layers[name], jnp.zeros_like(layers[name])) for name in added & layers.keys()}
    return layers | once
