"""The cache of the native kernels: pages of positions, with keys and values head by head.

Twin: jaxbench/native/paged.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from jaxbench.config import TransformerConfig

PAGE_SIZE = 64  # positions per page, a multiple of the 64 that a kernel attends to at once
LANES = 16  # heads are padded to whole vectors


class PagedCache(NamedTuple):
    """Pages of every layer. int8: values are page * scale."""

    keys: tuple[Float[Tensor, "pages K W page_size"], ...]  # positions contiguous, as the scores need them
    values: tuple[Float[Tensor, "pages K page_size W"], ...]
    key_scales: tuple[Float[Tensor, "pages K page_size"], ...]  # of int8; otherwise of size 0
    value_scales: tuple[Float[Tensor, "pages K page_size"], ...]
    table: Int[Tensor, "B P"]

    def padded(self, length: int, *, dtype: str) -> PagedCache:
        """Extend the cache to `length` positions per row; each row's pages are consecutive.

        Raises:
          ValueError: the pages are not of this dtype, or hold more positions.
        """
        batch, pages = self.table.shape
        wanted = -(-length // PAGE_SIZE)
        if wanted < pages or self.keys[0].dtype != getattr(torch, dtype):
            raise ValueError(f"cache: {pages} pages a row of {self.keys[0].dtype}, wanted at most {wanted} of {dtype}")

        def pad(x: Tensor) -> Tensor:
            if x.numel() == 0 or wanted == pages:
                return x
            out = x.new_zeros(batch, wanted, *x.shape[1:])
            out[:, :pages] = x.reshape(batch, pages, *x.shape[1:])
            return out.reshape(-1, *x.shape[1:])

        arrays = (tuple(map(pad, kind)) for kind in self[:4])
        return PagedCache(*arrays, page_table(batch, wanted))


def page_table(batch_size: int, pages: int) -> Int[Tensor, "B P"]:
    """Page table with consecutive pages for each row."""
    return torch.arange(batch_size * pages, dtype=torch.int32).reshape(batch_size, pages)


def empty(config: TransformerConfig, batch_size: int, length: int, dtype: str) -> PagedCache:
    """Make empty pages for `length` positions per row."""
    pages, layers = -(-length // PAGE_SIZE), range(config.num_layers)
    shape = (batch_size * pages, config.num_kv_heads, PAGE_SIZE, -(-config.head_dim // LANES) * LANES)
    scales = shape[:3] if dtype == "int8" else (0,)
    return PagedCache(
        tuple(torch.zeros((*shape[:2], shape[3], shape[2]), dtype=getattr(torch, dtype)) for _ in layers),
        tuple(torch.zeros(shape, dtype=getattr(torch, dtype)) for _ in layers),
        tuple(torch.zeros(scales) for _ in layers),
        tuple(torch.zeros(scales) for _ in layers),
        page_table(batch_size, pages),
    )
