"""The cache of the native kernels: pages of positions, keys and values head by head.

Twin: torch_ref/native/paged.py. A row's token at position p lies in slot p % PAGE_SIZE of page table[row, p // PAGE_SIZE];
rows have no gaps, whatever batch they are in.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxbench.attention import KVCache

PAGE_SIZE = 64  # positions of a page, a multiple of the 64 that a kernel attends to at once
LANES = 16  # heads are filled up to whole vectors


class PagedCache(NamedTuple):
    """Pages of every layer. int8: values are page * scale."""

    keys: tuple[Float[Array, "pages K page_size W"], ...]
    values: tuple[Float[Array, "pages K page_size W"], ...]
    key_scales: tuple[Float[Array, "pages K page_size"], ...]  # of int8; else of size 0
    value_scales: tuple[Float[Array, "pages K page_size"], ...]
    table: Int[Array, "B P"]


class PrefillCache(NamedTuple):
    """Keys and values of prompts, on their way into pages."""

    cache: KVCache
    num_kv_heads: int

    def padded(self, length: int, *, dtype: str) -> PagedCache:
        """Pages with room for `length` positions of every row, kept as dtype."""
        batch = self.cache.positions.shape[0]
        pages = -(-length // PAGE_SIZE)
        keys, values, key_scales, value_scales = [], [], [], []
        for key, value in zip(self.cache.keys, self.cache.values, strict=True):
            for x, arrays, scales in (
                (key.transpose(0, 2, 1), keys, key_scales),
                (value, values, value_scales),
            ):
                array, scale = _as_pages(x.reshape(batch, self.num_kv_heads, *x.shape[1:]), pages, dtype)
                arrays.append(array)
                scales.append(scale)
        table = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
        return PagedCache(tuple(keys), tuple(values), tuple(key_scales), tuple(value_scales), table)


def _as_pages(x: Float[Array, "B K S H"], pages: int, dtype: str) -> tuple[Array, Array]:
    """Pages [B * pages, K, page_size, W], row by row, and scales [B * pages, K, page_size]."""
    batch, heads, length, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, pages * PAGE_SIZE - length), (0, -width % LANES)))
    x = x.reshape(batch, heads, pages, PAGE_SIZE, -1).transpose(0, 2, 1, 3, 4).reshape(-1, heads, PAGE_SIZE, x.shape[3])
    if dtype != "int8":
        return x.astype(dtype), jnp.zeros((0,), jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    integers = jnp.round(x / jnp.where(scale > 0, scale, 1)[..., None])
    return integers.astype(jnp.int8), scale.astype(jnp.float32)
