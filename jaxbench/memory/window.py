"""Attention to a window of tokens with a state of one size, in Flax NNX. Twin: torch_ref/memory/window.py.

A row's own tokens come in blocks of C = window. Token i of a block sees the learned tokens, the block's tokens up to
itself, and of the other block in the state those that it is given: the later ones of the block before, which makes a
sliding window of C tokens, or what a memory answered (blocks.py). A state carries an unfinished block; keys are kept
as projected and rotated where they are used. Axis letters: WORKSPACE.md's; C slots of a block, P learned tokens.
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


class LocalState(NamedTuple):
    """Keys and values that rows still look back on."""

    keys: Float[Array, "B C K H"]  # of the current block, filled from the left
    values: Float[Array, "B C K H"]
    other_keys: Float[Array, "B C K H"]  # of the other block
    other_values: Float[Array, "B C K H"]
    has_other: Bool[Array, " B"]
    count: Int[Array, " B"]  # tokens of the current block


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T N H"]:
    """Return softmax attention with grouped heads where the mask is True; zeros where a query sees nothing."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.astype(wide).reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key.astype(wide)) / math.sqrt(query.shape[-1])
    scores = jnp.where(mask[:, None, None], scores, jnp.asarray(-jnp.inf, wide))
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, jnp.zeros((), wide)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, jnp.ones((), wide))
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, value.astype(wide)).reshape(query.shape).astype(query.dtype)


