"""One optimiser step of a training run: precision, micro-batches, clipping, loss scaling.

Twin: torch_ref/training/optimizer_step.py.
`train_step` is a pure function of its arrays: compile it with `jax.jit(functools.partial(train_step, step_config=...),
donate_argnums=0)`, with shardings on a mesh. Parameters and moments are flat dictionaries by dotted name, so that
rules, checkpoints and reports address them alike. A non-finite step changes only counters. Models are pytrees whose
leaves are their parameters, so the step is the same for Flax and Equinox.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jaxbench import float8, functional, initial, narrow_products, parameters, train
from jaxbench.parallel import offload
from jaxbench.training import optimizers, precision
from jaxbench.training.step_config import StepConfig, holds_zeros

CLIP_EPS = 1e-6  # added to the norm in the denominator, as torch.nn.utils.clip_grad_norm_ does


class Metrics(NamedTuple):
    """What one step reports."""

    loss: Float[Array, ""]  # before the update, nats per token
    grad_norm: Float[Array, ""]  # global, unscaled, before clipping
    is_finite: Bool[Array, ""]  # False: the step was not taken
    loss_scale: Float[Array, ""]  # used by this step
    skipped: Int[Array, ""]  # steps not taken so far, including this one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes; the model without its parameters, and the number types, are static."""

    params: dict[str, Array]
    moments: Any  # optax state
    step: Int[Array, ""]  # steps tried
    scale: Float[Array, ""]  # loss scale, 1 without loss scaling
    good_steps: Int[Array, ""]  # finite steps since the scale changed
    skipped: Int[Array, ""]
    is_halted: Bool[Array, ""]  # a step was not finite and the run must stop: nothing changes any more
    amax: dict[str, Float[Array, "3 M"]]  # float8: largest magnitudes of the last M steps, by layer; else empty
    graph: parameters.Graph = dataclasses.field(metadata={"static": True})
    policy: precision.Policy = dataclasses.field(metadata={"static": True})


class _Sums(NamedTuple):
    """Sums over the micro-batches of a step, and float8's largest magnitudes over all of them."""

    loss: Float[Array, ""]
    grads: dict[str, Array]
    amax: dict[str, Array]  # empty without float8


def init_state(
    model: Any, params: Mapping[str, np.ndarray], step_config: StepConfig, *, policy: precision.Policy | None = None
) -> TrainState:
    """Training state before the first step.

    Args:
      model: built in the policy's compute type; its parameters' values are not used.
      params: initial values by name, stored in the policy's parameter type.
      policy: number types that replace those of step_config.precision.

    Raises:
      ValueError: the parameters or remat do not fit the model, or float64 is off.
    """
    policy = precision.POLICIES[step_config.precision] if policy is None else policy
    if policy.parameter == "float64" and not jax.config.jax_enable_x64:
        raise ValueError(f"optimizer_step: precision={policy.parameter} needs JAX's 64-bit types; set JAX_ENABLE_X64=1")
    model = float8.apply(model) if policy.is_float8 else model
    if step_config.remat.policy != "none":
        from jaxbench import remat  # for Flax layers

        model = remat.apply(model, **step_config.remat.model_dump())
    graph, abstract = parameters.split(model)
    shapes = {name: leaf.shape for name, leaf in abstract.items() if not name.endswith(float8.SCALES)}
    initial.check_params(shapes, params)
    placed = {name: jnp.array(params[name], policy.parameter) for name in shapes}
    trained = optimizers.trained(step_config.optimizer, placed)
    moments = jax.tree.map(jnp.array, optimizers.transform(step_config.optimizer, 0.0, trained).init(trained))
    moments = offload.to_host(moments) if step_config.offload.optimizer else moments
    scale = step_config.loss_scaling.initial if policy.is_scaled else 1.0
    amax = float8.init_history(placed, step_config.delayed_scaling.history) if policy.is_float8 else {}
    zero = functools.partial(jnp.zeros, (), jnp.int32)  # an array for each counter: the step donates its state
    return TrainState(
        placed, moments, step=zero(), scale=jnp.array(scale, jnp.float32), good_steps=zero(), skipped=zero(),
        is_halted=jnp.zeros((), bool), amax=amax, graph=graph, policy=policy,
    )  # fmt: skip


