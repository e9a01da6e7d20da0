"""One optimiser step of a training run: precision, micro-batches, clipping, loss scaling.

Twin: jaxbench/training/optimizer_step.py.
AdamW and SGD only, both PyTorch's fused ones; narrow types by autocast, float16 with PyTorch's own GradScaler. A
non-finite step changes only counters. A step does not wait for the device: whether it is taken is a tensor, which the
fused optimisers read. Differs from the twin: autocast keeps the residual stream and norms in float32.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jaxbench.training import precision
from jaxbench.training.step_config import TWIN_OPTIMIZERS, StepConfig, holds_zeros
from torch_ref import functional, nn, remat, train

CLIP_EPS = 1e-6  # added to the norm in the denominator, as torch.nn.utils.clip_grad_norm_ does


class Metrics(NamedTuple):
    """What one step reports."""

    loss: Float[Tensor, ""]  # before the update, nats per token
    grad_norm: Float[Tensor, ""]  # global, unscaled, before clipping
    is_finite: Bool[Tensor, ""]  # False: the step was not taken
    loss_scale: Float[Tensor, ""]  # used by this step
    skipped: Int[Tensor, ""]  # steps not taken so far, including this one


@dataclasses.dataclass
class TrainState:
    """Everything that a step changes, in place; what depends on values is on the device."""

    params: torch.nn.Module
    moments: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    policy: precision.Policy
    skipped: Int[Tensor, ""]
    is_halted: Bool[Tensor, ""]  # a step was not finite and the run must stop: nothing changes any more
    step: int = 0  # steps tried


def init_state(
    model: Any, params: Mapping[str, np.ndarray], step_config: StepConfig, *, policy: precision.Policy | None = None
) -> TrainState:
    """Training state before the first step.

    Args:
      model: built in the policy's parameter type; its parameters' values are replaced.
      params: initial values by name.
      policy: number types that replace those of step_config.precision.

    Raises:
      ValueError: the parameters do not fit the model, or this twin lacks the optimiser or the remat policy.
    """
    policy = precision.POLICIES[step_config.precision] if policy is None else policy
    if policy.is_float8:
        raise ValueError(f"optimizer_step: precision={step_config.precision} is not in torch_ref; use --backend=flax")
    if step_config.offload.optimizer or step_config.offload.gradients:
        raise ValueError(
            f"optimizer_step: offload {step_config.offload.model_dump()} is not in torch_ref; use --backend=flax"
        )
    if step_config.optimizer.kind not in TWIN_OPTIMIZERS:
        raise ValueError(
            f"optimizer_step: optimizer {step_config.optimizer.kind!r} is not in torch_ref, which has "
            f"{', '.join(TWIN_OPTIMIZERS)}; use --backend=flax"
        )
    if step_config.remat.policy != "none":
        model = remat.apply(model, **step_config.remat.model_dump())
    device = next(model.parameters()).device
    model = nn.load_params(model, params, device=str(device))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(step_config.optimizer.is_trained(name))
    rules = step_config.loss_scaling
    scaler = torch.amp.GradScaler(
        device.type, init_scale=rules.initial, growth_factor=rules.growth, backoff_factor=rules.backoff,
        growth_interval=rules.interval, enabled=policy.is_scaled,
    )  # fmt: skip
    none, no = torch.zeros((), dtype=torch.int32, device=device), torch.zeros((), dtype=torch.bool, device=device)
    return TrainState(model, _optimizer(model, step_config), scaler, policy, skipped=none, is_halted=no)


def train_step(
    state: TrainState,
    batch: Any,
    learning_rate: float,
    dropout_key: Tensor | None = None,
    *,
    step_config: StepConfig,
    loss_fn: Callable[..., Tensor] = train.loss_fn,
    is_guarded: bool = True,
) -> tuple[TrainState, Metrics]:
    """Take one optimiser step; return the state after it, and its metrics. Arguments and errors are the twin's."""
    scale = state.scaler.scale(torch.ones((), device=state.skipped.device))
    state.moments.zero_grad(set_to_none=True)
    loss = _accumulate(state, batch, dropout_key, step_config, loss_fn)
    state.scaler.unscale_(state.moments)
    parameters = [p for p in state.params.parameters() if p.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:  # the loss does not read it: a gradient of zeros, as in the twin
            parameter.grad = torch.zeros_like(parameter)
    zeros = _zeros(state.params) if step_config.hold_zeros else []
    for parameter, is_zero in zeros:
        parameter.grad.masked_fill_(is_zero, 0.0)
    has_norm = is_guarded or step_config.clip_norm is not None
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters]) if has_norm else torch.tensor(torch.nan)
    is_finite = torch.isfinite(loss) & torch.isfinite(norm) if is_guarded else torch.isfinite(loss)
    if step_config.clip_norm is not None:
        factor = torch.clamp(step_config.clip_norm / (norm + CLIP_EPS), max=1.0)
        for parameter in parameters:
            parameter.grad.mul_(factor)
    for group in state.moments.param_groups:
        group["lr"] = float(learning_rate) * group.get("rate_ratio", 1.0)
    if is_guarded:  # as GradScaler.step tells a fused optimiser, whose kernels then change nothing
        is_left_out = ~is_finite | state.is_halted
        state.moments.found_inf, state.skipped = is_left_out.to(torch.float32), state.skipped + is_left_out
    state.moments.step()
    with torch.no_grad():
        for parameter, is_zero in zeros:
            parameter.masked_fill_(is_zero, 0.0)
    state.scaler.update()
    # Loss scaling finds its scale by overflows, so with it only a non-finite loss is a reason to stop.
    if is_guarded and step_config.nonfinite == "stop":
        state.is_halted = state.is_halted | ~(torch.isfinite(loss) if state.policy.is_scaled else is_finite)
    state.step += 1
    return state, Metrics(loss, norm, is_finite, scale, state.skipped)


