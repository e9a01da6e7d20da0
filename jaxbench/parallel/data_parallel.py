"""Data parallelism by hand: each device computes its own gradients, which are summed in a chosen type.

Under jit's partitioner, gradients are summed in the type in which they are computed. Here each device computes the
gradients of its rows under shard_map, and `reduced` sums them over the mesh; the pipeline uses the same sums.

bfloat16 keeps float32's range. float16 has 8 times its precision but little range, so each tensor is first divided by
its largest magnitude over the devices: one more number per tensor, and neither overflow nor loss of small gradients.

A loss whose gradient is computed by hand computes it before the step multiplies the loss by its scale. It therefore
takes the scale as an argument and applies it where the gradient begins: a model in float16 would otherwise lose small
gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from jaxbench import functional, parameters, sharding, train
from jaxbench.mesh import DATA, FSDP, ROWS
from jaxbench.parallel.step_plan import Plan


def dim_of(spec: P, axis: str) -> int | None:
    """Return the index of the dim that a mesh axis splits, None if it splits none."""
    return next((dim for dim, entry in enumerate(spec) if axis in sharding.axes_of(entry)), None)


def whole(value: Float[Array, "..."], spec: P, axes: tuple[str, ...]) -> Float[Array, "..."]:
    """All-gather a value over those of `axes` that split it in `spec`, the innermost first. Call under shard_map."""
    for dim, entry in enumerate(spec):
        for axis in reversed(sharding.axes_of(entry)):
            if axis in axes:
                value = lax.all_gather(value, axis, axis=dim, tiled=True)
    return value


def reduced(grad: Float[Array, "..."], spec: P, axes: tuple[str, ...], *, gradient_type: str) -> Float[Array, "..."]:
    """Sum a gradient over mesh axes, in 16 bits if asked. Call under shard_map.

    Over the axes that split it in `spec` this is a reduce-scatter, which leaves each device its own part; over the
    others it is an all-reduce.

    Args:
      grad: this device's gradient of a whole parameter.
      spec: how the sum is to be split.
      axes: over which it is summed.
      gradient_type: type that is sent and summed: bfloat16, float16 or full, the gradient's own type. The result always
        has the gradient's own type.
    """
    if gradient_type == "full":
        return _summed(grad, spec, axes)
    if gradient_type == "bfloat16":
        return _summed(grad.astype(gradient_type), spec, axes).astype(grad.dtype)
    largest = lax.pmax(jnp.max(jnp.abs(grad)), axes)
    unit = jnp.where(largest == 0, jnp.ones_like(largest), largest)  # if infinite or NaN, so is the sum
    return _summed((grad / unit).astype(gradient_type), spec, axes).astype(grad.dtype) * unit


def _summed(grad: Float[Array, "..."], spec: P, axes: tuple[str, ...]) -> Float[Array, "..."]:
    """Reduce-scatter over the axes that split `spec`, all-reduce over the others, in the gradient's type."""
    everywhere = tuple(axis for axis in axes if dim_of(spec, axis) is None)
    grad = lax.psum(grad, everywhere) if everywhere else grad
    for axis in axes:
        if axis not in everywhere:
            grad = lax.psum_scatter(grad, axis, scatter_dimension=dim_of(spec, axis), tiled=True)
    return grad


def make_loss(
    plan: Plan, *, loss_fn: Callable[..., Array], plain_loss: Callable[..., Array], scale: Array | None
) -> Callable[..., Array]:
    """Make loss(model, batch, dropout=None), whose gradient is summed over data and fsdp in the gradient_type.

    Args:
      plan: of a mesh on which only data and fsdp are larger than 1; with ZeRO stage 3 parameters are gathered once per
        step.
      loss_fn: loss of (model, batch), a mean over the targets of batch.mask; its gradient is taken. Each device calls
        it with its rows, and never without a target.
      plain_loss: the same loss under jit's partitioner, for a caller that takes no gradient.
      scale: loss scale of the step, None = 1.

    Decoders with dropout are refused when the plan is made (mesh_checks.py).

    Raises (the loss, when traced):
      ValueError: dropout is on, for example of adapters; or layers return their own loss, which is no mean over the
        targets, so that the devices' shares are unknown.
    """

    def loss(model: Any, batch: train.Batch, *, dropout: functional.DropoutStream | None = None) -> Float[Array, ""]:
        refuse_dropout(plan, dropout)
        if loss_fn is train.loss_fn and model.auxiliary_weight:
            raise ValueError(
                f"parallel: gradient_type={plan.config.gradient_type} adds up means over targets, and layers' own loss "
                f"of weight {model.auxiliary_weight} is none; use gradient_type=full"
            )
        graph, params = parameters.split(model)
        by_params = lambda loss: lambda params, batch: loss(parameters.merge(graph, params), batch)
        run = functools.partial(_loss_and_gradients, plan, by_params(loss_fn))
        return differentiated(run, by_params(plain_loss))(params, batch, scale)

    return loss


