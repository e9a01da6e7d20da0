"""Regression on a target at every token: the task of the memories' parity cases. Twin: jaxbench/memory/target.py."""

from __future__ import annotations

from typing import NamedTuple

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
