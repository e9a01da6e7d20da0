"""One training step over a mesh: which device holds what, and the compiled step.

The mathematics is that of optimizer_step.train_step. A Plan (step_plan.py) says where parameters, gradients, optimiser
state, batch and activations live; `make_step` compiles the step with these input and output shardings and the state
donated. The pipeline (stage > 1, or micro-batches) has its own loss, pipeline.py, whose gradient the schedule computes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from jaxbench import attention, float8, functional, initial, parameters, sharding, train
from jaxbench.config import TransformerConfig
from jaxbench.extension import Extension
from jaxbench.mesh import FSDP, MODEL, MODEL_X, MODEL_Y, ROWS, SEQUENCE, STAGE, ParallelConfig
from jaxbench.parallel import data_parallel, distributed, mesh_checks, offload, pipeline, ring_attention
from jaxbench.parallel.step_plan import Plan, Shardings

State = TypeVar("State")  # of training: a pytree of arrays, training/optimizer_step.py's


def make_plan(
    model: TransformerConfig,
    parallel: ParallelConfig,
    *,
    batch: int,
    tokens: int,
    devices: Sequence[jax.Device] | None = None,
    extension: Extension = Extension(),
) -> Plan:
    """Plan a training run: where everything lives, for batches of `batch` rows of `tokens` tokens.

    Args:
      batch: rows of a micro-batch of the step, over all devices.
      devices: those of the mesh; None = all.
      extension: what a workload adds to the decoder.

    Raises:
      ValueError: the mesh does not fit the devices, the model or the batch; the message names the values.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = parallel.mesh.sizes(len(devices))
    mesh_checks.check(model, parallel, sizes, batch=batch, tokens=tokens)
    mesh = sharding.make_mesh(sizes, devices)
    out = MODEL_Y if parallel.mesh.is_2d else MODEL
    width = MODEL_X if parallel.mesh.is_2d else None
    heads = out if parallel.heads == "split" else None
    shapes = initial.parameter_shapes(model)

    def placed(stored: sharding.Axes) -> dict[str, NamedSharding]:
        rules = sharding.decoder_table(model, stored=stored, out=out, heads=heads, width=width)
        if extension.add_rules is not None:
            rules = extension.add_rules(rules, model, stored=stored, heads=heads, width=width)
        return sharding.parameter_shardings(shapes, rules, mesh)

    whole, split = placed(STAGE), placed((STAGE, FSDP))
    params = split if parallel.zero == 3 else whole
    tokens_axes = sharding.joined(SEQUENCE, out if parallel.sequence_parallel else None)
    points = {"residual": P(ROWS, tokens_axes, width)}
    points |= {name: P(ROWS, SEQUENCE, width) for name in ("attention_in", "mlp_in")}
    return Plan(
        mesh,
        parallel,
        model,
        params=params,
        used={name: sharding.gathered(where, (STAGE, FSDP)) for name, where in split.items()},
        gradients=split if parallel.zero >= 2 else whole,
        moments=split if parallel.zero >= 1 else whole,
        batch=NamedSharding(mesh, P(ROWS, SEQUENCE)),
        points={name: NamedSharding(mesh, spec) for name, spec in points.items()},
    )


def check_precision(plan: Plan, precision: str) -> None:
    """Check that the gradients of a step of this precision (StepConfig.precision) can be computed as the plan says.

    Raises:
      ValueError: float8 in a pipeline or with gradients in 16 bits, which know a step's parameters but not its scales.
    """
    sums, micro = plan.config.gradient_type, plan.config.micro_batches
    if precision == "float8" and (plan.is_pipelined or sums != "full"):
        raise ValueError(
            f"parallel: precision={precision} needs stage=1, micro_batches=1 and gradient_type=full, got "
            f"stage={plan.mesh.shape[STAGE]}, micro_batches={micro}, gradient_type={sums}"
        )


