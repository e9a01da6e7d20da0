"""The cache of the native kernels: pages of positions, with keys and values head by head.

Twin: torch_ref/native/paged.py. A row's token at position p is in slot p % PAGE_SIZE of page table[row, p //
PAGE_SIZE]; rows have no gaps, whatever batch they are in.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxbench.config import TransformerConfig

PAGE_SIZE = 64  # positions per page, a multiple of the 64 that a kernel attends to at once
LANES = 16  # heads are padded to whole vectors


class PagedCache(NamedTuple):
    """Pages of every layer. int8: values are page * scale."""

    keys: tuple[Float[Array, "pages K W page_size"], ...]  # positions contiguous, as the scores need them
    values: tuple[Float[Array, "pages K page_size W"], ...]
    key_scales: tuple[Float[Array, "pages K page_size"], ...]  # of int8; otherwise of size 0
    value_scales: tuple[Float[Array, "pages K page_size"], ...]
    table: Int[Array, "B P"]

    def padded(self, length: int, *, dtype: str) -> PagedCache:
        """Extend the cache to `length` positions per row; each row's pages are consecutive.

        Raises:
          ValueError: the pages are not of this dtype, or hold more positions.
        """
        batch, pages = self.table.shape
        wanted = -(-length // PAGE_SIZE)
        if wanted < pages or self.keys[0].dtype != dtype:
            raise ValueError(f"cache: {pages} pages a row of {self.keys[0].dtype}, wanted at most {wanted} of {dtype}")

        def pad(x: Array) -> Array:
            if x.size == 0 or wanted == pages:
                return x
            x = x.reshape(batch, pages, *x.shape[1:])
            return jnp.pad(x, ((0, 0), (0, wanted - pages), *((0, 0),) * (x.ndim - 2))).reshape(-1, *x.shape[2:])

        arrays = (tuple(map(pad, kind)) for kind in self[:4])
        return PagedCache(*arrays, page_table(batch, wanted))


def page_table(batch_size: int, pages: int) -> Int[Array, "B P"]:
    """Page table with consecutive pages for each row."""
    return jnp.arange(batch_size * pages, dtype=jnp.int32).reshape(batch_size, pages)


def empty(config: TransformerConfig, batch_size: int, length: int, dtype: str) -> PagedCache:
    """Make empty pages for `length` positions per row."""
    pages = -(-length // PAGE_SIZE)
    shape = (batch_size * pages, config.num_kv_heads, PAGE_SIZE, -(-config.head_dim // LANES) * LANES)
    layers = range(config.num_layers)
    scales = shape[:3] if dtype == "int8" else (0,)
    return PagedCache(
        tuple(jnp.zeros((*shape[:2], shape[3], shape[2]), dtype) for _ in layers),
        tuple(jnp.zeros(shape, dtype) for _ in layers),
        tuple(jnp.zeros(scales, jnp.float32) for _ in layers),
        tuple(jnp.zeros(scales, jnp.float32) for _ in layers),
        page_table(batch_size, pages),
    )
