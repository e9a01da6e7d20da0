"""Grouped-query attention: one function for every kernel.

Twin: torch_ref/attention.py.

The attention mask is derived from integers, not stored: a key at position p is visible to a query at position q if
0 <= p <= q, q - p < sliding_window, and both are in the same segment. If attention is not causal, a key is visible to
every query of its segment. Position -1 is padding.

Keys are "B K H S" and values "B K S H", so that XLA:CPU multiplies both without transposing the cache.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jaxbench import functional, fused_attention, narrow_products, prompts, sharding

KERNELS = ("fused", "cudnn", "splash")
IMPLEMENTATIONS = ("dense", "blocked", *KERNELS)
SHARED = -1  # segment of keys that are visible to every segment: a prompt shared by several answers


class KVCache(NamedTuple):
    """Keys and values of each layer. `positions` has the position of each slot's token; -1 marks an empty slot.

    E = B * K merges rows and heads, so that the products of decoding read the cache in place (docs/xla_cpu.md,
    rule 4).
    """

    keys: tuple[Float[Array, "E H S"] | None, ...]  # None = the layer keeps none
    values: tuple[Float[Array, "E S H"] | None, ...]
    positions: Int[Array, "B S"]
    memory: tuple[Any, ...] = ()  # other state of each layer, with its auxiliary `loss`; None = it has none

    def padded(self, length: int, *, dtype: str) -> KVCache:
        """Append empty slots, up to `length` in all, and cast keys and values to dtype.

        Raises:
          ValueError: the cache already has more slots.
        """
        extra = length - self.positions.shape[1]
        if extra < 0:
            raise ValueError(f"cache: {self.positions.shape[1]} slots cannot be padded to length={length}")

        def pad(x: Array | None, *widths: tuple[int, int]) -> Array | None:
            return None if x is None else jnp.pad(x.astype(dtype), widths)

        keys = tuple(pad(key, (0, 0), (0, 0), (0, extra)) for key in self.keys)
        values = tuple(pad(value, (0, 0), (0, extra), (0, 0)) for value in self.values)
        positions = jnp.pad(self.positions, ((0, 0), (0, extra)), constant_values=-1)
        return KVCache(keys, values, positions, self.memory)

    def check_room(
        self, slot: Int[Array, ""] | int | None, num_tokens: int, segments: Int[Array, "B T"] | None
    ) -> None:
        """Check a call that writes its tokens from `slot` on; a slot that is not a Python number cannot be checked.

        Raises:
          ValueError: the tokens do not fit from the slot on, or the call has segments, which a cache does not store.
        """
        if segments is not None:
            raise ValueError(f"features: segments {tuple(segments.shape)} with a cache, which keeps none; wanted None")
        num_slots = self.positions.shape[1]
        if isinstance(slot, int) and not 0 <= slot <= num_slots - num_tokens:
            raise ValueError(
                f"features: {num_tokens} tokens from slot={slot} on do not fit a cache of {num_slots} slots"
            )


class Spans(NamedTuple):
    """Positions and segments of queries and keys, from which the attention mask follows."""

    query_positions: Int[Array, "B T"]
    # None = one document per row without padding, and the queries' own keys: key s is at position s.
    key_positions: Int[Array, "B S"] | None
    query_segments: Int[Array, "B T"] | None = None
    key_segments: Int[Array, "B S"] | None = None


class Context(NamedTuple):
    """What all layers of one call share."""

    spans: Spans
    angles: tuple[Float[Array, "B T h"], Float[Array, "B T h"]] | None  # cosine, sine; None with learned positions
    slot: Int[Array, ""] | int | None  # cache slot of the call's first key; None without a cache
    dropout_stream: functional.DropoutStream | None  # None = no dropout
    local_angles: tuple[Float[Array, "B T h"], Float[Array, "B T h"]] | None = None  # of layers with a window (Gemma 3)


def attention_mask(spans: Spans, sliding_window: int | None, is_causal: bool = True) -> Bool[Array, "B T S"]:
    """Attention mask: True where a query may attend to a key; sliding_window in tokens, None = no window."""
    query, key = spans.query_positions[:, :, None], spans.key_positions[:, None, :]
    mask = (key >= 0) & ((key <= query) if is_causal else (query >= 0))
    if sliding_window is not None:
        mask &= query - key < sliding_window
    if spans.query_segments is not None and spans.key_segments is not None:
        key = spans.key_segments[:, None, :]
        mask &= (spans.query_segments[:, :, None] == key) | (key == SHARED)
    return mask


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K H S"],
    value: Float[Array, "B K S H"],
    spans: Spans,
    *,
    sliding_window: int | None = None,
    is_causal: bool = True,
    is_ordered: bool = False,
    implementation: str = "dense",
    block_size: int = 128,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Grouped-query attention output; softmax in at least float32, result in the query's dtype.

    Products use the keys' dtype, so that a cache may be wider than the model.

    A query that may attend to nothing gets zeros, as does every query of a call without keys; a call without queries
    returns an empty array. is_ordered=True states that attention is causal, query i is the token of key i and positions
    increase along a row within a segment: `dense` may then skip keys that come after a query. is_causal=False: a query
    sees all keys of its segment, and sliding_window is None. `dense` holds all scores; `blocked` holds scores of
    block_size keys at a time, so that memory grows linearly with S; `fused` is this platform's kernel, for more than
    one query: `cudnn` on GPU, `splash` on TPU (by these names, they also compile ahead of time for a platform that is
    not attached). softcap: scores become softcap * tanh(score / softcap); None = unchanged.

    Raises:
      ValueError: N is not a multiple of K, or the implementation is unknown, not available on this platform, or has no
        softcap.
    Sources: Ainslie et al. 2023, arXiv:2305.13245; Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax).
    """
    num_heads, num_kv_heads = query.shape[2], key.shape[1]
    if query.shape[1] == 1 and implementation in KERNELS:
        implementation = "dense"  # a decode step's single query reads the cache once either way
    is_plain = spans.key_positions is None and spans.query_segments is None
    spans = spans._replace(key_positions=spans.query_positions) if is_plain else spans
    on_mesh = sharding.mesh_attention() if is_ordered else None
    _check(num_heads, num_kv_heads, implementation, softcap)
    if 0 in (query.shape[1], key.shape[3]):
        return jnp.zeros_like(query)
    if on_mesh is not None:
        return on_mesh(
            query, key, value, spans, sliding_window=sliding_window, implementation=implementation,
            block_size=block_size, softcap=softcap,
        )  # fmt: skip
    if implementation in KERNELS:
        mask = functools.partial(attention_mask, spans, sliding_window, is_causal)
        return fused_attention.attention(
            query, key, value, spans.query_positions, spans.query_segments, sliding_window=sliding_window,
            mask=None if is_plain and is_causal else mask, is_causal=is_causal, kernel=implementation,
        )  # fmt: skip
    batch, length, _, head_dim = query.shape
    grouped = query.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4).astype(key.dtype)
    if implementation == "blocked" and key.shape[3] > block_size:
        mixed = _blocked(grouped, key, value, spans, sliding_window, is_causal, block_size, softcap)
    else:
        dense = _ordered if is_ordered else _dense
        mixed = dense(grouped, key, value, attention_mask(spans, sliding_window, is_causal), softcap)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)