def train_step(
    state: TrainState,
    batch: Any,
    learning_rate: Float[Array, ""] | float,
    dropout_key: Array | None = None,
    *,
    step_config: StepConfig,
    loss_fn: Callable[..., Array] = train.loss_fn,
    is_guarded: bool = True,
) -> tuple[TrainState, Metrics]:
    """Take one optimiser step; return the state after it, and its metrics.

    Micro-batch k of n takes rows k, k + n, ... and is weighted by its number of targets, so that the loss and its
    gradient are those of the whole batch; one without targets adds nothing. A bank's own loss, a mean over compressed
    blocks, gets the same weight: it is that of the whole batch only where blocks are spread over the micro-batches as
    targets are. The micro-batch's dropout step is step * n + k. Compute types: precision.py.
    step_config.kernels must be native or xla: the engine resolves auto.

    Args:
      batch: arrays [B T]; B is a multiple of step_config.accumulation.
      dropout_key: of prng.py; None = no dropout.
      loss_fn: loss_fn(model, batch, dropout=...) in nats per token, a mean over the targets of batch.mask.
      is_guarded: a non-finite step changes nothing. False: every step is taken, and the gradient's norm is computed
        for clipping only (else it is NaN), so that the program contains AdamW and nothing else.
    """
    policy = state.policy
    with narrow_products.native(step_config.kernels == "native"):
        loss, grads, amax_now = _loss_and_gradients(state, batch, dropout_key, step_config, loss_fn)
    grads = _zeros_held(grads, state.params) if step_config.hold_zeros else grads
    has_norm = is_guarded or step_config.clip_norm is not None
    norm = optax.tree.norm(grads) if has_norm else jnp.full((), jnp.nan, policy.output)
    is_finite = jnp.isfinite(loss) & (jnp.isfinite(norm) if is_guarded else True)
    grads = _clipped(grads, norm, step_config)
    old_moments = offload.to_device(state.moments) if step_config.offload.optimizer else state.moments
    rate = jnp.asarray(learning_rate, policy.accumulation)
    trained = optimizers.trained(step_config.optimizer, state.params)
    optimizer = optimizers.transform(step_config.optimizer, rate, trained)
    updates, new_moments = optimizer.update(grads, old_moments, trained)
    updates = _zeros_held(updates, trained) if step_config.hold_zeros else updates
    is_taken = is_finite & ~state.is_halted if is_guarded else jnp.ones((), bool)
    new = (optax.apply_updates(trained, updates), new_moments, float8.remember(state.amax, amax_now))
    old = (trained, old_moments, state.amax)
    params, moments, amax = jax.tree.map(lambda a, b: jnp.where(is_taken, a, b), new, old) if is_guarded else new
    moments = offload.to_host(moments) if step_config.offload.optimizer else moments
    # Loss scaling finds its scale by overflows, so with it only a non-finite loss is a reason to stop.
    is_broken = is_guarded & (~jnp.isfinite(loss) if policy.is_scaled else ~is_finite)
    next_state = dataclasses.replace(
        state,
        params=state.params | params,
        moments=moments,
        amax=amax,
        step=state.step + 1,
        skipped=state.skipped + (~is_taken).astype(jnp.int32),
        is_halted=state.is_halted | (is_broken & (step_config.nonfinite == "stop")),
        **_rescaled(state, is_finite, step_config, is_scaled=policy.is_scaled),
    )
    return next_state, Metrics(loss, norm, is_finite, state.scale, next_state.skipped)


