"""Blocks of attention and memory (Titans, section 4; attention with a bank), in Flax NNX.

Twin: torch_ref/memory/blocks.py.

A block takes the normalised residual stream [B T D], and its output is added to the stream. All kinds share one
interface, `output, state, loss = block(x, state)`. The state has a fixed size and can be resumed at any token; the loss
trains a bank's compression and is 0 elsewhere. docs/memory.md draws the data flow of a segment in memory as context.
Source: Behrouz et al. 2024, arXiv:2501.00663. Differs from it: in `mac`, a token sees only its own and earlier tokens'
recalled states, and reads the memory after its own write, so that no token depends on a later one; in `mal`, the
memory's outputs are added to its inputs and normalised before the attention (eq. 30 passes on the outputs alone).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from jaxbench import nn
from jaxbench.memory import layout, sliding_window
from jaxbench.memory.bank import Bank, BankState
from jaxbench.memory.block_config import BlockConfig
from jaxbench.memory.neural import NeuralMemory, NeuralState
from jaxbench.memory.sliding_window import LocalAttention, LocalState

Stream = Float[Array, "B T D"]
IsToken = Bool[Array, "B T"] | None  # False = padding; None = no padding


class BlockState(NamedTuple):
    """State of rows; None = the block has no such part."""

    local: LocalState | None  # keys and values of the sliding window
    memory: NeuralState | BankState
    tail: Float[Array, "B K-1 C"] | None  # memory as context: last inputs of the recall's convolutions

    @property
    def penalised(self) -> tuple[Float[Array, "..."], ...]:
        """Arrays whose mean squares are added to the loss of parity cases (target.py), so that gradients reach them."""
        return tuple(x for x in jax.tree.leaves(self) if jnp.issubdtype(x.dtype, jnp.floating))


Answer = tuple[Stream, BlockState]  # a block's output, and the state after it


class Block(nnx.Module):
    """Sliding-window attention and memory, combined as context, gate or layer; memory alone; attention with a bank."""

    def __init__(self, config: BlockConfig, *, dtype: str):
        c = config
        norm = functools.partial(nn.RMSNorm, c.d_model, eps=c.norm_eps, dtype=dtype)
        self.attention = LocalAttention(c, dtype=dtype) if c.has_attention else None
        self.memory = None if c.neural is None else NeuralMemory(c.neural, dtype=dtype)
        self.bank = None if c.bank is None else Bank(c.bank, dtype=dtype)
        self.input_norm = norm() if c.kind == "mal" else None
        self.answer_norm = norm() if c.kind in ("mac", "mag") else None
        self.memory_norm = norm() if c.kind in ("mac", "mag") else None
        self.kind, self.d_model, self.dtype = c.kind, c.d_model, dtype

    def __call__(
        self,
        x: Float[Array, "B T D"],
        state: BlockState | None = None,
        *,
        is_token: Bool[Array, "B T"] | None = None,
        learn: bool = True,
    ) -> tuple[Float[Array, "B T D"], BlockState, Float[Array, ""]]:
        """Compute the block's output at each token, which is added to the residual stream.

        Args:
          x: the residual stream, normalised.
          state: the state after earlier tokens; None = there are none.
          is_token: False = padding, whose outputs are zeros and which changes no state; None = no padding.
          learn: False = a neural memory is read only; a bank is still written.

        Returns:
          The output, the state after the last token, and the bank's reconstruction loss, 0 without a bank.

        Raises:
          ValueError: x or is_token has another shape, or the state is for another model or batch size.
        """
        if x.ndim != 3 or x.shape[2] != self.d_model:
            raise ValueError(f"block: x is {tuple(x.shape)}, wanted (rows, tokens, d_model={self.d_model})")
        if state is not None:
            self._check(state)
        run = {"mac": self._as_context, "mag": self._as_gate, "mal": self._as_layer, "lmm": self._alone}
        if self.bank is not None:
            return self._with_bank(x, state, is_token)
        output, state = run[self.kind](x, state, is_token, learn)
        return output, state, jnp.zeros((), output.dtype)

    def init_state(self, batch_size: int) -> BlockState:
        """State of rows that have read nothing."""
        local = None if self.attention is None else self.attention.init_state(batch_size)
        memory = (self.bank if self.memory is None else self.memory).init_state(batch_size)
        return BlockState(local, memory, memory.tail if self.kind == "mac" else None)

    def reset(self, state: BlockState, is_reset: Bool[Array, " B"]) -> BlockState:
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
    ) -> tuple[Stream, BlockState, Float[Array, ""]]:
        """Sliding-window attention mixed head by head with the bank's read-out (Chen et al. 2024, arXiv:2410.03156)."""
        local, memory = self._parts(state)
        attention_out = None
        if self.attention is not None:
            attention_out, local = self.attention(x, local, is_token=is_token)
        output, memory, loss = self.bank(x, memory, attention_out=attention_out, is_token=is_token)
        return output, BlockState(local, memory, None), loss

    def _gated(self, attention_out: Float[Array, "B T D"], memory_out: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Gate an attention output, already normalised, by the memory's: y * sigmoid(norm(m)) (Titans, section 4.2)."""
        wide = jnp.promote_types(attention_out.dtype, jnp.float32)
        return attention_out * jax.nn.sigmoid(self.memory_norm(memory_out).astype(wide)).astype(attention_out.dtype)

    def _as_context(self, x: Stream, state: BlockState | None, is_token: IsToken, learn: bool) -> Answer:
        """Memory as context (Titans, eq. 21 to 25), segment by segment."""
        is_fresh = state is None
        state = self.init_state(len(x)) if is_fresh else state
        self.attention.check(state.local, len(x))
        if x.shape[1] == 0:
            return self.memory(x, state.memory)[0], state
        tokens, num_tokens = layout.left_align(x, is_token)
        # Each segment is computed inside a scan, on a copy, so that nothing that watches modules sees its values.
        graph, params = nnx.split(self)
        persistent = self.attention.persistent_keys_values()

        def read(state: BlockState, block: tuple) -> tuple[BlockState, Stream]:
            (tokens,), is_new = block
            return nnx.merge(graph, params).read_segment(tokens, state, is_new, persistent, learn)

        state, output = sliding_window.scan_blocks(
            read, state, (tokens,), num_begun=state.local.count, num_tokens=num_tokens, size=self.attention.window,
            is_fresh=is_fresh,
        )  # fmt: skip
        return layout.restore_padding(output, is_token), state

    def read_segment(
        self,
        x: Float[Array, "B T D"],
        state: BlockState,
        is_new: Bool[Array, "B C"],
        persistent: tuple[Float[Array, "P K H"], Float[Array, "P K H"]] | None,
        learn: bool,
    ) -> tuple[BlockState, Float[Array, "B T D"]]:
        """Memory as context for one segment of each row (Titans, eq. 21 to 25), S^(t) = x.

        Args:
          x: the tokens of all slots of the segment, T = C, or the next token alone, T = 1.
          is_new: which of the segment's slots hold tokens of this call.
          persistent: keys and values of the attention's persistent tokens.
          learn: False = the memory is read only.
        """
        attention, memory = self.attention, state.memory
        is_token = is_new if x.shape[1] > 1 else jnp.any(is_new, axis=1, keepdims=True)
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
        memory = memory._replace(anchor=anchor, count=jnp.where(is_done, 0, memory.count))
        return BlockState(local, memory, before.tail), self._gated(attention_out, memory_out)


def build(config: BlockConfig, params: Mapping[str, np.ndarray], *, dtype: str = "float32") -> Block:
    """Build the block of a configuration from parameters by name, cast to dtype.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; all names are listed.
    """
    return nn.load_params(Block(config, dtype=dtype), params)