def projection_groups(parallel: ParallelConfig, num_devices: int) -> int:
    """Number of interleaved parts of fused projections' kernels with which they shard as they are stored.

    Raises:
      ValueError: ZeRO stage 3 with fsdp > 1: the fused kernel would keep the gathered kernels until the backward pass.
    """
    sizes = parallel.mesh.sizes(num_devices)
    if parallel.zero == 3 and sizes[FSDP] > 1:
        raise ValueError(
            f"parallel: fused_projections with zero=3 and fsdp={sizes[FSDP]} would keep gathered kernels for the "
            "backward pass; use parallel.zero=2, or fused_projections=false"
        )
    # A pipeline stage already computes with its own parts of the kernels.
    is_pipelined = sizes[STAGE] > 1 or parallel.micro_batches > 1
    return 1 if is_pipelined else sizes[MODEL_Y if parallel.mesh.is_2d else MODEL]


# Placing a state


def state_shardings(plan: Plan, state: Any) -> Any:
    """Return the NamedSharding of every array of a training state, as the same tree.

    Arrays in pinned host memory stay there. Optimiser state with a parameter's name and shape is sharded like that
    parameter's moments; other arrays (counters, factored moments) are replicated.
    """
    shapes = initial.parameter_shapes(plan.model)

    def place(path: tuple, leaf: Any) -> NamedSharding:
        words, on_device = parameters.dotted(path).split("."), NamedSharding(plan.mesh, P())
        endings = (".".join(words[start:]) for start in range(len(words)))
        name = next((ending for ending in endings if ending in shapes), None)
        if name is not None and tuple(leaf.shape) == shapes[name]:
            on_device = (plan.params if words[0] == "params" else plan.moments)[name]
        kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
        return offload.host_sharding(on_device) if kind == sharding.PINNED_HOST else on_device

    return jax.tree_util.tree_map_with_path(place, state)


def place_state(plan: Plan, state: State) -> State:
    """Copy the state, with every array placed as the plan says."""
    return jax.tree.map(distributed.place, state, state_shardings(plan, state))


def new_state(
    plan: Plan, init: Callable[[dict[str, Array]], State], params: Mapping[str, np.ndarray], shapes: State
) -> State:
    """Make the state before the first step where the plan says: no device ever holds what others are to keep.

    Args:
      init: initial values by name -> the state.
      params: initial values; each process has all of them.
      shapes: of the state; arrays that belong into pinned host memory have a sharding there.
    """
    stored = {name: distributed.place(np.asarray(params[name], leaf.dtype), plan.params[name])
              for name, leaf in shapes.params.items()}  # fmt: skip
    return jax.jit(init, out_shardings=state_shardings(plan, shapes))(stored)


def place_batch(plan: Plan, batch: train.Batch) -> train.Batch:
    """Place a batch, arrays [B T], with its rows and tokens over the devices as the plan says."""
    return jax.device_put(batch, plan.batch)


# The step


def make_step(
    plan: Plan,
    state: Any,
    *,
    step: Callable[..., tuple[Any, Any]],
    loss_fn: Callable[..., Array] = train.loss_fn,
    loss_of: Callable[[Array, Any], Array] | None = None,
) -> Any:
    """Make the jitted training step over a mesh: run(state, batch, extras) -> (state, metrics); donates the state.

    Args:
      state: the state, or its shapes.
      step: the step's mathematics, called as step(state, batch, loss_fn=..., **extras).
      loss_fn, loss_of: the loss to minimise, see `loss_on`.
    """
    in_state, everywhere = state_shardings(plan, state), NamedSharding(plan.mesh, P())

    def run(state: Any, batch: Any, extras: dict[str, Any]) -> tuple[Any, Any]:
        loss = loss_on(plan, loss_fn, loss_of=loss_of, scale=getattr(state, "scale", None))
        return step(state, batch, loss_fn=loss, **extras)

    return jax.jit(
        run,
        in_shardings=(in_state, plan.batch, everywhere),
        out_shardings=(in_state, everywhere),
        donate_argnums=0,
    )


