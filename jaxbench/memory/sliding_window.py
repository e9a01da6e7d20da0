"""Sliding-window attention with a state of fixed size, in Flax NNX. Twin: torch_ref/memory/sliding_window.py.

A row's tokens come in blocks of C = window. A query in slot i attends to the persistent tokens, to slots 0 .. i of its
own block, and to one other block in the state: to slots i + 1 .. C - 1 of the previous block, which makes a sliding
window of C tokens, or to slots 0 .. i of what a memory recalled (blocks.py). The state carries an unfinished block;
keys are kept as projected and rotated when they are used. Axis letters: as in WORKSPACE.md; C slots of a block,
P persistent tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxbench import functional, nn, rotary
from jaxbench.memory import layout
from jaxbench.memory.block_config import BlockConfig


class LocalState(NamedTuple):
    """Cache of keys and values of the current block and of the other one."""

    keys: Float[Array, "B C K H"]  # of the current block, filled from the left
    values: Float[Array, "B C K H"]
    other_keys: Float[Array, "B C K H"]  # of the previous block, or recalled by a memory
    other_values: Float[Array, "B C K H"]
    has_other: Bool[Array, " B"]  # the other block is filled
    count: Int[Array, " B"]  # tokens in the current block, 0 to C - 1


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T N H"]:
    """Softmax attention with grouped heads to keys where the mask is True; zeros where a query has no key."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.astype(wide).reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key.astype(wide)) / math.sqrt(query.shape[-1])
    scores = jnp.where(mask[:, None, None], scores, jnp.asarray(-jnp.inf, wide))
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, jnp.zeros((), wide)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, jnp.ones((), wide))
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, value.astype(wide)).reshape(query.shape).astype(query.dtype)


