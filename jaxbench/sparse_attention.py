"""Block-sparse attention whose work grows with the visible blocks, not with the square of the row.

Twin: torch_ref/sparse_attention.py.

Each pair of a query block and a key block that it sees is one product: scores of all pairs at once, then a softmax
over the pairs of a query block. Invisible blocks are never multiplied. Axis letters beyond WORKSPACE.md's: P pairs,
n blocks of a row, C slots of a block, R = G * C query rows of a key-value head in a block.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxbench import attention, narrow_products
from jaxbench.attention import Spans, split_blocks
from jaxbench.block_pattern import BlockPattern


def block_sparse_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K H T"],
    value: Float[Array, "B K T H"],
    spans: Spans,
    *,
    pattern: BlockPattern,
) -> Float[Array, "B T N H"]:
    """Attention output as of attention.attention, with the blocks that the pattern leaves out masked as well.

    Softmax in at least float32, result in the query's dtype; a row that may attend to nothing returns zeros. Query t is
    the token of key t: whole rows, as in training and prefill. Blocks consist of slots, so that padding in front of a
    row shifts its tokens relative to them.

    Raises:
      ValueError: the numbers of keys and queries differ, or N is not a multiple of K.
    Source: Zaheer et al. 2020, arXiv:2007.14062, appendix D, which gathers blocks of keys in the same way.
    """
    batch, length, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if key.shape[3] != length:
        raise ValueError(f"block_sparse_attention: {length} queries with {key.shape[3]} keys, wanted whole rows")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"block_sparse_attention: num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}"
        )
    if length == 0:
        return jnp.zeros_like(query)
    if spans.key_positions is None:
        spans = spans._replace(key_positions=spans.query_positions)
    size, count = pattern.block_size, pattern.num_blocks(length)
    rows, columns = pattern.pairs(count)
    # [n, E, R, H], [n, E, H, C] and [n, E, C, H] with E = B * K: products then have two batch axes, P and E.
    queries = split_blocks(query.astype(key.dtype).reshape(batch, length, num_kv_heads, -1, head_dim), size, axis=1)
    queries = queries.transpose(0, 1, 3, 4, 2, 5).reshape(count, batch * num_kv_heads, -1, head_dim)
    keys = split_blocks(key, size, axis=3).reshape(count, batch * num_kv_heads, head_dim, size)
    values = split_blocks(value, size, axis=2).reshape(count, batch * num_kv_heads, size, head_dim)
    scores = narrow_products.product(queries[rows], keys[columns]) / math.sqrt(head_dim)
    mask = _pair_mask(spans, rows, columns, size)[:, :, None, None]  # [P, B, 1, 1, C, C]
    split = scores.reshape(len(rows), batch, num_kv_heads, -1, size, size)
    scores = jnp.where(mask, split, -jnp.inf).reshape(scores.shape)
    peak = jax.lax.stop_gradient(jax.ops.segment_max(jnp.max(scores, axis=-1), rows, count, indices_are_sorted=True))
    peak = jnp.where(jnp.isfinite(peak), peak, jnp.zeros((), peak.dtype))  # [n, E, R]
    weights = jnp.exp(scores - peak[rows][..., None])
    total = jax.ops.segment_sum(jnp.sum(weights, axis=-1), rows, count, indices_are_sorted=True)[..., None]
    mixed = narrow_products.product(weights.astype(value.dtype), values[columns])
    mixed = jax.ops.segment_sum(mixed, rows, count, indices_are_sorted=True)
    mixed = mixed / jnp.where(total > 0, total, jnp.ones((), total.dtype))
    mixed = mixed.reshape(count, batch, num_kv_heads, -1, size, head_dim).transpose(1, 0, 4, 2, 3, 5)
    return mixed.reshape(batch, count * size, num_heads, head_dim)[:, :length].astype(query.dtype)


def _pair_mask(spans: Spans, rows: np.ndarray, columns: np.ndarray, size: int) -> Array:
    """Attention mask [P, B, C, C] of each pair of blocks."""
    indices = (rows, columns, rows, columns)  # of queries and keys, as Spans has them
    cut = [
        None if x is None else split_blocks(x, size, axis=1, fill=-1)[i] for x, i in zip(spans, indices, strict=True)
    ]
    merged = Spans(*(None if x is None else x.reshape(-1, size) for x in cut))
    return attention.attention_mask(merged, None).reshape(len(rows), -1, size, size)
