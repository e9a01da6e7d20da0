"""Blocks of attention and memory (Titans, section 4; attention with a bank), in Flax NNX.

Twin: torch_ref/memory/blocks.py.

A block takes the normalised stream [B T D] and what it returns is added to the residual stream. Every block has one
interface: `answer, state, loss = block(x, state)`; the state has one size and goes on at any token, the loss trains a
bank's compression and is 0 elsewhere. docs/memory.md draws a segment's way through memory as context. Source: Behrouz
et al. 2024, arXiv:2501.00663. Differs from it: in `mac` a segment's token sees only its own and earlier
tokens' recalled states, and reads the memory as it is behind itself, so that no token depends on a later one; in `mal`
the memory's answers are added to what it read and normalised before attention reads them (eq. 30 hands on them alone).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from jaxbench import nn
from jaxbench.memory import layout, window
from jaxbench.memory.bank import Bank, BankState
from jaxbench.memory.block_config import BlockConfig
from jaxbench.memory.neural import NeuralMemory, NeuralState
from jaxbench.memory.window import LocalAttention, LocalState


class BlockState(NamedTuple):
    """What rows remember; None = the block has no such part."""

    local: LocalState | None  # of the attention
    memory: NeuralState | BankState
    tail: Float[Array, "B K-1 C"] | None  # memory as context: what the convolutions of the recall look back on


class Block(nnx.Module):
    """Attention, memory, and the norms between them, as a kind of block has them."""

    def __init__(self, config: BlockConfig, *, dtype: str):
        c = config
        norm = functools.partial(nn.RMSNorm, c.d_model, eps=c.norm_eps, dtype=dtype)
        local = functools.partial(
            LocalAttention, c.d_model, num_heads=c.num_heads, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim,
            window=c.window, num_persistent=c.num_persistent, rope_theta=c.rope_theta, has_output=c.kind != "bank",
            dtype=dtype,
        )  # fmt: skip
        self.attention = local() if c.has_attention else None
        self.memory = None if c.neural is None else NeuralMemory(c.neural, dtype=dtype)
        self.bank = None if c.bank is None else Bank(c.bank, dtype=dtype)
        self.input_norm = norm() if c.kind == "mal" else None
        self.answer_norm = norm() if c.kind in ("mac", "mag") else None
        self.memory_norm = norm() if c.kind in ("mac", "mag") else None
        self.kind, self.dtype = c.kind, dtype

    def __call__(
        self,
        x: Float[Array, "B T D"],
        state: BlockState | None = None,
        *,
        is_token: Bool[Array, "B T"] | None = None,
        learn: bool = True,
    ) -> tuple[Float[Array, "B T D"], BlockState, Float[Array, ""]]:
        """Return what is added to the stream, the state behind the last token, and the compression's loss.

        Args:
          x: the stream, normalised.
          state: the state behind the tokens before; None = nothing was read.
          is_token: False = padding, which is answered with zeros and changes nothing; None = no padding.
          learn: False = the neural memory's weights stay as they are; a bank goes on keeping what it reads.

        Raises:
          ValueError: the state is of another model or batch size.
        """
        if state is not None:
            self._check(state)
        run = {"mac": self._as_context, "mag": self._as_gate, "mal": self._as_layer, "lmm": self._alone}
        if self.bank is not None:
            return self._with_bank(x, state, is_token)
        answer, state = run[self.kind](x, state, is_token, learn)
        return answer, state, jnp.zeros((), answer.dtype)

    def init_state(self, batch_size: int) -> BlockState:
        """Return the state of rows that have read nothing."""
        local = None if self.attention is None else self.attention.init_state(batch_size)
        memory = (self.bank if self.memory is None else self.memory).init_state(batch_size)
        return BlockState(local, memory, memory.tail if self.kind == "mac" else None)

    def reset(self, state: BlockState, is_reset: Bool[Array, " B"]) -> BlockState:
        """Return the state with some rows as they are before anything is read."""
        blank = self.init_state(len(is_reset))
        return layout.tree_map(functools.partial(layout.chosen, is_reset), blank, state)

    def _check(self, state: BlockState) -> None:
        """Raise where a state is of another kind of block; the parts check its sizes."""
        is_mac, memory = self.kind == "mac", NeuralState if self.bank is None else BankState
        wanted = (self.attention is not None, memory.__name__, is_mac)
        found = (state.local is not None, type(state.memory).__name__, state.tail is not None)
        if found != wanted:
            raise ValueError(
                f"block: kind={self.kind} wants a state with (window, memory, tail) {wanted}, the state has {found}"
            )

    def _parts(self, state: BlockState | None) -> tuple[LocalState | None, Any]:
        return (None, None) if state is None else (state.local, state.memory)

    def _alone(self, x: Array, state: BlockState | None, is_token: Array | None, learn: bool) -> tuple:
        answer, memory = self.memory(x, self._parts(state)[1], is_token=is_token, learn=learn)
        return answer, BlockState(None, memory, None)

    def _as_gate(self, x: Array, state: BlockState | None, is_token: Array | None, learn: bool) -> tuple:
        """Eq. 26 to 28: attention to the window, gated by what the memory answers to the same tokens."""
        local, memory = self._parts(state)
        seen, local = self.attention(x, local, is_token=is_token)
        told, memory = self.memory(x, memory, is_token=is_token, learn=learn)
        return self._gated(self.answer_norm(seen), told), BlockState(local, memory, None)

    def _as_layer(self, x: Array, state: BlockState | None, is_token: Array | None, learn: bool) -> tuple:
        """Eq. 29 to 31: the memory's answers, added to what it read (section 4.4), go through the attention."""
        local, memory = self._parts(state)
        told, memory = self.memory(x, memory, is_token=is_token, learn=learn)
        answer, local = self.attention(self.input_norm(x + told), local, is_token=is_token)
        return answer, BlockState(local, memory, None)

    def _with_bank(self, x: Array, state: BlockState | None, is_token: Array | None) -> tuple:
        """Attention to the window, mixed head by head with the bank's answers (Chen et al. 2024, arXiv:2410.03156)."""
        local, memory = self._parts(state)
        own = None
        if self.attention is not None:
            own, local = self.attention(x, local, is_token=is_token)
        answer, memory, loss = self.bank(x, memory, own=own, is_token=is_token)
        return answer, BlockState(local, memory, None), loss

    def _gated(self, answer: Array, told: Array) -> Array:
        """Return the combination of section 4.2: both normalised with learned scales, one through a sigmoid."""
        wide = jnp.promote_types(answer.dtype, jnp.float32)
        return answer * jax.nn.sigmoid(self.memory_norm(told).astype(wide)).astype(answer.dtype)

    def _as_context(self, x: Array, state: BlockState | None, is_token: Array | None, learn: bool) -> tuple:
        """Eq. 21 to 25: a segment after the other."""
        is_fresh = state is None
        state = self.init_state(len(x)) if is_fresh else state
        self.attention.check(state.local, len(x))
        tokens, number = window.aligned(x, is_token)
        # A segment is computed inside a scan, on a copy, so that nothing that watches modules sees its values.
        graph, params = nnx.split(self)
        learned = self.attention.learned()

        def read(state: BlockState, block: tuple) -> tuple[BlockState, Array]:
            (tokens,), is_here = block
            return nnx.merge(graph, params).read_segment(tokens, state, is_here, learned, learn)

        how = {"count": state.local.count, "number": number, "size": self.attention.window, "is_fresh": is_fresh}
        state, answer = window.by_blocks(read, state, (tokens,), **how)
        return window.spread(answer, is_token), state

    def read_segment(
        self, x: Float[Array, "B T D"], state: BlockState, is_here: Bool[Array, "B C"], learned: Any, learn: bool
    ) -> tuple[BlockState, Float[Array, "B T D"]]:
        """Read tokens of rows' current segments: whole segments' slots, or the next token.

        is_here says which slots hold new tokens; learned are the attention's learned keys and values.
        """
        attention, local, memory = self.attention, state.local, state.memory
        is_token = is_here if x.shape[1] > 1 else jnp.any(is_here, axis=1, keepdims=True)
        # h = M_(t-1)(q): what the memory knew before the segment, which is where its chunk began.
        before = memory._replace(weights=memory.anchor, tail=state.tail)
        recalled, before = self.memory(x, before, is_token=is_token, learn=False)
        heads = x.shape[:2]
        query, key, value = (p(x).reshape(*heads, -1, attention.head_dim) for p in attention.projections())
        entries = (p(recalled).reshape(*heads, -1, attention.head_dim) for p in attention.projections()[1:])
        local = attention.held(local, key, value, is_here)
        other = attention.held(local._replace(keys=local.other_keys, values=local.other_values), *entries, is_here)
        local = local._replace(other_keys=other.keys, other_values=other.values)
        seen = attention.answer(query, local, learned, is_recalled=True)
        answer = self.answer_norm(attention.o_proj(seen.reshape(*heads, -1)))
        told, memory = self.memory(answer, memory, is_token=is_token, learn=learn, within_chunk=True)
        local = attention.moved_on(local, is_here)
        # Where the memory did not learn all of a segment, its chunk ends with the segment all the same.
        is_done = local.count == 0
        anchor = layout.tree_map(functools.partial(layout.chosen, is_done), memory.weights, memory.anchor)
        memory = memory._replace(anchor=anchor, count=jnp.where(is_done, 0, memory.count))
        return BlockState(local, memory, before.tail), self._gated(answer, told)


