"""The cache of the native kernels: pages of positions, keys and values head by head.

Twin: jaxbench/native/paged.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from torch_ref.attention import KVCache

PAGE_SIZE = 64  # positions of a page, a multiple of the 64 that a kernel attends to at once
LANES = 16  # heads are filled up to whole vectors


class PagedCache(NamedTuple):
    """Pages of every layer. int8: values are page * scale."""

    keys: tuple[Float[Tensor, "pages K page_size W"], ...]
    values: tuple[Float[Tensor, "pages K page_size W"], ...]
    key_scales: tuple[Float[Tensor, "pages K page_size"], ...]  # of int8; else of size 0
    value_scales: tuple[Float[Tensor, "pages K page_size"], ...]
    table: Int[Tensor, "B P"]


class PrefillCache(NamedTuple):
    """Keys and values of prompts, on their way into pages."""

    cache: KVCache
    num_kv_heads: int

    def padded(self, length: int, *, dtype: str) -> PagedCache:
        """Pages with room for `length` positions of every row, kept as dtype."""
        batch = self.cache.keys[0].shape[0] // self.num_kv_heads
        pages = -(-length // PAGE_SIZE)
        keys, values, key_scales, value_scales = [], [], [], []
        for key, value in zip(self.cache.keys, self.cache.values, strict=True):
            for x, arrays, scales in (
                (key.transpose(1, 2), keys, key_scales),
                (value, values, value_scales),
            ):
                array, scale = _as_pages(x.reshape(batch, self.num_kv_heads, *x.shape[1:]), pages, dtype)
                arrays.append(array)
                scales.append(scale)
        table = torch.arange(batch * pages, dtype=torch.int32).reshape(batch, pages)
        return PagedCache(tuple(keys), tuple(values), tuple(key_scales), tuple(value_scales), table)


def _as_pages(x: Float[Tensor, "B K S H"], pages: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Pages [B * pages, K, page_size, W], row by row, and scales [B * pages, K, page_size]."""
    batch, heads, length, width = x.shape
    x = F.pad(x, (0, -width % LANES, 0, pages * PAGE_SIZE - length))
    x = x.reshape(batch, heads, pages, PAGE_SIZE, -1).transpose(1, 2).reshape(-1, heads, PAGE_SIZE, x.shape[3])
    if dtype != "int8":
        return x.to(getattr(torch, dtype)).contiguous(), torch.zeros(0)
    scale = x.abs().amax(-1) / 127
    integers = torch.round(x / torch.where(scale > 0, scale, 1)[..., None])
    return integers.to(torch.int8).contiguous(), scale.float().contiguous()
