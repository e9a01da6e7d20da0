"""Which blocks of a row see which in block-sparse attention (S file: neither JAX nor PyTorch).

A row is cut into blocks of equal size from its first slot on, padding included. Block i may see block j <= i when j is
near, at the row's start, or a multiple of a stride away; inside visible blocks attention is causal as everywhere.
"""

from __future__ import annotations

import numpy as np
import pydantic
from jaxtyping import Bool, Int32

from jaxbench.config import Base


class BlockPattern(Base):
    """Visibility between blocks: a block is visible if any of three rules says so.

    Sources: local and global blocks, Beltagy et al. 2020, arXiv:2004.05150, and Zaheer et al. 2020, arXiv:2007.14062;
    strided ones, Child et al. 2019, arXiv:1904.10509, section 4.2, there by tokens. Differs from BigBird: causal, and
    without random blocks.
    """

    block_size: int = pydantic.Field(default=64, gt=0)  # slots of a block
    local: int = pydantic.Field(default=4, gt=0)  # blocks that a block sees, counted back from itself, itself included
    first: int = pydantic.Field(default=0, ge=0)  # blocks at the row's start that every block sees
    stride: int | None = pydantic.Field(default=None, gt=0)  # every stride-th block before is seen; None = no such rule

    def num_blocks(self, length: int) -> int:
        """Blocks of a row of `length` slots, the last of which may be shorter."""
        return -(-length // self.block_size)

    def visible(self, num_blocks: int) -> Bool[np.ndarray, "n n"]:
        """True where a block of queries (row) sees a block of keys (column)."""
        index = np.arange(num_blocks)
        back = index[:, None] - index[None, :]
        seen = (back < self.local) | (index[None, :] < self.first)
        if self.stride is not None:
            seen |= back % self.stride == 0
        return seen & (back >= 0)

    def pairs(self, num_blocks: int) -> tuple[Int32[np.ndarray, " P"], Int32[np.ndarray, " P"]]:
        """Query block and key block of every visible pair, in order of query blocks."""
        rows, columns = np.nonzero(self.visible(num_blocks))
        return rows.astype(np.int32), columns.astype(np.int32)

    def mask(self, length: int) -> Bool[np.ndarray, "T T"]:
        """Expand the pattern to a dense mask of slots."""
        whole = np.ones((self.block_size, self.block_size), bool)
        return np.kron(self.visible(self.num_blocks(length)), whole)[:length, :length].astype(bool)

    def density(self, length: int) -> float:
        """Share of the lower triangle's pairs of blocks that are computed."""
        count = self.num_blocks(length)
        return float(self.visible(count).sum() / (count * (count + 1) / 2))
