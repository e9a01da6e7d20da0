"""Loss and optimiser step of the decoder. Twins: torch_ref/train.py, jaxbench/eqx/train.py.

Compile a step with `jax.jit(train_step, donate_argnums=0)`: the state is a pytree whose graph and hyperparameters are
static, so the step is a pure function of arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int


class Batch(NamedTuple):
    """One step's data."""

    tokens: Int[Array, "B T"]
    targets: Int[Array, "B T"]  # the token that follows
    positions: Int[Array, "B T"]  # -1 = padding
    mask: Bool[Array, "B T"]  # True where the target counts
    segments: Int[Array, "B T"] | None = None  # packed documents; None = one document a row


class AdamW(NamedTuple):
    """Hyperparameters of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); decay acts on every parameter."""

    learning_rate: float
    b1: float  # decay of the first moment, 0 <= b1 < 1
    b2: float  # decay of the second moment, 0 <= b2 < 1
    eps: float  # added to the root of the corrected second moment
    weight_decay: float  # decoupled: times learning_rate per step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters and optimiser moments; the model's graph and the hyperparameters are static."""

    params: nnx.State
    moments: Any  # optax state
    graph: nnx.GraphDef = dataclasses.field(metadata={"static": True})
    optimizer: AdamW = dataclasses.field(metadata={"static": True})


def cross_entropy(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """Return the mean negative log likelihood of the targets where mask is True, in nats per token.

    Computed in at least float32; 0 where no target counts.
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    picked = jnp.take_along_axis(wide, targets[:, :, None], axis=-1)[:, :, 0]
    losses = jax.nn.logsumexp(wide, axis=-1) - picked
    count = jnp.maximum(jnp.sum(mask), 1).astype(wide.dtype)
    return jnp.sum(jnp.where(mask, losses, jnp.zeros((), wide.dtype))) / count


def predict(model: Any, batch: Batch, *, dropout: tuple[Array, Array] | None = None) -> Float[Array, "B T V"]:
    """Return the model's logits on a batch; dropout is (Philox key, step), None = off."""
    return model(batch.tokens, batch.positions, segments=batch.segments, dropout=dropout)


def loss_of(output: Float[Array, "B T V"], batch: Batch) -> Float[Array, ""]:
    """Return the loss of what `predict` returned, nats per token."""
    return cross_entropy(output, batch.targets, batch.mask)


def loss_fn(model: Any, batch: Batch, *, dropout: tuple[Array, Array] | None = None) -> Float[Array, ""]:
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
    graph, params = nnx.split(model, nnx.Param)
    return TrainState(params, _transform(optimizer).init(params), graph, optimizer)


def train_step(
    state: TrainState,
    batch: Any,
    *,
    dropout: tuple[Array, Array] | None = None,
    loss_fn: Callable[..., Array] = loss_fn,
) -> tuple[TrainState, Float[Array, ""]]:
    """Return the state after one AdamW step, and the loss before it.

    loss_fn(model, batch, dropout=...) is the loss to descend: a workload passes its own, with a batch of its own.
    """

    def loss_at(params: nnx.State) -> Float[Array, ""]:
        return loss_fn(nnx.merge(state.graph, params), batch, dropout=dropout)

    loss, grads = jax.value_and_grad(loss_at)(state.params)
    updates, moments = _transform(state.optimizer).update(grads, state.moments, state.params)
    return dataclasses.replace(state, params=optax.apply_updates(state.params, updates), moments=moments), loss


def state_arrays(state: TrainState) -> dict[str, dict[str, np.ndarray]]:
    """Return "params", "first_moment" and "second_moment" by dotted parameter name."""
    first = optax.tree_utils.tree_get(state.moments, "mu")
    second = optax.tree_utils.tree_get(state.moments, "nu")
    trees = {"params": state.params, "first_moment": first, "second_moment": second}
    return {kind: by_name(tree) for kind, tree in trees.items()}


def by_name(tree: nnx.State) -> dict[str, np.ndarray]:
    """Return a parameter-shaped state (such as gradients) as arrays by dotted name, at least float32."""
    flat = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(tree)}
    return {name: np.asarray(x, dtype=jnp.promote_types(x.dtype, jnp.float32)) for name, x in flat.items()}


def _transform(optimizer: AdamW) -> optax.GradientTransformation:
    return optax.adamw(**optimizer._asdict())
