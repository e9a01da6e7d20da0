"""Steps of generation, as the schemes share them: which rows are marked, with which seeds. Twin: jaxbench.

A context that a row used before is drawn with ordinary randomness: drawn with its key again, it would repeat itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from torch_ref.watermark import prf

HISTORY = 1024  # contexts of a row that are remembered
State = dict[str, Tensor]


class Position(NamedTuple):
    """Where the rows of a batch are: the next token of row b follows tokens[b, :length[b]]."""

    tokens: Int[Tensor, "B W"]
    length: Int[Tensor, " B"]
    step: int  # tokens generated


class KeyedStep(NamedTuple):
    """What the rows of a batch draw their next token with."""

    key: prf.Halves  # [B 1] each
    seeds: Int64[Tensor, "B S"]  # of their contexts
    is_active: Bool[Tensor, " B"]  # rows that are drawn with their key


def first_key(state: State) -> prf.Halves:
    """Return the first key [B 1] of each row."""
    return prf.halves(state["keys"][:, :2], 2)


def active_rows(scheme: Any, state: State, at: Position) -> Bool[Tensor, " B"]:
    """Return which rows have a key and a full context."""
    return state["marked"] & (at.length >= scheme.context_length)


def last_places(length: Int[Tensor, " B"], width: int) -> Int[Tensor, "B n"]:
    """Return the places of the last `width` tokens of each row; below 0 where there are fewer."""
    return length[:, None] + torch.arange(-width, 0, device=length.device)[None, :]


def last_tokens(at: Position, width: int) -> Int[Tensor, "B n"]:
    """Return the last `width` tokens of each row; where there are fewer, the first ones have no meaning."""
    return torch.gather(at.tokens, 1, torch.clamp(last_places(at.length, width), min=0)).to(torch.int64)


def with_history(state: State) -> State:
    """Return a state that remembers which contexts each row was drawn after: none yet."""
    marked = state["marked"]
    return state | {"used": torch.zeros((len(marked), HISTORY, 2), dtype=torch.int64, device=marked.device)}


def remember(
    state: State, context_seeds: Int64[Tensor, "B 2"], is_active: Bool[Tensor, " B"], step: int
) -> tuple[State, Bool[Tensor, " B"]]:
    """Return the state that knows this step's contexts, and which active rows have a context that is new to them."""
    slots = torch.arange(HISTORY, device=is_active.device)[None, :]
    is_known = (state["used"] == context_seeds[:, None, :]).all(dim=-1) & (slots < step)
    is_new = is_active & ~is_known.any(dim=1)
    entry = torch.where(is_new[:, None], context_seeds, 0)[:, None, :]
    used = torch.where((slots == step % HISTORY)[..., None], entry, state["used"])
    return state | {"used": used}, is_new


def keyed_step(scheme: Any, state: State, at: Position) -> tuple[State, KeyedStep]:
    """Return the next state and the step of a scheme with a context rule, one key a row and remembered contexts."""
    key, rule = first_key(state), scheme.context
    contexts = last_tokens(at, rule.width)
    seeds = prf.seeds_after(rule, (key[0][:, 0], key[1][:, 0]), contexts, None)
    state, is_new = remember(state, seeds, active_rows(scheme, state, at), at.step)
    return state, KeyedStep(key, seeds, is_new)


def draw_if_any(is_active: Bool[Tensor, " B"], draw: Any) -> Int[Tensor, " B"]:
    """Return the tokens of `draw`, or -1 in every row where no row is active: what is not needed is not computed."""
    return draw() if is_active.any() else torch.full(is_active.shape, -1, device=is_active.device)
