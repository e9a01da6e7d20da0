"""Attention over a row whose tokens are split over devices: keys and values rotate in a ring (context parallelism).

Call it within shard_map, each device with its part of the tokens. In step r a device attends to the part of the device
r places before it, while keys and values move on by one (ppermute); the online softmax combines the steps. The backward
pass goes round the ring once more; the gradients of keys and values travel with them, so that no device ever holds more
than one part of anything. Within a step, scores are computed for one block of keys at a time, forward and backward, so
that temporaries grow linearly with a device's tokens. Blocks with no key that a query may attend to are skipped.

Source: Liu et al. 2023, arXiv:2310.01889, algorithm 1; Dao 2023, arXiv:2307.08691, algorithm 2, for the gradient.
Differs from the paper: parts are contiguous, so later devices of a causal row do more of the work.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Shaped

from jaxbench import functional
from jaxbench.attention import Spans, attention_mask

Query = Float[Array, "B K G T H"]  # or attention output, or a gradient of either
Key = Float[Array, "B K H S"]
Value = Float[Array, "B K S H"]


class Ring(NamedTuple):
    """Static settings of one ring attention."""

    axis: str  # of the mesh, whose devices form the ring
    sliding_window: int | None  # tokens that a query attends to, including itself; None = all before it
    block_size: int  # keys whose scores are held at once; divides the keys of a device
    softcap: float | None = None  # scores become softcap * tanh(score / softcap); None = they stay


def ring_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K H S"],
    value: Float[Array, "B K S H"],
    spans: Spans,
    *,
    sliding_window: int | None = None,
    axis: str,
    block_size: int = 128,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Attention output of this device's queries over the keys of all devices of a mesh axis; call under shard_map.

    The output of a query that may attend to nothing is zeros. Scores and sums are in at least float32.

    Args:
      query, key, value: this device's tokens; N is a multiple of K.
      spans: the same tokens' positions and segments.
      sliding_window: tokens that a query attends to, including itself; None = all before it.
      axis: mesh axis over which a row's tokens are split.
      block_size: keys whose scores are held at once.
      softcap: scores become softcap * tanh(score / softcap); None = they stay.
    """
    batch, length, num_heads, head_dim = query.shape
    grouped = query.reshape(batch, length, key.shape[1], num_heads // key.shape[1], head_dim).transpose(0, 2, 3, 1, 4)
    size = min(block_size, key.shape[3])
    spans = spans._replace(key_positions=_padded(spans.key_positions, size, 1, -1))
    if spans.key_segments is not None:
        spans = spans._replace(key_segments=_padded(spans.key_segments, size, 1, -1))
    ring = Ring(axis, sliding_window, size, softcap)
    mixed = _ring(ring, grouped, _padded(key, size, 3), _padded(value, size, 2), spans)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)


def _padded(x: Shaped[Array, "..."], size: int, axis: int, fill: int = 0) -> Shaped[Array, "..."]:
    """Pad an axis to a multiple of size; added keys have position -1, which nothing attends to."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, widths, constant_values=fill)


def _einsum(equation: str, left: Array, right: Array) -> Array:
    """Compute einsum with sums and result in at least float32."""
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.promote_types(left.dtype, jnp.float32))


def _scores(ring: Ring, query: Query, key: Key, mask: Bool[Array, "B T S"]) -> Float[Array, "B K G T S"]:
    """Scaled and capped scores, -inf where the mask is False."""
    scores = _einsum("BKGTH,BKHS->BKGTS", query, key) / math.sqrt(query.shape[-1])
    scores = scores if ring.softcap is None else functional.softcap(scores, cap=ring.softcap)
    return jnp.where(mask[:, None, None], scores, -jnp.inf)


def _round(axis: str, step, start: tuple, moving: tuple, spans: Spans) -> tuple[tuple, tuple]:
    """Go once round the ring: step(carry, moving, spans) -> (carry, moving) with the keys of every device in turn.

    `moving` and the keys' positions and segments move on by one device per step, and end where they began.
    """
    size = lax.axis_size(axis)
    pairs = [(device, (device + 1) % size) for device in range(size)]

    def body(state: tuple, _: None) -> tuple[tuple, None]:
        carry, moving, positions, segments = state
        carry, moving = step(carry, moving, spans._replace(key_positions=positions, key_segments=segments))
        moved = jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), (moving, positions, segments))
        return (carry, *moved), None

    state = (start, moving, spans.key_positions, spans.key_segments)
    (carry, moving, _, _), _ = lax.scan(body, state, length=size)
    return carry, moving


def _block(spans: Spans, ring: Ring, start: Int[Array, ""], key: Key, value: Value) -> tuple[Key, Value, Array]:
    """Keys [B K H block], values [B K block H] and attention mask [B T block] of the block at `start`."""
    cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=ring.block_size)
    block = spans._replace(key_positions=cut(spans.key_positions, axis=1))
    if spans.key_segments is not None:
        block = block._replace(key_segments=cut(spans.key_segments, axis=1))
    return cut(key, axis=3), cut(value, axis=2), attention_mask(block, ring.sliding_window)


def _starts(spans: Spans, ring: Ring) -> Int[Array, " blocks"]:
    """Index of the first key of every block."""
    return jnp.arange(0, spans.key_positions.shape[1], ring.block_size, dtype=jnp.int32)


def _forward(ring: Ring, query: Query, key: Key, value: Value, spans: Spans) -> tuple[Query, Float[Array, "B K G T 1"]]:
    """Attention output, and the log-sum-exp of each query's scores, -inf if it has no key."""
    wide = jnp.promote_types(query.dtype, jnp.float32)

    def absorb(carry: tuple, key: Key, value: Value, mask: Bool[Array, "B T S"]) -> tuple:
        peak, total, summed = carry
        scores = _scores(ring, query, key, mask)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1, keepdims=True))
        safe_peak = jnp.where(jnp.isfinite(new_peak), new_peak, jnp.zeros((), wide))
        shrink, weights = jnp.exp(peak - safe_peak), jnp.exp(scores - safe_peak)
        mixed = _einsum("BKGTS,BKSH->BKGTH", weights.astype(value.dtype), value)
        return new_peak, total * shrink + jnp.sum(weights, axis=-1, keepdims=True), summed * shrink + mixed

    def step(carry: tuple, moving: tuple, spans: Spans) -> tuple[tuple, tuple]:
        def over_block(carry: tuple, start: Array) -> tuple[tuple, None]:
            key, value, mask = _block(spans, ring, start, *moving)
            return lax.cond(jnp.any(mask), absorb, lambda carry, *_: carry, carry, key, value, mask), None

        return lax.scan(over_block, carry, _starts(spans, ring))[0], moving

    column = (*query.shape[:4], 1)
    start = (jnp.full(column, -jnp.inf, wide), jnp.zeros(column, wide), jnp.zeros(query.shape, wide))
    (peak, total, summed), _ = _round(ring.axis, step, start, (key, value), spans)
    mixed = summed / jnp.where(total > 0, total, jnp.ones((), wide))
    return mixed, peak + jnp.log(total)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: Ring, query: Query, key: Key, value: Value, spans: Spans) -> Query:
    return _forward(ring, query, key, value, spans)[0]