def refuse_dropout(plan: Plan, dropout: functional.DropoutStream | None) -> None:
    """Refuse a stream of dropout masks: they depend on a row's index in the whole batch, which no device knows here.

    Raises:
      ValueError: there is one.
    """
    if dropout is not None:
        raise ValueError(
            f"parallel: dropout (model.dropout={plan.model.dropout}, or that of adapters) is not supported with "
            f"gradient_type={plan.config.gradient_type} and micro_batches={plan.config.micro_batches}; use dropout 0, "
            "or gradient_type=full without micro-batches"
        )


def differentiated(loss_and_gradients: Callable[..., Any], loss: Callable[..., Array]) -> Callable[..., Array]:
    """Make loss(params, batch, scale), whose gradient in params is computed together with it, already scaled.

    Args:
      loss_and_gradients: (params, batch, scale) -> the loss, and the gradients of loss * scale, by name.
      loss: (params, batch) -> the loss, for a caller that takes no gradient.
    """

    def forward(params: dict[str, Array], batch: Any, scale: Array | None) -> tuple[Array, tuple]:
        scale = jnp.ones((), jnp.float32) if scale is None else scale
        value, grads = loss_and_gradients(params, batch, scale)
        return value, (grads, scale)

    def backward(residuals: tuple, seed: Array) -> tuple:
        # The seed is the scale times a micro-batch's weight; narrow gradients could not hold the scale alone.
        grads, scale = residuals
        rest = seed / scale.astype(seed.dtype)
        return {name: (grad.astype(rest.dtype) * rest).astype(grad.dtype) for name, grad in grads.items()}, None, None

    by_hand = jax.custom_vjp(lambda params, batch, scale: loss(params, batch))
    by_hand.defvjp(forward, backward)
    return by_hand


def over_mesh(plan: Plan, local: Callable[..., tuple], stored: Any, gradients: Any) -> Callable[..., tuple]:
    """Make run(weights, batch, scale) -> loss, gradients; each device runs local(weights, batch, num_targets, scale).

    stored, gradients: PartitionSpecs of the weights and of their gradients; every device has its part of the batch.
    """
    run = jax.shard_map(
        local, mesh=plan.mesh, in_specs=(stored, plan.batch.spec, P(), P()), out_specs=(P(), gradients), check_vma=False
    )
    return lambda weights, batch, scale: run(weights, batch, jnp.maximum(jnp.sum(batch.mask), 1), scale)


def _loss_and_gradients(
    plan: Plan, loss_fn: Callable[..., Array], params: dict[str, Array], batch: train.Batch, scale: Float[Array, ""]
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Loss in nats per token, and gradients of loss * scale by dotted name; each device computes those of its rows."""
    specs, gradient_specs = ({name: where[name].spec for name in params} for where in (plan.params, plan.gradients))

    def local(
        params: dict[str, Array], batch: train.Batch, num_targets: Array, scale: Array
    ) -> tuple[Array, dict[str, Array]]:
        count = jnp.sum(batch.mask)
        # A mean over no targets may be 0 / 0: any finite loss does, its share is 0.
        counted = batch._replace(mask=batch.mask | (count == 0))

        def at(params: dict[str, Array]) -> tuple[Array, Array]:
            with sharding.activations({}):
                mean = loss_fn(params, counted)
            share = mean * (count.astype(mean.dtype) / num_targets.astype(mean.dtype))
            return share * scale.astype(share.dtype), share

        used = {name: whole(value, specs[name], (FSDP,)) for name, value in params.items()}
        (_, share), grads = jax.value_and_grad(at, has_aux=True)(used)
        wide = {name: grad.astype(jnp.promote_types(grad.dtype, jnp.float32)) for name, grad in grads.items()}
        return lax.psum(share, ROWS), {
            name: reduced(grad, gradient_specs[name], (DATA, FSDP), gradient_type=plan.config.gradient_type)
            for name, grad in wide.items()
        }

    loss, grads = over_mesh(plan, local, specs, gradient_specs)(params, batch, scale)
    return loss, {name: grads[name].astype(value.dtype) for name, value in params.items()}
