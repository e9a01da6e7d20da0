"""Grouped-query attention: one function for every kernel. Twin: jaxbench/attention.py.

Keys are "B K H S" and values "B K S H", as in the twin, but here keys are laid out in memory like values, with H
contiguous: scaled_dot_product_attention then reads both in place, and a step's new key is one short write.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jaxbench import process_environment, prompts
from torch_ref import functional

# On a CPU without AMX, PyTorch's kernel takes as long for bfloat16 as for float32; products of whole matrices do not.
# One layer of SmolLM2 on one core of an AMD EPYC, kernel versus `dense` in CPU ms: 0.63 vs 0.74 for 128 tokens, 1.43 vs
# 1.29 for 200, 8.1 vs 5.8 for 512, 14.5 vs 13.7 for 777; in float32 0.59 vs 1.81 for 128, 7.9 vs 15.5 for 512. With AMX
# the kernel wins, on 2 cores of an Intel Xeon in ms: 0.51 vs 7.0 for 256, 1.7 vs 14 for 512, 15 vs 179 for 1,777. So it
# does where oneDNN has no product of the type and PyTorch multiplies it by scalar code (an EPYC without AVX-512).
NARROW_DENSE = 192  # tokens
HAS_AMX = "amx_bf16" in process_environment.cpu_flags()
IMPLEMENTATIONS = ("dense", "blocked", "fused", "cudnn", "splash")
SHARED = -1  # segment of keys that are visible to every segment: a prompt shared by several answers


class KVCache(NamedTuple):
    """Keys and values of each layer, as jaxbench.attention.KVCache: E = B * K merges rows and heads."""

    keys: tuple[Float[Tensor, "E H S"] | None, ...]  # None = the layer keeps none
    values: tuple[Float[Tensor, "E S H"] | None, ...]
    positions: Int[Tensor, "B S"] | None  # None = rows without padding: slot s holds the token at position s
    memory: tuple[Any, ...] = ()  # other state of each layer, with its auxiliary `loss`; None = it has none

    def padded(self, length: int, *, dtype: str) -> KVCache:
        """Append empty slots, up to `length` in all, and cast keys and values to dtype.

        Raises:
          ValueError: the cache already has more slots.
        """
        num_slots = self._num_slots()
        if num_slots is not None and length < num_slots:
            raise ValueError(f"cache: {num_slots} slots cannot be padded to length={length}")

        def pad(x: Float[Tensor, "E S H"]) -> Float[Tensor, "E length H"]:
            return F.pad(x.to(getattr(torch, dtype)), (0, 0, 0, length - x.shape[1]))

        keys = tuple(None if key is None else pad(key.transpose(1, 2)).transpose(1, 2) for key in self.keys)
        values = tuple(None if value is None else pad(value) for value in self.values)
        positions = self.positions
        if positions is not None:
            positions = F.pad(positions, (0, length - positions.shape[1]), value=-1)
        return KVCache(keys, values, positions, self.memory)

    def check_room(self, slot: Tensor | int | None, num_tokens: int, segments: Int[Tensor, "B T"] | None) -> None:
        """Check a call that writes its tokens from `slot` on; a slot that is not a Python number cannot be checked.

        Raises:
          ValueError: the tokens do not fit from the slot on, or the call has segments, which a cache does not store.
        """
        if segments is not None:
            raise ValueError(f"features: segments {tuple(segments.shape)} with a cache, which keeps none; wanted None")
        num_slots = self._num_slots()
        if isinstance(slot, int) and num_slots is not None and not 0 <= slot <= num_slots - num_tokens:
            raise ValueError(
                f"features: {num_tokens} tokens from slot={slot} on do not fit a cache of {num_slots} slots"
            )

    def _num_slots(self) -> int | None:
        """Slots of a row, from the positions or else the keys; None if the cache has neither."""
        if self.positions is not None:
            return self.positions.shape[1]
        return next((key.shape[2] for key in self.keys if key is not None), None)


class Spans(NamedTuple):
    """Positions and segments of queries and keys, from which the attention mask follows."""

    query_positions: Int[Tensor, "B T"]
    # None = one document per row without padding: key s is at position s, and the queries are those of the last keys.
    key_positions: Int[Tensor, "B S"] | None
    query_segments: Int[Tensor, "B T"] | None = None
    key_segments: Int[Tensor, "B S"] | None = None


class Context(NamedTuple):
    """What all layers of one call share."""

    spans: Spans
    angles: tuple[Float[Tensor, "B T h"], Float[Tensor, "B T h"]] | None  # cosine, sine; None with learned positions
    slot: Tensor | int | None  # cache slot of the call's first key; None without a cache
    dropout_stream: functional.DropoutStream | None  # None = no dropout
    local_angles: tuple[Float[Tensor, "B T h"], Float[Tensor, "B T h"]] | None = None  # of layers with a window


def attention_mask(spans: Spans, sliding_window: int | None, is_causal: bool = True) -> Bool[Tensor, "B T S"]:
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
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B K H S"],
    value: Float[Tensor, "B K S H"],
    spans: Spans,
    *,
    sliding_window: int | None = None,
    is_causal: bool = True,
    is_ordered: bool = False,
    implementation: str = "dense",
    block_size: int = 128,
    softcap: float | None = None,
) -> Float[Tensor, "B T N H"]:
    """Grouped-query attention output, as jaxbench.attention.attention.

    `fused` and the names of the JAX twin's kernels select scaled_dot_product_attention; without key positions it gets
    is_causal instead of a mask. Long prompts of narrow types use `dense` on CPUs where that is faster (`NARROW_DENSE`).

    Raises:
      ValueError: N is not a multiple of K, or the implementation is unknown or has no softcap.
    """
    num_heads, num_kv_heads = query.shape[2], key.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"attention: num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention: implementation={implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    if softcap is not None and implementation not in ("dense", "blocked"):
        raise ValueError(
            f"attention: softcap={softcap} goes with dense and blocked attention, not with "
            f"implementation={implementation!r}"
        )
    if 0 in (query.shape[1], key.shape[3]):
        return torch.zeros_like(query)
    batch, length, _, head_dim = query.shape
    grouped = query.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    grouped = grouped.to(key.dtype)
    is_fused, is_plain = implementation not in ("dense", "blocked"), spans.key_positions is None
    if is_fused and is_ordered and key.device.type == "cpu" and key.dtype.itemsize < 4:
        is_fused = length < NARROW_DENSE or key.dtype not in functional.NARROW_PRODUCTS
        is_fused |= key.dtype == torch.bfloat16 and HAS_AMX
    if is_plain and not (is_fused and sliding_window is None and length in (1, key.shape[3])):
        index = torch.arange(key.shape[3], dtype=spans.query_positions.dtype, device=key.device)
        spans, is_plain = spans._replace(key_positions=index[None].expand(batch, -1)), False
    if implementation == "blocked" and key.shape[3] > block_size:
        mixed = _blocked(grouped, key, value, spans, sliding_window, is_causal, block_size, softcap)
    elif is_fused:
        mask = None if is_plain else attention_mask(spans, sliding_window, is_causal)
        mixed = _fused(grouped, key, value, mask, is_causal)
    else:
        dense = _ordered if is_ordered else _dense
        mixed = dense(grouped, key, value, attention_mask(spans, sliding_window, is_causal), softcap)
    return mixed.permute(0, 3, 1, 2, 4).reshape(query.shape).to(query.dtype)


def attention_weights(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B K H S"],
    mask: Bool[Tensor, "B T S"],
    *,
    softcap: float | None = None,
) -> Float[Tensor, "B N T S"]:
    """Attention weights by which `dense` multiplies values, in at least float32; zeros for a query that sees no key."""
    batch, length, num_heads, head_dim = query.shape
    grouped = query.reshape(batch, length, key.shape[1], -1, head_dim).permute(0, 2, 3, 1, 4).to(key.dtype)
    return _softmax(_scores(grouped, key, mask, softcap)).reshape(batch, num_heads, length, -1)


def split_blocks(x: Tensor, size: int, *, axis: int, fill: int = 0) -> Tensor:
    """Split an axis into blocks of `size` slots, the last one padded with `fill`; the block index is the first axis."""
    count = -(-x.shape[axis] // size)
    widths = [0, 0] * (x.ndim - axis - 1) + [0, count * size - x.shape[axis]]
    padded = F.pad(x, widths, value=fill)
    return torch.movedim(padded.unflatten(axis, (count, size)), axis, 0)


def _einsum(equation: str, left: Tensor, right: Tensor) -> Tensor:
    """Contract operands of one dtype; the result is at least float32 (functional.matmul on narrow types)."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.device.type != "cpu" or left.dtype == wide or left.dtype in functional.NARROW_PRODUCTS:
        return torch.einsum(equation, left, right).to(wide)
    with torch.autocast("cpu", enabled=False):
        return torch.einsum(equation, left.to(wide), right.to(wide))