def _check(num_heads: int, num_kv_heads: int, implementation: str, softcap: float | None) -> None:
    """Raise ValueError for what `attention` can compute on no platform; its docstring lists it."""
    if num_heads % num_kv_heads:
        raise ValueError(f"attention: num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention: implementation={implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    if softcap is not None and implementation not in ("dense", "blocked"):
        raise ValueError(
            f"attention: softcap={softcap} goes with dense and blocked attention, not with "
            f"implementation={implementation!r}"
        )


def attention_weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K H S"],
    mask: Bool[Array, "B T S"],
    *,
    softcap: float | None = None,
) -> Float[Array, "B N T S"]:
    """Attention weights by which `dense` multiplies values, in at least float32; zeros for a query that sees no key."""
    batch, length, num_heads, head_dim = query.shape
    grouped = query.reshape(batch, length, key.shape[1], -1, head_dim).transpose(0, 2, 3, 1, 4).astype(key.dtype)
    return _softmax(_scores(grouped, key, mask, softcap)).reshape(batch, num_heads, length, -1)


def split_blocks(x: Array, size: int, *, axis: int, fill: int = 0) -> Array:
    """Split an axis into blocks of `size` slots, the last one padded with `fill`; the block index is the first axis."""
    count = -(-x.shape[axis] // size)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, count * size - x.shape[axis])
    padded = jnp.pad(x, widths, constant_values=fill)
    return jnp.moveaxis(padded.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)


def _scores(
    query: Float[Array, "B K G T H"], key: Float[Array, "B K H S"], mask: Bool[Array, "B T S"], softcap: float | None
) -> Array:
    """Scaled attention scores [B K G T S], capped, -inf where the mask is False."""
    merged = narrow_products.product(_merge(query, 2, 2), _merge(key, 2, 1))
    scores = merged.reshape(*query.shape[:4], key.shape[3]) / math.sqrt(query.shape[-1])
    scores = scores if softcap is None else functional.softcap(scores, cap=softcap)
    return jnp.where(mask[:, None, None], scores, -jnp.inf)


def _softmax(scores: Array) -> Array:
    """Softmax over keys; zeros for a query without visible keys."""
    weights = jnp.exp(scores - _row_max(scores))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, jnp.ones((), total.dtype))


