"""Regression on a target at every token: the task of the memories' parity cases. Twin: jaxbench/memory/target.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Batch(NamedTuple):
    """Inputs and targets of one training step."""

    x: Float[Tensor, "B T D"]
    target: Float[Tensor, "B T D"]
    is_token: Bool[Tensor, "B T"] | None  # None = no padding


def mean_squared_error(output: Float[Tensor, "B T D"], batch: Batch) -> Float[Tensor, ""]:
    """Mean squared error of an output at the batch's tokens, in at least float32."""
    wide = torch.promote_types(output.dtype, torch.float32)
    squares = torch.square(output.to(wide) - batch.target.to(wide)).mean(dim=-1)
    is_token = torch.ones(squares.shape, dtype=torch.bool) if batch.is_token is None else batch.is_token
    return torch.where(is_token, squares, squares.new_zeros(())).sum() / is_token.sum().to(wide)


def predict(model: Any, batch: Batch, *, dropout: Any = None) -> tuple[Any, ...]:
    """Outputs [B T D] of a memory on a batch, the state after it and, if it has one, its own loss; no dropout."""
    return model(batch.x.to(getattr(torch, model.dtype)), is_token=batch.is_token)


def loss_of(output: tuple[Any, ...], batch: Batch) -> Float[Tensor, ""]:
    """Mean squared error at tokens, plus the memory's own loss, plus mean squares of the state's `penalised` arrays."""
    memory_out, state, *own = output
    error = mean_squared_error(memory_out, batch)
    loss = sum((each.to(error.dtype) for each in own), error)
    return sum((torch.square(x.to(error.dtype)).mean() for x in state.penalised), loss)


def loss_fn(model: Any, batch: Batch, *, dropout: Any = None) -> Float[Tensor, ""]:
    """Training loss on a batch: `loss_of` of `predict`."""
    return loss_of(predict(model, batch, dropout=dropout), batch)
