"""Loss and optimiser step of the decoder. Twins: jaxbench/train.py, jaxbench/eqx/train.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Batch(NamedTuple):
    """One step's data."""

    tokens: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]  # the token that follows
    positions: Int[Tensor, "B T"]  # -1 = padding
    mask: Bool[Tensor, "B T"]  # True where the target counts
    segments: Int[Tensor, "B T"] | None = None  # packed documents; None = one document a row


class AdamW(NamedTuple):
    """Hyperparameters of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); decay acts on every parameter."""

    learning_rate: float
    b1: float  # decay of the first moment, 0 <= b1 < 1
    b2: float  # decay of the second moment, 0 <= b2 < 1
    eps: float  # added to the root of the corrected second moment
    weight_decay: float  # decoupled: times learning_rate per step


@dataclasses.dataclass(frozen=True)
class TrainState:
    """The model with its parameters, and the optimiser that holds the moments; a step changes both in place."""

    params: torch.nn.Module
    moments: torch.optim.Optimizer
    optimizer: AdamW


def cross_entropy(
    logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Return the mean negative log likelihood of the targets where mask is True, in nats per token.

    Computed in at least float32; 0 where no target counts.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    picked = torch.gather(wide, -1, targets[:, :, None].long())[:, :, 0]
    losses = torch.logsumexp(wide, dim=-1) - picked
    count = mask.sum().clamp(min=1).to(wide.dtype)
    return torch.where(mask, losses, losses.new_zeros(())).sum() / count


def predict(model: Any, batch: Batch, *, dropout: tuple[Tensor, Tensor | int] | None = None) -> Float[Tensor, "B T V"]:
    """Return the model's logits on a batch; dropout is (Philox key, step), None = off."""
    return model(batch.tokens, batch.positions, segments=batch.segments, dropout=dropout)


def loss_of(output: Float[Tensor, "B T V"], batch: Batch) -> Float[Tensor, ""]:
    """Return the loss of what `predict` returned, nats per token."""
    return cross_entropy(output, batch.targets, batch.mask)


def loss_fn(model: Any, batch: Batch, *, dropout: tuple[Tensor, Tensor | int] | None = None) -> Float[Tensor, ""]:
    """Return the model's loss on a batch, nats per token; dropout is (Philox key, step), None = off.

    Where layers hand on a loss of their own, such as that of a bank's compression, it is added.
    """
    if not model.auxiliary_weight:
        return loss_of(predict(model, batch, dropout=dropout), batch)
    hidden, cache = model.features(batch.tokens, batch.positions, segments=batch.segments, dropout=dropout)
    auxiliary = sum(layer.loss for layer in cache.memory if layer is not None)
    return loss_of(model.logits(hidden), batch) + model.auxiliary_weight * auxiliary


def init_state(model: Any, optimizer: AdamW) -> TrainState:
    """Return the state before the first step, holding the model's parameters."""
    o = optimizer
    moments = torch.optim.AdamW(
        model.parameters(), lr=o.learning_rate, betas=(o.b1, o.b2), eps=o.eps, weight_decay=o.weight_decay
    )
    return TrainState(model, moments, optimizer)


def train_step(
    state: TrainState,
    batch: Any,
    *,
    dropout: tuple[Tensor, Tensor | int] | None = None,
    loss_fn: Callable[..., Tensor] = loss_fn,
) -> tuple[TrainState, Float[Tensor, ""]]:
    """Return the state after one AdamW step, and the loss before it.

    loss_fn(model, batch, dropout=...) is the loss to descend: a workload passes its own, with a batch of its own.
    """
    state.moments.zero_grad(set_to_none=True)
    loss = loss_fn(state.params, batch, dropout=dropout)
    loss.backward()
    state.moments.step()
    return state, loss.detach()


def state_arrays(state: TrainState) -> dict[str, dict[str, np.ndarray]]:
    """Return "params", "first_moment" and "second_moment" by dotted parameter name."""
    named = dict(state.params.named_parameters())
    held = {name: state.moments.state[parameter] for name, parameter in named.items()}
    trees = {
        "params": named,
        "first_moment": {name: moments["exp_avg"] for name, moments in held.items()},
        "second_moment": {name: moments["exp_avg_sq"] for name, moments in held.items()},
    }
    return {kind: by_name(tree) for kind, tree in trees.items()}


def by_name(tree: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Return a parameter-shaped dictionary (such as gradients) as arrays by dotted name, at least float32."""
    return {
        name: x.detach().to(torch.promote_types(x.dtype, torch.float32)).cpu().numpy().copy()
        for name, x in tree.items()
    }
