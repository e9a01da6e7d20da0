"""Regression on a target at every token: the task of the memories' parity cases. Twin: jaxbench/memory/target.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils._pytree import tree_leaves


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


def predict(model: torch.nn.Module, batch: Batch, *, dropout: None = None) -> tuple:
    """Output of a memory or block on a batch, the state behind it and the losses that it has; there is no dropout."""
    return model(batch.x.to(next(model.parameters()).dtype), is_token=batch.is_token)


def loss_of(output: tuple, batch: Batch) -> Float[Tensor, ""]:
    """Mean squared error at tokens, plus the memory's own losses, plus mean squares of the state's arrays."""
    memory_out, state, *losses = output
    loss = mean_squared_error(memory_out, batch)
    loss = sum((own.to(loss.dtype) for own in losses), loss)
    for leaf in tree_leaves(state):
        if leaf is not None and leaf.is_floating_point() and leaf.numel():
            loss = loss + torch.square(leaf.to(loss.dtype)).mean()
    return loss


def loss_fn(model: torch.nn.Module, batch: Batch, *, dropout: None = None) -> Float[Tensor, ""]:
    """Training loss on a batch: `loss_of` of `predict`."""
    return loss_of(predict(model, batch, dropout=dropout), batch)