def by_blocks(
    read: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    tokens: tuple[Float[Array, "B T ..."], ...],
    *,
    count: Int[Array, " B"],
    number: Int[Array, " B"],
    size: int,
    is_fresh: bool,
) -> tuple[Any, Float[Array, "B T ..."]]:
    """Walk over rows' blocks: state, answer = read(state, (tokens, is_here)); return the last state, the answers.

    Args:
      read: gets a block's slots [B C ...] and which of them hold new tokens; a single token comes as it is, [B 1 ...],
        with the slot that it takes.
      tokens: arrays whose rows begin with their tokens.
      count: tokens of the block that is begun in each row.
      number: tokens of each row that count.
      size: C.
      is_fresh: no row has begun a block.
    """
    length = tokens[0].shape[1]
    place = jnp.arange(size)[None, :]
    if length == 1:
        return read(state, (tokens, (number[:, None] > 0) & (place == count[:, None])))
    num_blocks = -(-length // size) if is_fresh else -(-(length + size - 1) // size)
    place = jnp.arange(num_blocks * size)[None, :]
    is_here = (place >= count[:, None]) & (place < (count + number)[:, None])
    source = jnp.clip(place - count[:, None], 0, length - 1)
    blocks = tuple(layout.cut(layout.gathered(x, source), size) for x in tokens)
    state, answers = layout.walk(read, state, (blocks, layout.cut(is_here, size)))
    return state, layout.gathered(layout.joined(answers), jnp.arange(length)[None, :] + count[:, None])


def aligned(
    x: Float[Array, "B T D"], is_token: Bool[Array, "B T"] | None
) -> tuple[Float[Array, "B T D"], Int[Array, " B"]]:
    """Return rows that begin with their tokens, in order, and how many each has."""
    if is_token is None:
        return x, jnp.full((len(x),), x.shape[1], jnp.int32)
    order = jnp.argsort(~is_token, axis=1, stable=True)
    return layout.gathered(x, order), jnp.sum(is_token, axis=1).astype(jnp.int32)


def spread(x: Float[Array, "B T ..."], is_token: Bool[Array, "B T"] | None) -> Float[Array, "B T ..."]:
    """Undo `aligned`: each token's value where it was, zeros elsewhere."""
    if is_token is None:
        return x
    back = layout.gathered(x, jnp.maximum(jnp.cumsum(is_token, axis=1) - 1, 0))
    return jnp.where(is_token.reshape(*is_token.shape, *(1,) * (x.ndim - 2)), back, jnp.zeros((), x.dtype))


class LocalAttention(nnx.Module):
    """Causal attention to a sliding window, with learned tokens that every query sees (Titans, section 4.2)."""

    def __init__(self, d_model: int, *, num_heads: int, num_kv_heads: int, head_dim: int, window: int,
                 num_persistent: int, rope_theta: float, has_output: bool, dtype: str):  # fmt: skip
        linear = functools.partial(nn.Linear, use_bias=False, dtype=dtype)
        self.q_proj = linear(d_model, num_heads * head_dim)
        self.k_proj, self.v_proj = (linear(d_model, num_kv_heads * head_dim) for _ in range(2))
        self.o_proj = linear(num_heads * head_dim, d_model) if has_output else None
        self.persistent = nnx.Param(jnp.zeros((num_persistent, d_model), dtype)) if num_persistent else None
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.window, self.dtype = window, dtype
        self.frequencies = rotary.frequencies(head_dim, rope_theta, None)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        state: LocalState | None = None,
        *,
        is_token: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T ..."], LocalState]:
        """Return the projected answers [B T D], or the heads' [B T N H] without a projection, and the next state.

        Args:
          x: the stream, normalised.
          state: the state behind the tokens before; None = there are none.
          is_token: False = padding, which is answered with zeros and changes nothing; None = no padding.

        Raises:
          ValueError: the state is of another model or batch size.
        """
        is_fresh = state is None
        state = self.init_state(len(x)) if is_fresh else state
        self.check(state, len(x))
        tokens, number = aligned(x, is_token)
        entries = tuple(self._heads(proj(tokens)) for proj in self.projections())
        learned = self.learned()

        def read(state: LocalState, block: tuple) -> tuple[LocalState, Array]:
            (query, key, value), is_here = block
            held = self.held(state, key, value, is_here)
            answer = self.answer(query, held, learned, is_recalled=False)
            return self.moved_on(held, is_here), answer

        how = {"count": state.count, "number": number, "size": self.window, "is_fresh": is_fresh}
        state, answer = by_blocks(read, state, entries, **how)
        if self.o_proj is not None:
            answer = self.o_proj(answer.reshape(*answer.shape[:2], -1))
        return spread(answer, is_token), state

    def init_state(self, batch_size: int) -> LocalState:
        """Return the state of rows that have read nothing."""
        none = jnp.zeros((batch_size, self.window, self.num_kv_heads, self.head_dim), self.dtype)
        return LocalState(none, none, none, none, jnp.zeros(batch_size, bool), jnp.zeros(batch_size, jnp.int32))

    def reset(self, state: LocalState, is_reset: Bool[Array, " B"]) -> LocalState:
        """Return the state with some rows as they are before anything is read."""
        blank = self.init_state(len(is_reset))
        return layout.tree_map(functools.partial(layout.chosen, is_reset), blank, state)

    def check(self, state: LocalState, batch_size: int) -> None:
        """Raise ValueError where a state is of another model or batch size."""
        wanted = (batch_size, self.window, self.num_kv_heads, self.head_dim)
        found = state.keys.shape
        if found != wanted:
            raise ValueError(f"window: the state's keys are {found}, wanted {wanted} (rows, window, ...)")

    def learned(self) -> tuple[Float[Array, "P K H"], Float[Array, "P K H"]] | None:
        """Return keys and values of the learned tokens, which have no position."""
        if self.persistent is None:
            return None
        tokens = self.persistent[...][None]
        return tuple(self._heads(functional.matmul(tokens, proj.kernel[...]))[0] for proj in (self.k_proj, self.v_proj))

    def held(self, state: LocalState, key: Array, value: Array, is_here: Bool[Array, "B C"]) -> LocalState:
        """Return the state with new keys and values in the current block's slots."""
        is_here = is_here[:, :, None, None]
        keys, values = (
            jnp.where(is_here, new.astype(old.dtype), old)
            for new, old in ((key, state.keys), (value, state.values))
        )  # fmt: skip
        return state._replace(keys=keys, values=values)

    def moved_on(self, state: LocalState, is_here: Bool[Array, "B C"]) -> LocalState:
        """Return the state with new tokens counted; where the block is full, it is the other one from now on."""
        count = state.count + jnp.sum(is_here, axis=1).astype(jnp.int32)
        is_full = count == self.window
        other_keys, other_values = (
            layout.chosen(is_full, new, old)
            for new, old in ((state.keys, state.other_keys), (state.values, state.other_values))
        )
        return state._replace(
            other_keys=other_keys,
            other_values=other_values,
            has_other=state.has_other | is_full,
            count=jnp.where(is_full, 0, count),
        )

    def answer(
        self, query: Float[Array, "B T N H"], state: LocalState, learned: tuple | None, *, is_recalled: bool
    ) -> Float[Array, "B T N H"]:
        """Return what queries of the current block see: a whole block's, or the one that comes next.

        is_recalled: the other block holds what a memory answered to this block's tokens, not the block before.
        """
        batch_size, length = query.shape[:2]
        slot = jnp.broadcast_to(jnp.arange(self.window)[None, :], (batch_size, self.window))
        place = state.count[:, None] if length == 1 else slot
        is_past = slot[:, None, :] <= place[:, :, None]
        is_other = is_past if is_recalled else ~is_past & state.has_other[:, None, None]
        # The block before has positions 0 .. C - 1, this one C .. 2 C - 1.
        shift = self.window if is_recalled else 0
        query, keys, others = (
            functional.rotate(
                x.astype(self.dtype), *functional.rotary_angles(position, self.frequencies, dtype=self.dtype)
            )
            for x, position in (
                (query, place + self.window), (state.keys, slot + self.window), (state.other_keys, slot + shift)
            )
        )  # fmt: skip
        keys, values, mask = [others, keys], [state.other_values, state.values], [is_other, is_past]
        if learned is not None:
            prefix = [jnp.broadcast_to(x[None], (batch_size, *x.shape)) for x in learned]
            keys, values = [prefix[0], *keys], [prefix[1], *values]
            mask = [jnp.ones((batch_size, length, len(learned[0])), bool), *mask]
        joined = (jnp.concatenate(x, axis=1) for x in (keys, values))
        return attend(query, *joined, jnp.concatenate(mask, axis=2))

    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """Return those of queries, keys and values."""
        return self.q_proj, self.k_proj, self.v_proj

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, self.head_dim)
