"""Shared by the schemes' files in this folder: rows marked at a step, and the base class `Mark`. Twin: jaxbench.

A scheme names its file by its attribute `device` (schemes/contract.py); the class there is called `Mark`. After a
context that a row has used before, the draw is ordinary: with the key, it would repeat the earlier keyed draw.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from jaxbench.watermark.device.contract import BaseMark, KeyedStep, Position, State, active_rows, first_key
from jaxbench.watermark.schemes.contract import Scheme
from torch_ref.sample import OrdinaryDraw
from torch_ref.watermark import prf

HISTORY = 1024  # number of recent steps whose contexts are remembered, per row


def last_places(length: Int[Tensor, " B"], width: int) -> Int[Tensor, "B n"]:
    """Return the places of the last `width` tokens of each row; negative before the start of the row."""
    return length[:, None] + torch.arange(-width, 0, device=length.device)[None, :]


def last_tokens(at: Position, width: int) -> Int[Tensor, "B n"]:
    """Return the last `width` tokens of each row; in shorter rows, the leading ones are undefined."""
    return torch.gather(at.tokens, 1, torch.clamp(last_places(at.length, width), min=0)).to(torch.int64)


def with_history(state: State) -> State:
    """Return the state with an empty history of the contexts that each row was drawn after."""
    marked = state["marked"]
    return state | {"used": torch.zeros((len(marked), HISTORY, 2), dtype=torch.int64, device=marked.device)}


def remember(
    state: State, context_seeds: Int64[Tensor, "B 2"], is_active: Bool[Tensor, " B"], step: int
) -> tuple[State, Bool[Tensor, " B"]]:
    """Record this step's contexts in the state; also return which active rows have a context that is new to them."""
    slots = torch.arange(HISTORY, device=is_active.device)[None, :]
    is_known = (state["used"] == context_seeds[:, None, :]).all(dim=-1) & (slots < step)
    is_new = is_active & ~is_known.any(dim=1)
    entry = torch.where(is_new[:, None], context_seeds, 0)[:, None, :]
    used = torch.where((slots == step % HISTORY)[..., None], entry, state["used"])
    return state | {"used": used}, is_new


def keyed_step(scheme: Scheme, state: State, at: Position) -> tuple[State, KeyedStep]:
    """Return the next state and the step of a scheme with a context rule, one key per row and remembered contexts."""
    key, rule = first_key(state), scheme.context
    contexts = last_tokens(at, rule.width)
    seeds = prf.seeds_after(rule, (key[0][:, 0], key[1][:, 0]), contexts, None)
    state, is_new = remember(state, seeds, active_rows(scheme, state, at), at.step)
    return state, KeyedStep(key, seeds, is_new)


def draw_if_any(is_active: Bool[Tensor, " B"], draw: Any) -> Int[Tensor, " B"]:
    """Return the tokens of `draw`; if no row is active, skip the draw and return -1 in every row."""
    return draw() if is_active.any() else torch.full(is_active.shape, -1, device=is_active.device)


class Mark(BaseMark):
    """One scheme on a device: the defaults of most schemes."""

    def apply(self, state: Any, logits: Float[Tensor, "B V"], at: Position) -> tuple[State, Float[Tensor, "B V"]]:
        """Return the next state, and logits with `delta` added to those of green tokens (schemes that do not draw)."""
        is_green = self.green_tokens(state, at)
        return state, logits + is_green.to(logits.dtype) * self.scheme.delta

    def text_words(self, key: prf.Halves, text: prf.Text) -> tuple[prf.Words, prf.Seeds]:
        """Return the words and seeds of the tokens of texts (not for kgw_markllm and kgw_transformers)."""
        scheme, tokens = self.scheme, text.tokens
        seeds = prf.text_seeds(scheme.context, key, tokens)
        return prf.token_words(scheme, key, seeds, tokens, vocab_size=self.vocab_size, payload=text.payload), seeds


class ReweightingMark(Mark):
    """A scheme that draws from a keyed distribution, `reweighted`, unless the row has used the context before."""

    def first_state(self, state: State) -> State:
        """Return the state before the first token, with a history of contexts."""
        return with_history(state)

    def reweighted(self, state: State, keyed: KeyedStep, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Logarithm of the scheme's distribution, up to a constant in each row."""

    def reweight(self, state: State, logits: Float[Tensor, "B V"], at: Position) -> tuple[State, Float[Tensor, "B V"]]:
        """Return the next state, and logits, reweighted in active rows."""
        state, keyed = keyed_step(self.scheme, state, at)
        return state, torch.where(keyed.is_active[:, None], self.reweighted(state, keyed, logits), logits)

    def draw(
        self, state: State, logits: Float[Tensor, "B V"], at: Position, sample: OrdinaryDraw
    ) -> tuple[State, Int[Tensor, " B"]]:
        """Return the next state, and the ordinary draw from reweighted logits for rows with a key, -1 for others."""
        state, keyed = keyed_step(self.scheme, state, at)

        def drawn_tokens() -> Int[Tensor, " B"]:
            changed = torch.where(keyed.is_active[:, None], self.reweighted(state, keyed, logits), logits)
            return sample(changed)

        drawn = draw_if_any(keyed.is_active, drawn_tokens)
        return state, torch.where(state["marked"], drawn, -1)


def mark_of(scheme: Scheme, *, vocab_size: int, green_lists: Any = None, device: str = "cpu") -> Mark:
    """Build a scheme's Mark, from the file that the scheme names."""
    module = importlib.import_module(f"torch_ref.watermark.device.{scheme.device}")
    return module.Mark(scheme, vocab_size=vocab_size, green_lists=green_lists, device=device)
