"""Regression on a target at every token: the task of the memories' parity cases. Twin: torch_ref/memory/target.py."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float


class Batch(NamedTuple):
    """Inputs and targets of one training step."""

    x: Float[Array, "B T D"]
    target: Float[Array, "B T D"]
    is_token: Bool[Array, "B T"] | None  # None = no padding


def mean_squared_error(output: Float[Array, "B T D"], batch: Batch) -> Float[Array, ""]:
    """Mean squared error of an output at the batch's tokens, in at least float32."""
    wide = jnp.promote_types(output.dtype, jnp.float32)
    squares = jnp.mean(jnp.square(output.astype(wide) - batch.target.astype(wide)), axis=-1)
    is_token = jnp.ones(squares.shape, bool) if batch.is_token is None else batch.is_token
    return jnp.sum(jnp.where(is_token, squares, jnp.zeros((), wide))) / jnp.sum(is_token).astype(wide)


def predict(model: nnx.Module, batch: Batch, *, dropout: None = None) -> tuple:
    """Output of a memory or block on a batch, the state behind it and the losses that it has; there is no dropout."""
    return model(batch.x.astype(model.dtype), is_token=batch.is_token)


def loss_of(output: tuple, batch: Batch) -> Float[Array, ""]:
    """Mean squared error at tokens, plus the memory's own losses, plus mean squares of the state's arrays."""
    memory_out, state, *losses = output
    loss = mean_squared_error(memory_out, batch)
    loss = sum((own.astype(loss.dtype) for own in losses), loss)
    for leaf in jax.tree.leaves(state):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size:
            loss = loss + jnp.mean(jnp.square(leaf.astype(loss.dtype)))
    return loss


def loss_fn(model: nnx.Module, batch: Batch, *, dropout: None = None) -> Float[Array, ""]:
    """Training loss on a batch: `loss_of` of `predict`."""
    return loss_of(predict(model, batch, dropout=dropout), batch)
