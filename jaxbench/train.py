"""The decoder's loss and the batches it takes. Twin: torch_ref/train.py. The optimiser step: optimizer_step.py."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jaxbench import functional


class Batch(NamedTuple):
    """One step's data."""

    tokens: Int[Array, "B T"]
    targets: Int[Array, "B T"]  # the token that follows
    positions: Int[Array, "B T"] | None  # -1 = padding; None = 0, 1, ... in every row, one document each
    mask: Bool[Array, "B T"]  # True where the target counts
    segments: Int[Array, "B T"] | None = None  # packed documents; None = one document a row


def cross_entropy(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """Mean cross-entropy of the targets where mask is True, in nats per token.

    Computed in at least float32; 0 if no target counts. A target that does not count may be any number, but its logits
    must still be finite, or gradients are not: masking them would read all logits once more.
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    total = lax.platform_dependent(wide, cuda=_log_sum_exp, default=functools.partial(jax.nn.logsumexp, axis=-1))
    losses = total - _picked(wide, targets)
    count = jnp.maximum(jnp.sum(mask), 1).astype(wide.dtype)
    return jnp.sum(jnp.where(mask, losses, jnp.zeros((), wide.dtype))) / count


@jax.custom_vjp
def _log_sum_exp(logits: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """Log of the sum of exponentials, from one pass over the logits (Milakov and Gimelshein 2018, arXiv:1805.02867)."""

    def joined(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        is_larger = a[0] > b[0]
        apart = jnp.where(a[0] == b[0], jnp.zeros((), logits.dtype), -jnp.abs(a[0] - b[0]))
        shrunk = jnp.exp(apart)
        return lax.max(a[0], b[0]), jnp.where(is_larger, a[1] + b[1] * shrunk, a[1] * shrunk + b[1])

    start = (jnp.array(-jnp.inf, logits.dtype), jnp.zeros((), logits.dtype))
    peak, total = lax.reduce((logits, jnp.ones_like(logits)), start, joined, (2,))
    return peak + jnp.log(total)


def _log_sum_exp_forward(logits: Array) -> tuple[Array, tuple[Array, Array]]:
    result = _log_sum_exp(logits)
    return result, (logits, result)


def _log_sum_exp_backward(residuals: tuple[Array, Array], grad: Array) -> tuple[Array]:
    logits, result = residuals
    return (grad[:, :, None] * jnp.exp(logits - result[:, :, None]),)


_log_sum_exp.defvjp(_log_sum_exp_forward, _log_sum_exp_backward)


@jax.custom_vjp
def _picked(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Logit of each target.

    On GPUs its gradient is a comparison, which is fused into the softmax's pass over the logits; a gather's gradient
    scatters into zeros of the logits' size, which is faster on CPUs (docs/gpu.md).
    """
    return jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0]


def _picked_forward(logits: Array, targets: Array) -> tuple[Array, tuple[Array, Array]]:
    return _picked(logits, targets), (targets, jnp.zeros((0, logits.shape[-1]), logits.dtype))  # only its width


def _picked_backward(residuals: tuple[Array, Array], grad: Array) -> tuple[Array, None]:
    targets, empty = residuals
    scattered, compared = (functools.partial(way, vocab_size=empty.shape[-1]) for way in (_scattered, _compared))
    return lax.platform_dependent(grad, targets, cpu=scattered, default=compared), None


def _scattered(grad: Array, targets: Array, *, vocab_size: int) -> Float[Array, "B T V"]:
    logits = jax.ShapeDtypeStruct((*targets.shape, vocab_size), grad.dtype)
    return jax.linear_transpose(lambda x: jnp.take_along_axis(x, targets[:, :, None], axis=-1)[:, :, 0], logits)(grad)[
        0
    ]


def _compared(grad: Array, targets: Array, *, vocab_size: int) -> Float[Array, "B T V"]:
    is_target = jnp.arange(vocab_size, dtype=targets.dtype)[None, None] == targets[:, :, None]
    return jnp.where(is_target, grad[:, :, None], jnp.zeros((), grad.dtype))


_picked.defvjp(_picked_forward, _picked_backward)


def predict(model: Any, batch: Batch, *, dropout: functional.DropoutStream | None = None) -> Float[Array, "B T V"]:
    """Logits [B T V] of a model on a batch; dropout: None = off."""
    return model(batch.tokens, batch.positions, segments=batch.segments, dropout=dropout)


def loss_of(output: Float[Array, "B T V"], batch: Batch) -> Float[Array, ""]:
    """Cross-entropy of the logits that `predict` returns, in nats per token."""
    return cross_entropy(output, batch.targets, batch.mask)


def loss_fn(model: Any, batch: Batch, *, dropout: functional.DropoutStream | None = None) -> Float[Array, ""]:
    """Training loss of a model on a batch, in nats per token; dropout: None = off.

    If layers have an auxiliary loss, such as that of a bank's compression, it is added.
    """
    if not model.auxiliary_weight:
        return loss_of(predict(model, batch, dropout=dropout), batch)
    hidden, cache = model.features(batch.tokens, batch.positions, segments=batch.segments, dropout=dropout)
    auxiliary = sum(layer.loss for layer in cache.memory if layer is not None)
    return loss_of(model.logits(hidden), batch) + model.auxiliary_weight * auxiliary