def _scores(
    query: Float[Tensor, "B K G T H"], key: Float[Tensor, "B K H S"], mask: Bool[Tensor, "B T S"], softcap: float | None
) -> Tensor:
    """Scaled attention scores [B K G T S], capped, -inf where the mask is False."""
    scores = _einsum("BKGTH,BKHS->BKGTS", query, key) / math.sqrt(query.shape[-1])
    scores = scores if softcap is None else functional.softcap(scores, cap=softcap)
    return torch.where(mask[:, None, None], scores, -math.inf)


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over keys; zeros for a query without visible keys."""
    weights = torch.exp(scores - _row_max(scores))
    total = torch.sum(weights, dim=-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def _row_max(scores: Tensor) -> Tensor:
    """Maximum over keys, 0 for a query without visible keys: exp then gives 0, not NaN."""
    peak = torch.amax(scores, dim=-1, keepdim=True).detach()
    return torch.where(torch.isfinite(peak), peak, 0.0)


def _dense(
    query: Float[Tensor, "B K G T H"],
    key: Float[Tensor, "B K H S"],
    value: Float[Tensor, "B K S H"],
    mask: Bool[Tensor, "B T S"],
    softcap: float | None,
) -> Float[Tensor, "B K G T H"]:
    weights = _softmax(_scores(query, key, mask, softcap))
    return _einsum("BKGTS,BKSH->BKGTH", weights.to(value.dtype), value).to(query.dtype)


def _ordered(
    query: Float[Tensor, "B K G T H"],
    key: Float[Tensor, "B K H T"],
    value: Float[Tensor, "B K T H"],
    mask: Bool[Tensor, "B T T"],
    softcap: float | None,
) -> Float[Tensor, "B K G T H"]:
    """Attend with one part of the queries at a time, each to the keys up to its own end."""
    parts = []
    for start, end in prompts.query_parts(query.shape[3]):
        visible = (key[..., :end], value[:, :, :end], mask[:, start:end, :end])
        parts.append(_dense(query[:, :, :, start:end], *visible, softcap))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)


def _fused(
    query: Float[Tensor, "B K G T H"],
    key: Float[Tensor, "B K H S"],
    value: Float[Tensor, "B K S H"],
    mask: Bool[Tensor, "B T S"] | None,
    is_causal: bool,
) -> Float[Tensor, "B K G T H"]:
    """Attend with PyTorch's own kernel; without a mask, queries are those of all keys, or one that sees them all.

    The heads of a single token are passed as queries of their key-value head, so that no key is read once per head.
    """
    is_single = query.shape[3] == 1
    mixed = F.scaled_dot_product_attention(
        query[:, :, :, 0] if is_single else query.flatten(1, 2), key.transpose(2, 3), value,
        attn_mask=None if mask is None else mask[:, None], is_causal=is_causal and mask is None and not is_single,
        enable_gqa=not is_single and query.shape[2] > 1,
    )  # fmt: skip
    if mask is not None:
        mixed = torch.nan_to_num(mixed)  # a row that may attend to nothing is NaN in some kernels
    return mixed.reshape(query.shape)


def _blocked(
    query: Float[Tensor, "B K G T H"],
    key: Float[Tensor, "B K H S"],
    value: Float[Tensor, "B K S H"],
    spans: Spans,
    sliding_window: int | None,
    is_causal: bool,
    block_size: int,
    softcap: float | None,
) -> Float[Tensor, "B K G T H"]:
    """Online softmax over key blocks, one block of queries at a time; rematerialised in the backward pass."""

    def attend(query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        part = slice(start, start + query.shape[3])
        wide = torch.promote_types(query.dtype, torch.float32)
        peak = query.new_full((*query.shape[:4], 1), -math.inf, dtype=wide)
        carry = (peak, torch.zeros_like(peak), torch.zeros_like(query, dtype=wide))
        for first in range(0, key.shape[3], block_size):
            block = slice(first, first + block_size)
            cuts = (part, block, part, block)
            own = Spans(*(None if x is None else x[:, cut] for x, cut in zip(spans, cuts)))
            scores = _scores(query, key[..., block], attention_mask(own, sliding_window, is_causal), softcap)
            carry = _absorb(carry, scores, value[:, :, block])
        _, total, summed = carry
        return (summed / torch.where(total > 0, total, 1.0)).to(query.dtype)

    starts = range(0, query.shape[3], block_size)
    parts = [query[:, :, :, start : start + block_size] for start in starts]
    if not torch.is_grad_enabled():
        return torch.cat([attend(part, key, value, start) for part, start in zip(parts, starts)], dim=3)
    outs = [checkpoint(attend, part, key, value, start, use_reentrant=False) for part, start in zip(parts, starts)]
    return torch.cat(outs, dim=3)


def _absorb(carry: tuple[Tensor, Tensor, Tensor], scores: Tensor, value: Float[Tensor, "B K S H"]):
    """Add one block of keys to the running maximum, normaliser and weighted sum."""
    peak, total, summed = carry
    new_peak = torch.maximum(peak, torch.amax(scores, dim=-1, keepdim=True).detach())
    safe_peak = torch.where(torch.isfinite(new_peak), new_peak, 0.0)
    shrink = torch.exp(peak - safe_peak)
    weights = torch.exp(scores - safe_peak)
    total = total * shrink + torch.sum(weights, dim=-1, keepdim=True)
    summed = summed * shrink + _einsum("BKGTS,BKSH->BKGTH", weights.to(value.dtype), value)
    return new_peak, total, summed
