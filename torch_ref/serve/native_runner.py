"""Steps of the engine on native kernels in PyTorch. Twin: jaxbench/serve/native_runner.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from jaxbench.serve.batch_rows import Batch
from torch_ref.native import paged, run
from torch_ref.native.model import NativeTransformer


class NativeRunner:
    """A packed decoder and the blocks of its cache, pages of paged.PAGE_SIZE positions."""

    segment = None  # a row is one token, independent of the others

    def __init__(
        self, model: NativeTransformer, *, num_blocks: int, sizes: tuple[int, ...], max_wanted: int,
        progress: Callable[[], Any] = lambda: None,
    ):  # fmt: skip
        """Set up the runner; nothing is compiled.

        num_blocks: of the cache, including block 0, where padding is written. sizes: numbers of rows, ascending.
        max_wanted: rows of a step whose logits may be wanted.
        """
        self.num_blocks, self.sizes, self.max_wanted = num_blocks, sizes, max_wanted
        self.block_size, self.max_seq_len, self.vocab_size = paged.PAGE_SIZE, model.max_seq_len, model.vocab_size
        self._model = model
        self.reset()
        progress()

    @property
    def cache_bytes(self) -> int:
        """Bytes of the blocks."""
        return sum(each.nbytes for kind in self._pages for each in kind)

    def reset(self) -> None:
        """Make a new cache; the content of the old one is lost."""
        self._pages = paged.empty(self._model.configs[0], self.num_blocks, self.block_size, self._model.cache_dtype)[:4]

    @torch.no_grad()
    def run(self, batch: Batch) -> Float[np.ndarray, "M V"]:
        """Return the logits of the wanted rows; afterwards the blocks hold the keys and values of all rows."""
        if len(batch.copies):
            source, to = torch.from_numpy(np.ascontiguousarray(batch.copies.T)).long()
            for kind in self._pages:
                for each in kind:
                    if each.numel():
                        each[to] = each[source]
        tokens, positions, table, wanted = map(torch.from_numpy, batch[:4])
        cache = paged.PagedCache(*self._pages, table)
        model, arguments = self._model, (tokens[:, None], positions[:, None], cache, self._model.settings)
        hidden, _ = run.run_part(model.weights, model.configs, *arguments)
        if not len(wanted):
            return np.zeros((0, self.vocab_size), np.float32)
        return model.logits(hidden[wanted.long()])[:, 0].numpy()
