"""Blocks of attention and memory (Titans, section 4; attention with a bank), in PyTorch.

Twin: jaxbench/memory/blocks.py. What blocks are, and how they differ from the paper: see its docstring.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils import _pytree as pytree

from jaxbench.memory.block_config import BlockConfig
from torch_ref import nn
from torch_ref.memory import layout, sliding_window
from torch_ref.memory.bank import Bank, BankState
from torch_ref.memory.neural import NeuralMemory, NeuralState
from torch_ref.memory.sliding_window import LocalAttention, LocalState

Stream = Float[Tensor, "B T D"]
IsToken = Bool[Tensor, "B T"] | None  # False = padding; None = no padding


class BlockState(NamedTuple):
    """State of rows; None = the block has no such part."""

    local: LocalState | None  # keys and values of the sliding window
    memory: NeuralState | BankState
    tail: Float[Tensor, "B K-1 C"] | None  # memory as context: last inputs of the recall's convolutions

    @property
    def penalised(self) -> tuple[Float[Tensor, "..."], ...]:
        """Arrays whose mean squares are added to the loss of parity cases (target.py), so that gradients reach them."""
        return tuple(x for x in pytree.tree_leaves(self) if x is not None and x.is_floating_point())


Answer = tuple[Stream, BlockState]  # a block's output, and the state after it


class Block(torch.nn.Module):
    """Sliding-window attention and memory, combined as context, gate or layer; memory alone; attention with a bank."""

    def __init__(self, config: BlockConfig, *, dtype: str):
        super().__init__()
        c = config
        norm = functools.partial(nn.RMSNorm, c.d_model, eps=c.norm_eps, dtype=dtype)
        self.attention = LocalAttention(c, dtype=dtype) if c.has_attention else None
        self.memory = None if c.neural is None else NeuralMemory(c.neural, dtype=dtype)
        self.bank = None if c.bank is None else Bank(c.bank, dtype=dtype)
        self.input_norm = norm() if c.kind == "mal" else None
        self.answer_norm = norm() if c.kind in ("mac", "mag") else None
        self.memory_norm = norm() if c.kind in ("mac", "mag") else None
        self.kind, self.d_model, self.dtype = c.kind, c.d_model, dtype

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: BlockState | None = None,
        *,
        is_token: Bool[Tensor, "B T"] | None = None,
        learn: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], BlockState, Float[Tensor, ""]]:
        """Compute the block's output at each token, which is added to the residual stream.

        Arguments, results and errors are the twin's.
        """
        if x.ndim != 3 or x.shape[2] != self.d_model:
            raise ValueError(f"block: x is {tuple(x.shape)}, wanted (rows, tokens, d_model={self.d_model})")
        if state is not None:
            self._check(state)
        run = {"mac": self._as_context, "mag": self._as_gate, "mal": self._as_layer, "lmm": self._alone}
        if self.bank is not None:
            return self._with_bank(x, state, is_token)
        output, state = run[self.kind](x, state, is_token, learn)
        return output, state, output.new_zeros(())

    def init_state(self, batch_size: int) -> BlockState:
        """State of rows that have read nothing."""
        local = None if self.attention is None else self.attention.init_state(batch_size)
        memory = (self.bank if self.memory is None else self.memory).init_state(batch_size)
        return BlockState(local, memory, memory.tail if self.kind == "mac" else None)

    def reset(self, state: BlockState, is_reset: Bool[Tensor, " B"]) -> BlockState:
        """Reset some rows of a state to the initial state."""
        return layout.reset_rows(state, is_reset, self.init_state)

    def _check(self, state: BlockState) -> None:
        """Refuse the state of another kind of block; attention and memory check its sizes."""
        is_mac, memory = self.kind == "mac", NeuralState if self.bank is None else BankState
        wanted = (self.attention is not None, memory.__name__, is_mac)
        given = (state.local is not None, type(state.memory).__name__, state.tail is not None)
        if given != wanted:
            raise ValueError(
                f"block: kind={self.kind} wants a state with (window, memory, tail) {wanted}, the state has {given}"
            )

    def _parts(self, state: BlockState | None) -> tuple[LocalState | None, NeuralState | BankState | None]:
        return (None, None) if state is None else (state.local, state.memory)

    def _alone(self, x: Stream, state: BlockState | None, is_token: IsToken, learn: bool) -> Answer:
        """The memory alone (Titans, section 4.3)."""
        memory_out, memory = self.memory(x, self._parts(state)[1], is_token=is_token, learn=learn)
        return memory_out, BlockState(None, memory, None)

    def _as_gate(self, x: Stream, state: BlockState | None, is_token: IsToken, learn: bool) -> Answer:
        """Memory as gate (Titans, eq. 26 to 28): sliding-window attention, gated by the memory's output."""
        local, memory = self._parts(state)
        attention_out, local = self.attention(x, local, is_token=is_token)
        memory_out, memory = self.memory(x, memory, is_token=is_token, learn=learn)
        return self._gated(self.answer_norm(attention_out), memory_out), BlockState(local, memory, None)

    def _as_layer(self, x: Stream, state: BlockState | None, is_token: IsToken, learn: bool) -> Answer:
        """Memory as layer (Titans, eq. 29 to 31): attention to the memory's outputs plus its inputs (section 4.4)."""
        local, memory = self._parts(state)
        memory_out, memory = self.memory(x, memory, is_token=is_token, learn=learn)
        attention_out, local = self.attention(self.input_norm(x + memory_out), local, is_token=is_token)
        return attention_out, BlockState(local, memory, None)

    def _with_bank(
        self, x: Stream, state: BlockState | None, is_token: IsToken
    ) -> tuple[Stream, BlockState, Float[Tensor, ""]]:
        """Sliding-window attention mixed head by head with the bank's read-out (Chen et al. 2024, arXiv:2410.03156)."""
        local, memory = self._parts(state)
        attention_out = None
        if self.attention is not None:
            attention_out, local = self.attention(x, local, is_token=is_token)
        output, memory, loss = self.bank(x, memory, attention_out=attention_out, is_token=is_token)
        return output, BlockState(local, memory, None), loss

    def _gated(
        self, attention_out: Float[Tensor, "B T D"], memory_out: Float[Tensor, "B T D"]
    ) -> Float[Tensor, "B T D"]:
        """Gate an attention output, already normalised, by the memory's: y * sigmoid(norm(m)) (Titans, section 4.2)."""
        wide = torch.promote_types(attention_out.dtype, torch.float32)
        return attention_out * torch.sigmoid(self.memory_norm(memory_out).to(wide)).to(attention_out.dtype)

    def _as_context(self, x: Stream, state: BlockState | None, is_token: IsToken, learn: bool) -> Answer:
        """Memory as context (Titans, eq. 21 to 25), segment by segment."""
        is_fresh = state is None
        state = self.init_state(len(x)) if is_fresh else state
        self.attention.check(state.local, len(x))
        if x.shape[1] == 0:
            return self.memory(x, state.memory)[0], state
        tokens, num_tokens = layout.left_align(x, is_token)
        persistent = self.attention.persistent_keys_values()

        def read(state: BlockState, block: tuple) -> tuple[BlockState, Stream]:
            (tokens,), is_new = block
            return self.read_segment(tokens, state, is_new, persistent, learn)

        state, output = sliding_window.scan_blocks(
            read, state, (tokens,), num_begun=state.local.count, num_tokens=num_tokens, size=self.attention.window,
            is_fresh=is_fresh,
        )  # fmt: skip
        return layout.restore_padding(output, is_token), state

    def read_segment(
        self,
        x: Float[Tensor, "B T D"],
        state: BlockState,
        is_new: Bool[Tensor, "B C"],
        persistent: tuple[Float[Tensor, "P K H"], Float[Tensor, "P K H"]] | None,
        learn: bool,
    ) -> tuple[BlockState, Float[Tensor, "B T D"]]:
        """Memory as context for one segment of each row (Titans, eq. 21 to 25), S^(t) = x.

        Arguments, results and errors are the twin's.
        """
        attention, memory = self.attention, state.memory
        is_token = is_new if x.shape[1] > 1 else is_new.any(dim=1, keepdim=True)
        # Eq. 21, h = M_(t-1)(q): recall from the weights before the segment, which are the anchor of its chunk.
        before = memory._replace(weights=memory.anchor, tail=state.tail)
        recalled, before = self.memory(x, before, is_token=is_token, learn=False)
        # Eq. 22 and 23, y = Attn([P] || h || S): recalled tokens stand in the slots of the other block.
        query, key, value = (attention.split_heads(project(x)) for project in attention.projections())
        recalled_entries = (attention.split_heads(project(recalled)) for project in attention.projections()[1:])
        local = attention.insert(state.local, key, value, is_new)
        other = local._replace(keys=local.other_keys, values=local.other_values)
        other = attention.insert(other, *recalled_entries, is_new)
        local = local._replace(other_keys=other.keys, other_values=other.values)
        heads = attention.attend_block(query, local, persistent, is_recalled=True)
        attention_out = self.answer_norm(attention.o_proj(heads.reshape(*x.shape[:2], -1)))
        # Eq. 24 and 25: M_t = M_(t-1)(y) is written and read at once, o = y * M_t(y).
        memory_out, memory = self.memory(attention_out, memory, is_token=is_token, learn=learn, within_chunk=True)
        local = attention.advance(local, is_new)
        # The memory's chunk ends with the segment, even where the memory did not learn all of it.
        is_done = local.count == 0
        anchor = layout.select_rows(is_done, memory.weights, memory.anchor)
        memory = memory._replace(anchor=anchor, count=torch.where(is_done, 0, memory.count))
        return BlockState(local, memory, before.tail), self._gated(attention_out, memory_out)


def build(
    config: BlockConfig, params: Mapping[str, np.ndarray], *, dtype: str = "float32", device: str = "cpu"
) -> Block:
    """Build the block of a configuration from parameters by name, cast to dtype.

    Arguments, results and errors are the twin's.
    """
    with torch.device("meta"):
        model = Block(config, dtype=dtype)
    return nn.load_params(model, params, device=device)