def loss_on(
    plan: Plan,
    loss_fn: Callable[..., Array] = train.loss_fn,
    *,
    loss_of: Callable[[Array, Any], Array] | None = None,
    scale: Array | None = None,
) -> Callable[..., Array]:
    """Make the loss over the plan's mesh, as loss(model, batch, dropout=None).

    Its gradient is computed by a pipeline's schedule (pipeline.py), summed by hand in 16 bits (data_parallel.py), or
    left to jit's partitioner. In a pipeline, the loss without gradient is computed without the schedule, every stage on
    its rows.

    Args:
      loss_fn: loss_fn(model, batch, dropout=...), a mean over the targets of batch.mask.
      loss_of: the same as a function of (logits, batch), instead of loss_fn; a pipeline's last stage can compute this.
      scale: loss scale of the step, None = 1: needed by losses whose gradients are computed by hand.

    Raises:
      ValueError: both are given, or a pipeline, whose last stage has logits but no model, is given a loss_fn.
    """
    is_own = loss_fn is not train.loss_fn
    if is_own and (loss_of is not None or plan.is_pipelined):
        raise ValueError(
            f"parallel: loss_fn={getattr(loss_fn, '__name__', loss_fn)} with loss_of={loss_of} and "
            f"stage={plan.mesh.shape[STAGE]}, micro_batches={plan.config.micro_batches}; give one of them, and a "
            "pipeline loss_of(logits, batch)"
        )
    if loss_of is not None:
        loss_fn = lambda model, batch, dropout=None: loss_of(train.predict(model, batch, dropout=dropout), batch)
    by_partitioner = partitioned(plan, loss_fn)
    if plan.is_pipelined:
        return pipeline.make_loss(plan, loss_fn=by_partitioner, loss_of=loss_of or train.loss_of, scale=scale)
    if plan.config.gradient_type == "full":
        return by_partitioner
    return data_parallel.make_loss(plan, loss_fn=loss_fn, plain_loss=by_partitioner, scale=scale)


def partitioned(plan: Plan, loss_fn: Callable[..., Array]) -> Callable[..., Array]:
    """Loss under jit's partitioner: weights gathered where they are used, activations constrained at named points."""
    constraint = jax.lax.with_sharding_constraint
    points = {name: functools.partial(constraint, shardings=where) for name, where in plan.points.items()}
    is_split = plan.config.zero == 3 and plan.mesh.shape[FSDP] > 1

    def loss(model: Any, batch: train.Batch, *, dropout: functional.DropoutStream | None = None) -> Float[Array, ""]:
        graph, params = parameters.split(model)
        # Layers in a loop, or rematerialised ones, gather their own weights. Otherwise the stack of all gathered
        # weights would be kept, and a policy around rematerialised blocks would keep what is inside them.
        is_by_layer = is_split and bool(model.scan_layers or model.remat_group)
        of_layer = lambda params, index: used_params(plan, params, within=f"layers.{index}.")

        def at(params: dict[str, Array]) -> Array:
            weights = of_layer if is_by_layer else None
            with sharding.activations(points, attention=functools.partial(attend, plan), weights=weights):
                used = used_params(plan, params, leave="layers." if is_by_layer else None)
                return loss_fn(parameters.merge(graph, used), batch, dropout=dropout)

        if is_split and not model.remat_group:
            return jax.checkpoint(at, policy=_all_but(plan.used))(params)
        return at(params)

    return loss