def _plain_softmax(scores: Array) -> Array:
    """Compute `_softmax` in a form that XLA's GPU compiler recognises: one kernel instead of three (docs/gpu.md)."""
    weights = jax.nn.softmax(jnp.maximum(scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.where(jnp.isneginf(scores), jnp.zeros((), scores.dtype), weights)


def _mix(weights: Float[Array, "B K G T S"], value: Float[Array, "B K S H"]) -> Float[Array, "B K G T H"]:
    """Weighted sums of values, in at least float32."""
    merged = narrow_products.product(_merge(weights.astype(value.dtype), 2, 2), _merge(value, 2, 1))
    return merged.reshape(*weights.shape[:4], value.shape[3])


def _merge(x: Array, leading: int, middle: int) -> Array:
    """Merge the first `leading` axes into one and the next `middle` ones into another.

    Products over one batch axis read the cache in place; over two, XLA:CPU copies the cache when B is 1.
    """
    return x.reshape(math.prod(x.shape[:leading]), math.prod(x.shape[leading : leading + middle]), -1)


def _row_max(scores: Array) -> Array:
    """Maximum over keys, 0 for a query without visible keys: exp then gives 0, not NaN."""
    peak = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    return jnp.where(jnp.isfinite(peak), peak, jnp.zeros((), peak.dtype))


def _dense(
    query: Float[Array, "B K G T H"],
    key: Float[Array, "B K H S"],
    value: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
    softcap: float | None,
) -> Float[Array, "B K G T H"]:
    scores = _scores(query, key, mask, softcap)
    if query.shape[3] == 1:  # a decode step
        return _mix(lax.platform_dependent(scores, cpu=_softmax, default=_plain_softmax), value).astype(query.dtype)
    return _mix(_softmax(scores), value).astype(query.dtype)


def _ordered(
    query: Float[Array, "B K G T H"],
    key: Float[Array, "B K H T"],
    value: Float[Array, "B K T H"],
    mask: Bool[Array, "B T T"],
    softcap: float | None,
) -> Float[Array, "B K G T H"]:
    """Attend with one part of the queries at a time, each to the keys up to its own end."""
    parts = []
    for start, end in prompts.query_parts(query.shape[3]):
        visible = (key[..., :end], value[:, :, :end], mask[:, start:end, :end])
        parts.append(_dense(query[:, :, :, start:end], *visible, softcap))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=3)


def _blocked(
    query: Float[Array, "B K G T H"],
    key: Float[Array, "B K H S"],
    value: Float[Array, "B K S H"],
    spans: Spans,
    sliding_window: int | None,
    is_causal: bool,
    block_size: int,
    softcap: float | None,
) -> Float[Array, "B K G T H"]:
    """Online softmax over blocks of keys, one block of queries at a time.

    Each block of queries is rematerialised in the backward pass, so that memory stays linear in S there too.
    """
    length = query.shape[3]
    keys, queries = (spans.key_positions, spans.key_segments), (spans.query_positions, spans.query_segments)
    positions = [None if x is None else split_blocks(x, block_size, axis=1, fill=-1) for x in keys]
    blocks = (split_blocks(key, block_size, axis=3), split_blocks(value, block_size, axis=2), *positions)
    part = min(length, block_size)
    positions = [None if x is None else split_blocks(x, part, axis=1, fill=-1) for x in queries]

    @jax.checkpoint
    def attend(part: tuple) -> Float[Array, "B K G part H"]:
        query, positions, segments = part
        wide = jnp.promote_types(query.dtype, jnp.float32)
        start = (jnp.full((*query.shape[:4], 1), -jnp.inf, wide), jnp.zeros((*query.shape[:4], 1), wide))

        def absorb(carry: tuple, block: tuple) -> tuple[tuple, None]:
            key, value, key_positions, key_segments = block
            own = Spans(positions, key_positions, segments, key_segments)
            mask = attention_mask(own, sliding_window, is_causal)
            return _absorb(carry, _scores(query, key, mask, softcap), value), None

        (_, total, summed), _ = lax.scan(absorb, (*start, jnp.zeros(query.shape, wide)), blocks)
        return (summed / jnp.where(total > 0, total, jnp.ones((), wide))).astype(query.dtype)

    out = jnp.moveaxis(lax.map(attend, (split_blocks(query, part, axis=3), *positions)), 0, 3)  # [B K G parts part H]
    return out.reshape(*query.shape[:3], -1, query.shape[4])[:, :, :, :length]


def _absorb(carry: tuple[Array, Array, Array], scores: Array, value: Float[Array, "B K S H"]):
    """Add one block of keys to the running maximum, normaliser and weighted sum."""
    peak, total, summed = carry
    new_peak = jnp.maximum(peak, lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    safe_peak = jnp.where(jnp.isfinite(new_peak), new_peak, jnp.zeros((), peak.dtype))
    shrink = jnp.exp(peak - safe_peak)
    weights = jnp.exp(scores - safe_peak)
    total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
    summed = summed * shrink + _mix(weights, value)
    return new_peak, total, summed
