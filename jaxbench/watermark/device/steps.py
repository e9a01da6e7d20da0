"""Steps of generation, as the schemes share them: which rows are marked, with which seeds. Twin: torch_ref.

A context that a row used before is drawn with ordinary randomness: drawn with its key again, it would repeat itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int, UInt32

from jaxbench.watermark import prf

HISTORY = 1024  # contexts of a row that are remembered
State = dict[str, Array]


class Position(NamedTuple):
    """Where the rows of a batch are: the next token of row b follows tokens[b, :length[b]]."""

    tokens: Int[Array, "B W"]
    length: Int[Array, " B"]
    step: Array  # tokens generated


class KeyedStep(NamedTuple):
    """What the rows of a batch draw their next token with."""

    key: prf.Halves  # [B 1] each
    seeds: UInt32[Array, "B S"]  # of their contexts
    is_active: Bool[Array, " B"]  # rows that are drawn with their key


def first_key(state: State) -> prf.Halves:
    """Return the first key [B 1] of each row."""
    return prf.halves(state["keys"][:, :2], 2)


def active_rows(scheme: Any, state: State, at: Position) -> Bool[Array, " B"]:
    """Return which rows have a key and a full context."""
    return state["marked"] & (at.length >= scheme.context_length)


def last_places(length: Int[Array, " B"], width: int) -> Int[Array, "B n"]:
    """Return the places of the last `width` tokens of each row; below 0 where there are fewer."""
    return length[:, None] + jnp.arange(-width, 0)[None, :]


def last_tokens(at: Position, width: int) -> Int[Array, "B n"]:
    """Return the last `width` tokens of each row; where there are fewer, the first ones have no meaning."""
    return jnp.take_along_axis(at.tokens, jnp.maximum(last_places(at.length, width), 0), axis=1)


def with_history(state: State) -> State:
    """Return a state that remembers which contexts each row was drawn after: none yet."""
    return state | {"used": jnp.zeros((state["marked"].shape[0], HISTORY, 2), jnp.uint32)}


def remember(
    state: State, context_seeds: UInt32[Array, "B 2"], is_active: Bool[Array, " B"], step: Array
) -> tuple[State, Bool[Array, " B"]]:
    """Return the state that knows this step's contexts, and which active rows have a context that is new to them."""
    is_written = jnp.arange(HISTORY)[None, :] < step
    is_known = jnp.all(state["used"] == context_seeds[:, None, :], axis=-1) & is_written
    is_new = is_active & ~jnp.any(is_known, axis=1)
    entry = jnp.where(is_new[:, None], context_seeds, 0)[:, None, :]
    used = lax.dynamic_update_slice_in_dim(state["used"], entry, step % HISTORY, axis=1)
    return state | {"used": used}, is_new


def keyed_step(scheme: Any, state: State, at: Position) -> tuple[State, KeyedStep]:
    """Return the next state and the step of a scheme with a context rule, one key a row and remembered contexts."""
    key, rule = first_key(state), scheme.context
    contexts = last_tokens(at, rule.width)
    seeds = prf.seeds_after(rule, (key[0][:, 0], key[1][:, 0]), contexts, None)
    state, is_new = remember(state, seeds, active_rows(scheme, state, at), at.step)
    return state, KeyedStep(key, seeds, is_new)


def draw_if_any(is_active: Bool[Array, " B"], draw: Any) -> Int[Array, " B"]:
    """Return the tokens of `draw`, or -1 in every row where no row is active: what is not needed is not computed."""
    return lax.cond(jnp.any(is_active), draw, lambda: jnp.full(is_active.shape, -1, jnp.int32))