def _loss_and_gradients(
    state: TrainState, batch: Any, dropout_key: Array | None, step_config: StepConfig, loss_fn: Callable[..., Array]
) -> tuple[Float[Array, ""], dict[str, Array], dict[str, Array]]:
    """Loss of the batch in nats per token, its gradients without the loss scale, and float8's largest magnitudes.

    Frozen parameters get no gradient: zeros for a whole decoder would be written and read again at every step.
    """
    policy = state.policy

    def loss_at(
        trained: dict[str, Array], scales: dict[str, Array], micro: Any, weight: Array, index: Array
    ) -> tuple[Array, Array]:
        cast = jax.tree.map(lambda value: value.astype(policy.compute), state.params | trained) | scales
        dropout = None
        if dropout_key is not None:
            dropout = functional.DropoutStream(dropout_key, state.step * step_config.accumulation + index)
        loss = loss_fn(parameters.merge(state.graph, cast), micro, dropout=dropout).astype(policy.output) * weight
        return loss * state.scale.astype(policy.output) if policy.is_scaled else loss, loss

    grad_fn = jax.value_and_grad(loss_at, argnums=(0, 1), has_aux=True)
    trained = optimizers.trained(step_config.optimizer, state.params)

    def gradients(scales: dict[str, Array]) -> _Sums:
        return _accumulated(grad_fn, trained, scales, batch, step_config.accumulation, policy)

    scales = float8.scales(state.amax, step_config.delayed_scaling.margin)
    loss, grads, amax = float8.with_scales(gradients, scales) if scales else gradients(scales)
    if policy.is_scaled:
        grads = jax.tree.map(lambda grad: grad / state.scale.astype(grad.dtype), grads)
    return loss, grads, amax


def _zeros_held(changes: Mapping[str, Array], params: Mapping[str, Array]) -> dict[str, Array]:
    """Gradients or updates, zeroed where a kernel inside a layer is zero, so that it stays zero in any optimiser."""
    held = {
        name: jnp.where(params[name] == 0, jnp.zeros((), x.dtype), x)
        for name, x in changes.items()
        if holds_zeros(name)
    }
    return {**changes, **held}


def _clipped(grads: dict[str, Array], norm: Float[Array, ""], step_config: StepConfig) -> dict[str, Array]:
    """Gradients scaled down to a global norm of at most clip_norm, passed through host memory if asked."""
    if step_config.offload.gradients:
        grads = offload.to_device(offload.to_host(grads))
    if step_config.clip_norm is None:
        return grads
    factor = jnp.minimum(1.0, step_config.clip_norm / (norm + CLIP_EPS))
    return jax.tree.map(lambda grad: grad * factor, grads)


def held_out_loss(model: Any, batch: Any, *, dropout: functional.DropoutStream | None = None) -> Float[Array, ""]:
    """Cross-entropy of a model's logits in nats per token, without training-only losses (banks' compression)."""
    return train.loss_of(train.predict(model, batch, dropout=dropout), batch)