def held_out_loss(model: Any, batch: Any, *, dropout: functional.DropoutStream | None = None) -> Float[Tensor, ""]:
    """Cross-entropy of a model's logits in nats per token, without training-only losses (banks' compression)."""
    return train.loss_of(train.predict(model, batch, dropout=dropout), batch)


@torch.no_grad()
def eval_step(
    params: Any,
    batch: Any,
    *,
    graph: Any,
    step_config: StepConfig,
    count: int | None = None,
    loss_fn: Callable[..., Tensor] = held_out_loss,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Return the sum of the losses of a batch's targets in nats, and the number of its targets.

    params is the model, graph is unused; the other arguments are the twin's.
    """
    total = 0.0
    for micro in _micro_batches(batch, step_config.accumulation if count is None else count):
        with cast_to_compute(params, precision.POLICIES[step_config.precision]):
            mean = loss_fn(params, micro)
        targets = micro.mask.sum()
        total = total + torch.where(targets > 0, mean * targets, mean.new_zeros(()))
    return total, batch.mask.sum()


def cast_to_compute(params: torch.nn.Module, policy: precision.Policy) -> torch.autocast:
    """Context in which the model `params` computes in the compute type; no effect if its parameters have that type."""
    device = next(params.parameters()).device.type
    dtype = getattr(torch, policy.compute)
    is_narrow = policy.compute != policy.parameter
    return torch.autocast(device, dtype=dtype if is_narrow else torch.bfloat16, enabled=is_narrow)


def state_arrays(state: TrainState) -> dict[str, dict[str, np.ndarray]]:
    """Parameters ("params") and moments ("first_moment", "second_moment") as numpy arrays, by dotted name."""
    named = dict(state.params.named_parameters())
    trees: dict[str, dict[str, Tensor]] = {"params": named}
    kinds = {"first_moment": ("exp_avg", "momentum_buffer"), "second_moment": ("exp_avg_sq",)}
    for (kind, keys), (name, parameter) in itertools.product(kinds.items(), named.items()):
        moments = state.moments.state.get(parameter, {})
        for key in keys:
            if moments.get(key) is not None:
                trees.setdefault(kind, {})[name] = moments[key]
    return {kind: {name: x.detach().cpu().numpy().copy() for name, x in tree.items()} for kind, tree in trees.items()}


def _zeros(model: torch.nn.Module) -> list[tuple[Tensor, Bool[Tensor, "..."]]]:
    """Trained kernels inside layers, each with a mask of its zeros."""
    named = model.named_parameters()
    return [(p, p.detach() == 0) for name, p in named if p.requires_grad and holds_zeros(name)]


def _accumulate(
    state: TrainState, batch: Any, dropout_key: Tensor | None, step_config: StepConfig, loss_fn: Callable[..., Tensor]
) -> Float[Tensor, ""]:
    """Loss of the batch in nats per token; the parameters' grad accumulates the micro-batches' scaled gradients."""
    count, summed = step_config.accumulation, None
    total = batch.mask.sum().clamp(min=1) if count > 1 else None  # with one micro-batch, the loss is the mean already
    for k, micro in enumerate(_micro_batches(batch, count)):
        dropout = None if dropout_key is None else functional.DropoutStream(dropout_key, state.step * count + k)
        with cast_to_compute(state.params, state.policy):
            loss = loss_fn(state.params, _with_targets(micro) if count > 1 else micro, dropout=dropout)
        if count > 1:
            loss = loss * (micro.mask.sum().to(loss.dtype) / total)
        state.scaler.scale(loss).backward()
        summed = loss.detach() if summed is None else summed + loss.detach()
    return summed


def _with_targets(micro: Any) -> Any:
    """The batch, but where no target counts, every token does: its weight is 0, and a mean over none would be 0 / 0.

    A gradient of 0 / 0 is NaN whatever it is multiplied by. Asking on the host would wait for the device.
    """
    is_empty = ~micro.mask.any()
    known = {"targets": micro.targets.masked_fill(is_empty, 0)} if "targets" in micro._fields else {}
    return micro._replace(mask=micro.mask | is_empty, **known)


def _micro_batches(batch: Any, count: int) -> list[Any]:
    """Split a batch into `count` batches of every count-th row."""
    rows = batch[0].shape[0]
    if rows % count:
        raise ValueError(
            f"optimizer_step: a batch of {rows} rows does not divide into accumulation={count} micro-batches"
        )
    return [type(batch)(*(None if x is None else x[k::count] for x in batch)) for k in range(count)]


def _optimizer(model: torch.nn.Module, step_config: StepConfig) -> torch.optim.Optimizer:
    """PyTorch's fused AdamW or SGD over the trained parameters, with its state created at once.

    Those that are not fused pass over memory some ten times a step, and cannot be told on the device to take no step.
    """
    o, named = step_config.optimizer, [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    trained = [p for _, p in named]
    if not trained:
        raise ValueError(f"optimizer_step: trained={o.trained!r} names no parameter of the model")
    kinds_of = {(o.decays(name), o.rate_ratio(name)): [] for name, _ in named}
    for name, p in named:
        kinds_of[o.decays(name), o.rate_ratio(name)].append(p)
    groups = [
        {"params": mine, "weight_decay": o.weight_decay if decays else 0.0, "rate_ratio": ratio}
        for (decays, ratio), mine in sorted(kinds_of.items(), reverse=True)
    ]
    # PyTorch itself starts from zeros at the first step; made here, the state has the same structure from the start.
    if o.kind == "sgd":
        optimizer, kinds = torch.optim.SGD(groups, lr=0.0, momentum=o.momentum, fused=True), ("momentum_buffer",)
    else:
        betas, kinds = (o.b1, o.b2), ("exp_avg", "exp_avg_sq")
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=o.eps, fused=True)
    for parameter in trained if o.kind == "adamw" or o.momentum else ():
        optimizer.state[parameter] = {kind: torch.zeros_like(parameter) for kind in kinds}
        if o.kind == "adamw":
            optimizer.state[parameter]["step"] = torch.tensor(0.0, device=parameter.device)  # where the kernel reads it
    return optimizer
