"""Steps of the engine on PyTorch's own operations, for decoders whose layers keep more state than keys and values.

Twin: jaxbench/serve/slot_runner.py. Slots are computed one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch.utils._pytree import tree_leaves, tree_map_only

from jaxbench.serve.batch_rows import Batch, Piece, pieces
from torch_ref.attention import KVCache
from torch_ref.transformer import Transformer


class SlotRunner:
    """A decoder and the slots of its requests."""

    def __init__(
        self, model: Transformer, *, num_slots: int, slot_tokens: int, segment: int, max_rows: int,
        progress: Callable[[], Any] = lambda: None,
    ):  # fmt: skip
        """Set up the runner; nothing is compiled.

        num_slots: requests at once. slot_tokens: maximum per request; every token of its answer reads so many keys.
        segment: tokens of a prompt that are read at once. max_rows: per step.
        """
        self.segment, self.block_size, self.max_seq_len = segment, slot_tokens, slot_tokens
        self.num_blocks, self.vocab_size = num_slots + 1, model.vocab_size  # block b is slot b - 1
        self.sizes, self.max_wanted = (max_rows,), max_rows
        self._model, length = model, -(-slot_tokens // segment) * segment
        nothing = torch.zeros((1, segment), dtype=torch.int32)
        with torch.no_grad():
            _, cache = model.features(nothing, nothing - 1)
        self._empty = cache.padded(length, dtype=model.dtype)  # of a request that has read nothing
        self.reset()
        progress()

    @property
    def cache_bytes(self) -> int:
        """Bytes of the slots: keys, values and other state."""
        leaves = [each for each in tree_leaves(self._empty) if isinstance(each, torch.Tensor)]
        return (self.num_blocks - 1) * sum(each.nbytes for each in leaves)

    def reset(self) -> None:
        """Empty all slots."""
        self._slots: list[KVCache | None] = [None] * (self.num_blocks - 1)

    @torch.no_grad()
    def run(self, batch: Batch) -> Float[np.ndarray, "M V"]:
        """Return the logits of the wanted rows; afterwards the slots have read all rows."""
        found = {piece.last_row: self._step(piece) for piece in pieces(batch, self.segment)}
        wanted = [found[row] for row in batch.wanted.tolist()]
        return np.stack(wanted) if wanted else np.zeros((0, self.vocab_size), np.float32)

    def _step(self, piece: Piece) -> Float[np.ndarray, " V"]:
        """Return the logits after a piece of a slot's text."""
        model, slot = self._model, piece.block - 1
        if piece.start == 0:
            self._slots[slot] = tree_map_only(torch.Tensor, torch.clone, self._empty)
        tokens = torch.tensor([piece.tokens])
        positions = torch.arange(piece.start, piece.start + len(piece.tokens), dtype=torch.int32)[None]
        hidden, self._slots[slot] = model.features(tokens, positions, cache=self._slots[slot], slot=piece.start)
        return model.logits(hidden[:, -1:])[0, 0].float().numpy()