# Training on a target, as the parity table does it


class Batch(NamedTuple):
    """One step's data."""

    x: Float[Array, "B T D"]
    target: Float[Array, "B T D"]
    is_token: Bool[Array, "B T"] | None  # None = no padding


def predict(model: Block, batch: Batch, *, dropout: Any = None) -> tuple[Array, BlockState, Array]:
    """Return the block's answers to a batch, the state behind it and the compression's loss; there is no dropout."""
    return model(batch.x.astype(model.dtype), is_token=batch.is_token)


def loss_of(output: tuple[Array, BlockState, Array], batch: Batch) -> Float[Array, ""]:
    """Return the mean squared error at tokens, plus the compression's loss, plus mean squares of the state's arrays."""
    answer, state, loss = output
    wide = jnp.promote_types(answer.dtype, jnp.float32)
    squares = jnp.mean(jnp.square(answer.astype(wide) - batch.target.astype(wide)), axis=-1)
    is_token = jnp.ones(squares.shape, bool) if batch.is_token is None else batch.is_token
    loss = loss.astype(wide) + jnp.sum(jnp.where(is_token, squares, jnp.zeros((), wide))) / jnp.sum(is_token)
    for leaf in jax.tree.leaves(state):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            loss = loss + jnp.mean(jnp.square(leaf.astype(wide)))
    return loss


def loss_fn(model: Block, batch: Batch, *, dropout: Any = None) -> Float[Array, ""]:
    """Return the model's loss on a batch."""
    return loss_of(predict(model, batch, dropout=dropout), batch)


def build(config: BlockConfig, params: Mapping[str, np.ndarray], *, dtype: str = "float32") -> Block:
    """Return the block of a configuration holding `params`, cast to dtype.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; all names are listed.
    """
    return nn.load_params(Block(config, dtype=dtype), params)