def make_evaluation(
    plan: Plan, evaluate: Callable[..., Any], *, loss_fn: Callable[..., Array], accumulation: int
) -> Any:
    """Make the jitted evaluation over a mesh: run(params, batch) -> sums over the batch, on every device.

    Args:
      evaluate: the mathematics, called as evaluate(params, batch, count=..., loss_fn=...).
      loss_fn: the loss that it sums over `count` sequential micro-batches.
      accumulation: micro-batches of the step. `count` is this times a pipeline's rounds (micro-batches per stage), so
        that no device holds the activations of more rows at once than in a step.
    """
    count = accumulation * max(1, plan.config.micro_batches // plan.mesh.shape[STAGE])
    run = functools.partial(evaluate, count=count, loss_fn=partitioned(plan, loss_fn))
    return jax.jit(run, out_shardings=NamedSharding(plan.mesh, P()))


def attend(
    plan: Plan,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K H S"],
    value: Float[Array, "B K S H"],
    spans: attention.Spans,
    *,
    sliding_window: int | None,
    implementation: str,
    block_size: int,
    softcap: float | None,
) -> Float[Array, "B T N H"]:
    """Compute attention (jaxbench/attention.py) over the plan's mesh.

    Every device attends for its rows, heads and tokens, so any kernel runs as on one device. Devices of an axis that
    splits no heads share the rows, if their number allows. `sequence_attention` says how other tokens' keys arrive.

    Raises:
      ValueError: a platform's kernel is asked for, and a ring computes scores by itself.
    """
    out, width = (MODEL_Y, MODEL_X) if plan.config.mesh.is_2d else (MODEL, None)
    is_split = plan.config.heads == "split"
    rows = tuple(sharding.joined(ROWS, width, None if is_split else out))
    count = math.prod(plan.mesh.shape[axis] for axis in rows)
    rows, heads = rows if query.shape[0] % count == 0 else ROWS, out if is_split else None
    is_ring = plan.mesh.shape[SEQUENCE] > 1 and plan.config.sequence_attention == "ring"
    keys_over = SEQUENCE if is_ring else None
    if is_ring and implementation in attention.KERNELS:
        raise ValueError(
            f"parallel: implementation={implementation} with sequence_attention=ring over sequence="
            f"{plan.mesh.shape[SEQUENCE]}: a ring computes block_size keys at a time and takes no kernel; use "
            "implementation=blocked, or sequence_attention=gathered"
        )

    def local(query: Array, key: Array, value: Array, spans: attention.Spans) -> Array:
        with sharding.activations({}):
            if is_ring:
                return ring_attention.ring_attention(
                    query, key, value, spans, sliding_window=sliding_window, axis=SEQUENCE, block_size=block_size,
                    softcap=softcap,
                )  # fmt: skip
            return attention.attention(
                query, key, value, spans, sliding_window=sliding_window, is_ordered=plan.mesh.shape[SEQUENCE] == 1,
                implementation=implementation, block_size=block_size, softcap=softcap,
            )  # fmt: skip

    of_queries, of_keys = P(rows, SEQUENCE), P(rows, keys_over)
    specs = (
        P(rows, SEQUENCE, heads),
        P(rows, heads, None, keys_over),
        P(rows, heads, keys_over),
        attention.Spans(of_queries, of_keys, of_queries, of_keys),
    )
    over_mesh = jax.shard_map(
        local, mesh=plan.mesh, in_specs=specs, out_specs=P(rows, SEQUENCE, heads), check_vma=False
    )
    return over_mesh(query, key, value, spans)


def used_params(plan: Plan, params: Any, *, within: str = "", leave: str | None = None) -> Any:
    """Place parameters as the model computes with them; their gradients go where the optimiser reads them.

    Args:
      params: parameters as a tree whose paths are their dotted names.
      within: prefix of these names in the plan, such as "layers.0.".
      leave: parameters whose name has this prefix are left as they are.

    The scales of 8-bit products are no parameters: they are replicated.
    """

    def place(path: tuple, value: Array) -> Array:
        name = within + parameters.dotted(path)
        if name.endswith(float8.SCALES) or (leave is not None and name.startswith(leave)):
            return value
        return sharding.place_both_ways(value, plan.used[name], plan.gradients[name])

    return jax.tree_util.tree_map_with_path(place, params)


def _all_but(used: Shardings) -> Callable[..., bool]:
    """Rematerialisation policy that keeps everything but gathered weights: the backward pass gathers them again.

    ZeRO stage 3 (Rajbhandari et al. 2020, arXiv:1910.02054, section 7.3): no device holds all gathered weights at once.
    """
    gathered = set(used.values())
    return lambda primitive, *_, **params: (
        not (primitive.name == "sharding_constraint" and params.get("sharding") in gathered)
    )
