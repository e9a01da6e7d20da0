"""Block-sparse attention whose work grows with the visible blocks. Twin: jaxbench/sparse_attention.py.

Axis letters beyond WORKSPACE.md's: P pairs of a query block and a key block that it sees, n blocks of a row, C slots of
a block, R = G * C query rows of a key-value head in a block.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from jaxbench.block_pattern import BlockPattern
from torch_ref import attention
from torch_ref.attention import Spans, split_blocks


def block_sparse_attention(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B K H T"],
    value: Float[Tensor, "B K T H"],
    spans: Spans,
    *,
    pattern: BlockPattern,
) -> Float[Tensor, "B T N H"]:
    """Attention output, as jaxbench.sparse_attention.block_sparse_attention.

    Raises:
      ValueError: the numbers of keys and queries differ, or N is not a multiple of K.
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
        return torch.zeros_like(query)
    if spans.key_positions is None:
        spans = spans._replace(key_positions=spans.query_positions)
    size, count = pattern.block_size, pattern.num_blocks(length)
    rows, columns = (torch.from_numpy(index).long().to(query.device) for index in pattern.pairs(count))
    queries = split_blocks(query.to(key.dtype).reshape(batch, length, num_kv_heads, -1, head_dim), size, axis=1)
    queries = queries.permute(0, 1, 3, 4, 2, 5).reshape(count, batch * num_kv_heads, -1, head_dim)
    keys = split_blocks(key, size, axis=3).reshape(count, batch * num_kv_heads, head_dim, size)
    values = split_blocks(value, size, axis=2).reshape(count, batch * num_kv_heads, size, head_dim)
    scores = _product(queries[rows], keys[columns]) / math.sqrt(head_dim)
    mask = _pair_mask(spans, rows, columns, size)[:, :, None, None]  # [P, B, 1, 1, C, C]
    split = scores.reshape(len(rows), batch, num_kv_heads, -1, size, size)
    scores = torch.where(mask, split, -math.inf).reshape(scores.shape)
    peak = scores.new_full((count, *scores.shape[1:3]), -math.inf)
    highest = torch.amax(scores, dim=-1).detach()
    peak = peak.scatter_reduce(0, rows[:, None, None].expand_as(highest), highest, "amax")
    peak = torch.where(torch.isfinite(peak), peak, 0.0)  # [n, E, R]
    weights = torch.exp(scores - peak[rows][..., None])
    total = torch.zeros_like(peak).index_add(0, rows, torch.sum(weights, dim=-1))[..., None]
    mixed = _product(weights.to(value.dtype), values[columns])
    mixed = mixed.new_zeros((count, *mixed.shape[1:])).index_add(0, rows, mixed)
    mixed = mixed / torch.where(total > 0, total, 1.0)
    mixed = mixed.reshape(count, batch, num_kv_heads, -1, size, head_dim).permute(1, 0, 4, 2, 3, 5)
    return mixed.reshape(batch, count * size, num_heads, head_dim)[:, :length].to(query.dtype)


def _product(left: Float[Tensor, "P E m k"], right: Float[Tensor, "P E k n"]) -> Float[Tensor, "P E m n"]:
    """Matrix products of operands of one dtype, in at least float32."""
    return torch.matmul(left, right).to(torch.promote_types(left.dtype, torch.float32))


def _pair_mask(spans: Spans, rows: Tensor, columns: Tensor, size: int) -> Tensor:
    """Attention mask [P, B, C, C] of each pair of blocks."""
    indices = (rows, columns, rows, columns)  # of queries and keys, as Spans has them
    cut = [
        None if x is None else split_blocks(x, size, axis=1, fill=-1)[i] for x, i in zip(spans, indices, strict=True)
    ]
    merged = Spans(*(None if x is None else x.reshape(-1, size) for x in cut))
    return attention.attention_mask(merged, None).reshape(len(rows), -1, size, size)