def eval_step(
    params: dict[str, Array],
    batch: Any,
    *,
    graph: Any,
    step_config: StepConfig,
    count: int | None = None,
    loss_fn: Callable[..., Array] = held_out_loss,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the sum of the losses of a batch's targets in nats, and the number of its targets.

    Args:
      params, graph: the model.
      batch: its rows, a multiple of `count`.
      count: sequential micro-batches; None = the step's count, so that an evaluation needs no more memory than a step.
      loss_fn: the loss, a mean over the targets of batch.mask.
    """
    policy = precision.POLICIES[step_config.precision]
    model = parameters.merge(graph, cast_to_compute(params, policy))

    def body(carry: tuple[Array, Array], micro: Any) -> tuple[tuple[Array, Array], None]:
        targets = jnp.sum(micro.mask, dtype=jnp.int32)
        mean = loss_fn(model, micro).astype(policy.output)
        total = jnp.where(targets > 0, mean * targets.astype(policy.output), jnp.zeros((), policy.output))
        return (carry[0] + total, carry[1] + targets), None

    start = (jnp.zeros((), policy.output), jnp.zeros((), jnp.int32))
    with narrow_products.native(step_config.kernels == "native"):
        return lax.scan(body, start, _micro_batches(batch, step_config.accumulation if count is None else count))[0]


def cast_to_compute(params: Mapping[str, Array], policy: precision.Policy) -> dict[str, Array]:
    """Parameters cast to the compute type, with float8's scales, as a model uses them outside of a step."""
    cast = {name: jnp.asarray(value, policy.compute) for name, value in params.items()}
    return cast | float8.unscaled(params) if policy.is_float8 else cast


def state_arrays(state: TrainState) -> dict[str, dict[str, np.ndarray]]:
    """Parameters ("params") and moments ("first_moment", "second_moment") as numpy arrays, by dotted name."""
    kinds = {"mu": "first_moment", "trace": "first_moment", "nu": "second_moment"}
    trees = {"params": state.params}
    for name, kind in kinds.items():
        moment = optax.tree_utils.tree_get(state.moments, name)
        trees |= {} if moment is None else {kind: moment}
    return {kind: {name: np.asarray(value) for name, value in tree.items()} for kind, tree in trees.items()}


def _accumulated(
    grad_fn: Callable[..., Any],
    trained: dict[str, Array],
    scales: dict[str, Array],
    batch: Any,
    count: int,
    policy: precision.Policy,
) -> _Sums:
    """Loss and gradients, in the accumulation type, summed over `count` sequential micro-batches.

    scales: float8's; the "gradients" of them are the largest magnitudes.
    """
    if count == 1:
        first = (batch, jnp.ones((), policy.output), jnp.zeros((), jnp.int32))
        (_, loss), (grads, amax) = grad_fn(trained, scales, *first)
        return _Sums(loss, jax.tree.map(lambda grad: grad.astype(policy.accumulation), grads), amax)
    micros = _micro_batches(batch, count)
    total = jnp.maximum(jnp.sum(batch.mask), 1).astype(policy.output)
    weights = jnp.sum(micros.mask, axis=(1, 2)).astype(policy.output) / total

    def body(carry: _Sums, each: tuple[Any, Array, Array]) -> tuple[_Sums, None]:
        (_, loss), found = grad_fn(trained, scales, *each)
        # Without targets the weight is 0, and a mean over them 0 / 0: so is its gradient, whatever it is multiplied by.
        has_targets = each[1] > 0
        loss, (grads, amax) = jax.tree.map(lambda x: jnp.where(has_targets, x, jnp.zeros((), x.dtype)), (loss, found))
        summed = jax.tree.map(lambda a, b: a + b.astype(a.dtype), carry.grads, grads)
        return _Sums(carry.loss + loss, summed, jax.tree.map(jnp.maximum, carry.amax, amax)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, policy.accumulation), trained)
    start = _Sums(jnp.zeros((), policy.output), zeros, jax.tree.map(jnp.zeros_like, scales))
    return lax.scan(body, start, (micros, weights, jnp.arange(count, dtype=jnp.int32)))[0]


def _micro_batches(batch: Any, count: int) -> Any:
    """Batch of arrays [B T] as [count, B / count, T]; strided, so that rows sharded over devices stay in place."""
    rows = batch[0].shape[0]
    if rows % count:
        raise ValueError(
            f"optimizer_step: a batch of {rows} rows does not divide into accumulation={count} micro-batches"
        )
    return jax.tree.map(lambda x: x.reshape(rows // count, count, *x.shape[1:]).swapaxes(0, 1), batch)


def _rescaled(state: TrainState, is_finite: Array, step_config: StepConfig, *, is_scaled: bool) -> dict[str, Array]:
    """Next loss scale and number of finite steps since its last change, by the rules of torch.amp.GradScaler."""
    if not is_scaled:
        return {}
    rules, good = step_config.loss_scaling, state.good_steps + 1
    grown = state.scale * rules.growth
    grows = (good == rules.interval) & jnp.isfinite(grown)
    raised = jnp.where(grows, grown, state.scale)
    scale = jnp.where(is_finite, raised, state.scale * rules.backoff)
    good_steps = jnp.where(is_finite & (good != rules.interval), good, 0)
    return {"scale": scale, "good_steps": good_steps}