def scan_blocks(
    read: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    tokens: tuple[Float[Array, "B T ..."], ...],
    *,
    num_begun: Int[Array, " B"],
    num_tokens: Int[Array, " B"],
    size: int,
    is_fresh: bool,
) -> tuple[Any, Float[Array, "B T ..."]]:
    """Scan `state, output = read(state, (tokens, is_new))` over the blocks of rows that may begin inside a block.

    Args:
      read: one step: gets the block's slots [B C ...] and which of them hold new tokens [B C]; a call of one token gets
        the token [B 1 ...] and the slot that it takes [B C].
      state: the state before the first block.
      tokens: arrays whose rows begin with their tokens.
      num_begun: tokens of each row's unfinished block, 0 to C - 1.
      num_tokens: tokens of each row in this call.
      size: C, slots of a block.
      is_fresh: True = no row has an unfinished block.

    Returns:
      The state after the last block, and the output at each token.
    """
    length = tokens[0].shape[1]
    place = jnp.arange(size)[None, :]
    if length == 1:
        return read(state, (tokens, (num_tokens[:, None] > 0) & (place == num_begun[:, None])))
    num_blocks = -(-length // size) if is_fresh else -(-(length + size - 1) // size)
    place = jnp.arange(num_blocks * size)[None, :]
    is_new = (place >= num_begun[:, None]) & (place < (num_begun + num_tokens)[:, None])
    source = jnp.clip(place - num_begun[:, None], 0, length - 1)
    blocks = tuple(layout.split_chunks(layout.gathered(x, source), size) for x in tokens)
    state, outputs = layout.scan_chunks(read, state, (blocks, layout.split_chunks(is_new, size)))
    return state, layout.gathered(layout.join_chunks(outputs), jnp.arange(length)[None, :] + num_begun[:, None])


class LocalAttention(nnx.Module):
    """Causal sliding-window attention with persistent tokens that every query attends to (Titans, section 4.2)."""

    def __init__(self, config: BlockConfig, *, dtype: str):
        c = config
        linear = functools.partial(nn.Linear, use_bias=False, dtype=dtype)
        self.q_proj = linear(c.d_model, c.num_heads * c.head_dim)
        self.k_proj, self.v_proj = (linear(c.d_model, c.num_kv_heads * c.head_dim) for _ in range(2))
        # With a bank, the bank mixes the heads and projects them.
        self.o_proj = None if c.kind == "bank" else linear(c.num_heads * c.head_dim, c.d_model)
        self.persistent = nnx.Param(jnp.zeros((c.num_persistent, c.d_model), dtype)) if c.num_persistent else None
        self.num_heads, self.num_kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.window, self.dtype = c.window, dtype
        self.frequencies = rotary.frequencies(c.head_dim, c.rope_theta, None)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        state: LocalState | None = None,
        *,
        is_token: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T ..."], LocalState]:
        """Attention output at each token: projected [B T D], or with a bank the heads [B T N H].

        Args:
          x: the residual stream, normalised.
          state: the state after earlier tokens; None = there are none. The one after the last token is returned.
          is_token: False = padding, whose outputs are zeros and which changes no state; None = no padding.

        Raises:
          ValueError: the state is for another model or batch size.
        """
        is_fresh = state is None
        state = self.init_state(len(x)) if is_fresh else state
        self.check(state, len(x))
        if x.shape[1] == 0:
            shape = x.shape if self.o_proj is not None else (len(x), 0, self.num_heads, self.head_dim)
            return jnp.zeros(shape, self.dtype), state
        tokens, num_tokens = layout.left_align(x, is_token)
        entries = tuple(self.split_heads(project(tokens)) for project in self.projections())
        persistent = self.persistent_keys_values()

        def read(state: LocalState, block: tuple) -> tuple[LocalState, Float[Array, "B T N H"]]:
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
        none = jnp.zeros((batch_size, self.window, self.num_kv_heads, self.head_dim), self.dtype)
        return LocalState(none, none, none, none, jnp.zeros(batch_size, bool), jnp.zeros(batch_size, jnp.int32))

    def check(self, state: LocalState, batch_size: int) -> None:
        """Refuse the state of another model or batch size with a ValueError."""
        wanted = (batch_size, self.window, self.num_kv_heads, self.head_dim)
        given = state.keys.shape
        if given != wanted:
            raise ValueError(f"window: the state's keys are {given}, wanted {wanted} (rows, window, ...)")

    def persistent_keys_values(self) -> tuple[Float[Array, "P K H"], Float[Array, "P K H"]] | None:
        """Keys and values of the persistent tokens, which have no position; None without any."""
        if self.persistent is None:
            return None
        tokens = self.persistent[...][None]
        return tuple(
            self.split_heads(functional.matmul(tokens, proj.kernel[...]))[0] for proj in (self.k_proj, self.v_proj)
        )

    def insert(
        self,
        state: LocalState,
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        is_new: Bool[Array, "B C"],
    ) -> LocalState:
        """Insert keys and values of new tokens into their slots of the current block; T is C or 1."""
        is_new = is_new[:, :, None, None]
        keys, values = (
            jnp.where(is_new, new.astype(old.dtype), old)
            for new, old in ((key, state.keys), (value, state.values))
        )  # fmt: skip
        return state._replace(keys=keys, values=values)

    def advance(self, state: LocalState, is_new: Bool[Array, "B C"]) -> LocalState:
        """Count new tokens; where the current block is full, it becomes the other block."""
        count = state.count + jnp.sum(is_new, axis=1).astype(jnp.int32)
        is_full = count == self.window
        current, other = (state.keys, state.values), (state.other_keys, state.other_values)
        other_keys, other_values = layout.select_rows(is_full, current, other)
        return state._replace(
            other_keys=other_keys,
            other_values=other_values,
            has_other=state.has_other | is_full,
            count=jnp.where(is_full, 0, count),
        )

    def attend_block(
        self,
        query: Float[Array, "B T N H"],
        state: LocalState,
        persistent: tuple[Float[Array, "P K H"], Float[Array, "P K H"]] | None,
        *,
        is_recalled: bool,
    ) -> Float[Array, "B T N H"]:
        """Attention output of the current block's queries: those of all slots, T = C, or that of the next slot, T = 1.

        Args:
          query: projected queries, not yet rotated.
          state: keys and values, those of the queries' own tokens included.
          persistent: keys and values of the persistent tokens; None = there are none.
          is_recalled: True = the other block holds what a memory recalled for this block's tokens, one per slot;
            False = it is the previous block.
        """
        batch_size, length = query.shape[:2]
        slots = jnp.broadcast_to(jnp.arange(self.window)[None, :], (batch_size, self.window))
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
            persistent_key, persistent_value = (jnp.broadcast_to(x[None], (batch_size, *x.shape)) for x in persistent)
            keys, values = [persistent_key, *keys], [persistent_value, *values]
            masks = [jnp.ones((batch_size, length, len(persistent[0])), bool), *masks]
        return attend(
            query, jnp.concatenate(keys, axis=1), jnp.concatenate(values, axis=1), jnp.concatenate(masks, axis=2)
        )

    def _rotate(self, x: Float[Array, "B T N H"], positions: Int[Array, "B T"]) -> Float[Array, "B T N H"]:
        """Rotary embedding of heads at positions."""
        angles = functional.rotary_angles(positions, self.frequencies, dtype=self.dtype)
        return functional.rotate(x.astype(self.dtype), *angles)

    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """Projections of queries, keys and values."""
        return self.q_proj, self.k_proj, self.v_proj

    def split_heads(self, x: Float[Array, "B T I"]) -> Float[Array, "B T N H"]:
        """Split a projection into heads."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)