def _ring_forward(ring: Ring, query: Query, key: Key, value: Value, spans: Spans) -> tuple[Query, tuple]:
    mixed, normaliser = _forward(ring, query, key, value, spans)
    return mixed, (query, key, value, spans, mixed, normaliser)


def _ring_backward(ring: Ring, residuals: tuple, grad: Query) -> tuple[Query, Key, Value, None]:
    query, key, value, spans, mixed, normaliser = residuals
    wide = grad.dtype
    normaliser = jnp.where(jnp.isfinite(normaliser), normaliser, jnp.full_like(normaliser, jnp.inf))  # weights 0
    along = jnp.sum(grad * mixed, axis=-1, keepdims=True)

    def pull_back(grads: tuple, key: Key, value: Value, mask: Bool[Array, "B T S"]) -> tuple[Array, Array, Array]:
        query_grad, key_grad, value_grad = grads
        scores = _scores(ring, query, key, mask)
        weights = jnp.exp(scores - normaliser)
        upstream = _einsum("BKGTH,BKSH->BKGTS", grad, value.astype(wide))
        scores_grad = weights * (upstream - along) / math.sqrt(query.shape[-1])
        if ring.softcap is not None:  # derivative of tanh; a masked score has no gradient
            slope = 1.0 - jnp.square(jnp.where(mask[:, None, None], scores, 0.0) / ring.softcap)
            scores_grad = scores_grad * slope
        value_grad = value_grad + _einsum("BKGTS,BKGTH->BKSH", weights, grad)
        key_grad = key_grad + _einsum("BKGTH,BKGTS->BKHS", query.astype(wide), scores_grad)
        query_grad = query_grad + _einsum("BKGTS,BKHS->BKGTH", scores_grad, key.astype(wide))
        return query_grad, key_grad, value_grad

    def step(query_grad: Array, moving: tuple, spans: Spans) -> tuple[Array, tuple]:
        key, value, *grads = moving

        def over_block(grads: tuple, start: Array) -> tuple[tuple, None]:
            query_grad, *whole = grads
            parts = (lax.dynamic_slice_in_dim(x, start, ring.block_size, axis) for x, axis in zip(whole, (3, 2)))
            key_part, value_part, mask = _block(spans, ring, start, key, value)
            same = lambda grads, *_: grads
            query_grad, *parts = lax.cond(
                jnp.any(mask), pull_back, same, (query_grad, *parts), key_part, value_part, mask
            )
            put = lax.dynamic_update_slice_in_dim
            return (query_grad, *(put(x, part, start, axis) for x, part, axis in zip(whole, parts, (3, 2)))), None

        (query_grad, *grads), _ = lax.scan(over_block, (query_grad, *grads), _starts(spans, ring))
        return query_grad, (key, value, *grads)

    moving = (key, value, jnp.zeros(key.shape, wide), jnp.zeros(value.shape, wide))
    query_grad, (_, _, key_grad, value_grad) = _round(ring.axis, step, jnp.zeros(query.shape, wide), moving, spans)
    return query_grad.astype(query.dtype), key_grad.astype(key.dtype), value_grad.astype(value.dtype), None


_ring.defvjp(_ring_forward, _ring_backward)
