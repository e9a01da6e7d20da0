"""Sliding-window attention with a state of fixed size, in PyTorch. Twin: jaxbench/memory/sliding_window.py.

Layout of blocks, windows and the state, and the axis letters: see the twin's module docstring.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jaxbench import rotary
from jaxbench.memory.block_config import BlockConfig
from torch_ref import functional, nn
from torch_ref.memory import layout
from torch_ref.memory.layout import _unnarrowed


class LocalState(NamedTuple):
    """Cache of keys and values of the current block and of the other one."""

    keys: Float[Tensor, "B C K H"]  # of the current block, filled from the left
    values: Float[Tensor, "B C K H"]
    other_keys: Float[Tensor, "B C K H"]  # of the previous block, or recalled by a memory
    other_values: Float[Tensor, "B C K H"]
    has_other: Bool[Tensor, " B"]  # the other block is filled
    count: Int[Tensor, " B"]  # tokens in the current block, 0 to C - 1


@_unnarrowed
def attend(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B S K H"],
    value: Float[Tensor, "B S K H"],
    mask: Bool[Tensor, "B T S"],
) -> Float[Tensor, "B T N H"]:
    """Softmax attention with grouped heads to keys where the mask is True; zeros where a query has no key."""
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(wide).reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
    scores = torch.einsum("BTKGH,BSKH->BKGTS", grouped, key.to(wide)) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    peak = scores.amax(dim=-1, keepdim=True).detach()
    weights = torch.exp(scores - torch.where(torch.isfinite(peak), peak, peak.new_zeros(())))
    total = weights.sum(dim=-1, keepdim=True)
    weights = weights / torch.where(total > 0, total, total.new_ones(()))
    return torch.einsum("BKGTS,BSKH->BTKGH", weights, value.to(wide)).reshape(query.shape).to(query.dtype)


def scan_blocks(
    read: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    tokens: tuple[Float[Tensor, "B T ..."], ...],
    *,
    num_begun: Int[Tensor, " B"],
    num_tokens: Int[Tensor, " B"],
    size: int,
    is_fresh: bool,
) -> tuple[Any, Float[Tensor, "B T ..."]]:
    """Scan `state, output = read(state, (tokens, is_new))` over the blocks of rows that may begin inside a block.

    Arguments, results and errors are the twin's.
    """
    length = tokens[0].shape[1]
    place = torch.arange(size, device=num_begun.device)[None, :]
    if length == 1:
        return read(state, (tokens, (num_tokens[:, None] > 0) & (place == num_begun[:, None])))
    num_blocks = -(-length // size) if is_fresh else -(-(length + size - 1) // size)
    place = torch.arange(num_blocks * size, device=num_begun.device)[None, :]
    is_new = (place >= num_begun[:, None]) & (place < (num_begun + num_tokens)[:, None])
    source = (place - num_begun[:, None]).clamp(0, length - 1)
    blocks = tuple(layout.split_chunks(layout.gathered(x, source), size) for x in tokens)
    state, outputs = layout.scan_chunks(read, state, (blocks, layout.split_chunks(is_new, size)))
    back = torch.arange(length, device=num_begun.device)[None, :] + num_begun[:, None]
    return state, layout.gathered(layout.join_chunks(outputs), back)


class LocalAttention(torch.nn.Module):
    """Causal sliding-window attention with persistent tokens that every query attends to (Titans, section 4.2)."""

    def __init__(self, config: BlockConfig, *, dtype: str):
        super().__init__()
        c = config
        linear = functools.partial(nn.Linear, use_bias=False, dtype=dtype)
        self.q_proj = linear(c.d_model, c.num_heads * c.head_dim)
        self.k_proj, self.v_proj = (linear(c.d_model, c.num_kv_heads * c.head_dim) for _ in range(2))
        # With a bank, the bank mixes the heads and projects them.
        self.o_proj = None if c.kind == "bank" else linear(c.num_heads * c.head_dim, c.d_model)
        persistent = torch.zeros(c.num_persistent, c.d_model, dtype=getattr(torch, dtype)) if c.num_persistent else None
        self.persistent = None if persistent is None else torch.nn.Parameter(persistent)
        self.num_heads, self.num_kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.window, self.dtype = c.window, dtype
        self.frequencies = rotary.frequencies(c.head_dim, c.rope_theta, None)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: LocalState | None = None,
        *,
        is_token: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T ..."], LocalState]:
        """Attention output at each token: projected [B T D], or with a bank the heads [B T N H].

        Arguments, results and errors are the twin's.
        """
        is_fresh = state is None
        state = self.init_state(len(x)) if is_fresh else state
        self.check(state, len(x))
        if x.shape[1] == 0:
            shape = x.shape if self.o_proj is not None else (len(x), 0, self.num_heads, self.head_dim)
            return self.q_proj.kernel.new_zeros(shape), state
        tokens, num_tokens = layout.left_align(x, is_token)
        entries = tuple(self.split_heads(project(tokens)) for project in self.projections())
        persistent = self.persistent_keys_values()

        def read(state: LocalState, block: tuple) -> tuple[LocalState, Float[Tensor, "B T N H"]]:
            (query, key, value), is_new = block
            state = self.insert(state, key, value, is_new)
            heads = self.attend_block(query, state, persistent, is_recalled=False)
            return self.advance(state, is_new), heads

        state, output = scan_blocks(
            read, state, entries, num_begun=state.count, num_tokens=num_tokens, size=self.window, is_fresh=is_fresh
        )
        if self.o_proj is not None:
            output = self.o_proj(output.reshape(*output.shape[:2], -1))
        return layout.restore_padding(output, is_token), state

    def init_state(self, batch_size: int) -> LocalState:
        """State of rows that have read nothing."""
        like = self.q_proj.kernel
        none = like.new_zeros((batch_size, self.window, self.num_kv_heads, self.head_dim))
        has_other = torch.zeros(batch_size, dtype=torch.bool, device=like.device)
        return LocalState(none, none, none, none, has_other, has_other.to(torch.int32))

    def check(self, state: LocalState, batch_size: int) -> None:
        """Refuse the state of another model or batch size with a ValueError."""
        wanted = (batch_size, self.window, self.num_kv_heads, self.head_dim)
        if tuple(state.keys.shape) != wanted:
            raise ValueError(
                f"window: the state's keys are {tuple(state.keys.shape)}, wanted {wanted} (rows, window, ...)"
            )

    def persistent_keys_values(self) -> tuple[Float[Tensor, "P K H"], Float[Tensor, "P K H"]] | None:
        """Keys and values of the persistent tokens, which have no position; None without any."""
        if self.persistent is None:
            return None
        tokens = self.persistent[None]
        return tuple(self.split_heads(functional.matmul(tokens, proj.kernel))[0] for proj in (self.k_proj, self.v_proj))

    def insert(
        self,
        state: LocalState,
        key: Float[Tensor, "B T K H"],
        value: Float[Tensor, "B T K H"],
        is_new: Bool[Tensor, "B C"],
    ) -> LocalState:
        """Insert keys and values of new tokens into their slots of the current block; T is C or 1."""
        is_new = is_new[:, :, None, None]
        keys, values = (
            torch.where(is_new, new.to(old.dtype), old)
            for new, old in ((key, state.keys), (value, state.values))
        )  # fmt: skip
        return state._replace(keys=keys, values=values)

    def advance(self, state: LocalState, is_new: Bool[Tensor, "B C"]) -> LocalState:
        """Count new tokens; where the current block is full, it becomes the other block."""
        count = state.count + is_new.sum(dim=1).to(torch.int32)
        is_full = count == self.window
        current, other = (state.keys, state.values), (state.other_keys, state.other_values)
        other_keys, other_values = layout.select_rows(is_full, current, other)
        return state._replace(
            other_keys=other_keys,
            other_values=other_values,
            has_other=state.has_other | is_full,
            count=torch.where(is_full, 0, count),
        )

    def attend_block(
        self,
        query: Float[Tensor, "B T N H"],
        state: LocalState,
        persistent: tuple[Float[Tensor, "P K H"], Float[Tensor, "P K H"]] | None,
        *,
        is_recalled: bool,
    ) -> Float[Tensor, "B T N H"]:
        """Attention output of the current block's queries: those of all slots, T = C, or that of the next slot, T = 1.

        Arguments, results and errors are the twin's.
        """
        batch_size, length = query.shape[:2]
        slots = torch.arange(self.window, device=query.device)[None, :].expand(batch_size, -1)
        query_slots = state.count[:, None] if length == 1 else slots
        # What a query attends to, [B T C]: its own block causally; the previous block as far as the window covers it.
        is_past = slots[:, None, :] <= query_slots[:, :, None]
        is_other = is_past if is_recalled else ~is_past & state.has_other[:, None, None]
        # The previous block has positions 0 .. C - 1, the current one C .. 2 C - 1, a recalled token that of its slot.
        other_positions = slots + (self.window if is_recalled else 0)
        query = self._rotate(query, query_slots + self.window)
        keys = self._rotate(state.keys, slots + self.window)
        other_keys = self._rotate(state.other_keys, other_positions)
        keys, values, masks = [other_keys, keys], [state.other_values, state.values], [is_other, is_past]
        if persistent is not None:
            persistent_key, persistent_value = (x.expand(batch_size, *x.shape) for x in persistent)
            keys, values = [persistent_key, *keys], [persistent_value, *values]
            masks = [is_past.new_ones((batch_size, length, len(persistent[0]))), *masks]
        return attend(query, torch.cat(keys, dim=1), torch.cat(values, dim=1), torch.cat(masks, dim=2))

    def _rotate(self, x: Float[Tensor, "B T N H"], positions: Int[Tensor, "B T"]) -> Float[Tensor, "B T N H"]:
        """Rotary embedding of heads at positions."""
        angles = functional.rotary_angles(positions, self.frequencies, dtype=self.dtype)
        return functional.rotate(x, *angles)

    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """Projections of queries, keys and values."""
        return self.q_proj, self.k_proj, self.v_proj

    def split_heads(self, x: Float[Tensor, "B T I"]) -> Float[Tensor, "B T N H"]:
        """Split a projection into heads."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)
