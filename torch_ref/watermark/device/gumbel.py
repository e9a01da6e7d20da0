"""Gumbel in PyTorch: sampling with keyed noise. Twin: jaxbench/watermark/device/gumbel.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from jaxbench import philox
from jaxbench.watermark import reference
from jaxbench.watermark.device.contract import KeyedStep, Position, State, active_rows, first_key
from jaxbench.watermark.schemes.gumbel import CONTEXT_DOMAIN, TOKEN_DOMAIN
from torch_ref import prng
from torch_ref.sample import OrdinaryDraw
from torch_ref.watermark import prf
from torch_ref.watermark.device import marks

ROUTE_SITE = philox.site_id("watermark/route")


class Mark(marks.Mark):
    """Gumbel on a device."""

    def first_state(self, state: State) -> State:
        """Return the state, with a history of contexts if the scheme deduplicates."""
        return marks.with_history(state) if self.scheme.deduplicate else state

    def draw(
        self, state: State, logits: Float[Tensor, "B V"], at: Position, sample: OrdinaryDraw
    ) -> tuple[State, Int[Tensor, " B"]]:
        """Return the next state and the token of each row with the largest sum of logit and keyed noise (see twin)."""
        state, keyed = self._keyed_step(state, at)

        def largest_sum() -> Int[Tensor, " B"]:
            stream = self._stream(state, keyed)
            stream = stream if self.scheme.is_vllm else stream.where(keyed.is_active, sample)
            return torch.argmax(logits + self._noise(stream, logits.dtype), dim=-1)

        drawn = marks.draw_if_any(keyed.is_active, largest_sum)
        return state, torch.where(keyed.is_active if self.scheme.is_vllm else state["marked"], drawn, -1)

    def reweight(self, state: State, logits: Float[Tensor, "B V"], at: Position) -> tuple[State, Float[Tensor, "B V"]]:
        """Return the next state, and logits that are -inf for all tokens but the drawn one in active rows."""
        state, keyed = self._keyed_step(state, at)
        drawn = torch.argmax(logits + self._noise(self._stream(state, keyed), logits.dtype), dim=-1)
        alone = torch.full_like(logits, -torch.inf).scatter_(1, drawn[:, None], 0.0)
        return state, torch.where(keyed.is_active[:, None], alone, logits)

    def text_words(self, key: prf.Halves, text: prf.Text) -> tuple[prf.Words, prf.Seeds]:
        """Return the words and seeds of the tokens; contexts of vLLM's function start with the continuation."""
        rule, tokens = self.scheme.context, text.tokens
        if not self.scheme.is_vllm:
            return super().text_words(key, text)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        distance = torch.arange(-rule.width, 0, device=tokens.device)
        places = place[None, :, None] + distance[None, None, :]
        is_inside = places >= torch.clamp(text.prompt, min=0)[:, None, None]
        contexts = torch.where(is_inside, prf.earlier_tokens(tokens, rule.width), philox.MASK32)
        states = vllm_state(contexts, key)
        return vllm_token_words(states, tokens, key), states

    def _keyed_step(self, state: State, at: Position) -> tuple[State, KeyedStep]:
        """Return the next state and the step; a context is remembered by its seed under the first key."""
        key = self._key_of_step(state, at.step)
        seeds = self._context_seeds(key, at)
        is_active = active_rows(self.scheme, state, at)
        if self.scheme.deduplicate:
            is_dual = reference.is_dual_key(self.scheme)
            names = self._context_seeds(first_key(state), at) if is_dual else seeds
            state, is_active = marks.remember(state, names[:, :2], is_active, at.step)
        return state, KeyedStep(key, seeds, is_active)

    def _context_seeds(self, key: prf.Halves, at: Position) -> Int64[Tensor, "B S"]:
        """Seed of each row's context; prompt tokens count as missing for vLLM's function."""
        rule, flat = self.scheme.context, (key[0][:, 0], key[1][:, 0])
        contexts = marks.last_tokens(at, rule.width)
        if not self.scheme.is_vllm:
            return prf.seeds_after(rule, flat, contexts, None)
        is_inside = marks.last_places(at.length, rule.width) >= (at.length - at.step)[:, None]
        return vllm_state(torch.where(is_inside, contexts, -1), flat)

    def _key_of_step(self, state: State, step: int) -> prf.Halves:
        """Key [B 1] of each row at this step: with two keys, the second in a share alpha of the steps."""
        keys = state["keys"]
        if not reference.is_dual_key(self.scheme):
            return first_key(state)
        low, high, row = state["route"].T
        counter = (torch.zeros_like(row), row, torch.full_like(row, step), torch.full_like(row, ROUTE_SITE))
        word = prng.philox4x32(counter, (low, high))[0]
        share = min(int(self.scheme.dual_key_alpha * 2**32), philox.MASK32)
        use_second = (word < share)[:, None]
        return torch.where(use_second, keys[:, 2:3], keys[:, :1]), torch.where(use_second, keys[:, 3:], keys[:, 1:2])

    def _stream(self, state: State, keyed: KeyedStep) -> Stream:
        """Return where each row's keyed words come from."""
        site = torch.full((keyed.seeds.shape[0], 1), reference.site_of(self.scheme), device=keyed.seeds.device)
        return Stream(keyed.key, keyed.seeds, site, state.get("payload"))

    def _noise(self, stream: Stream, dtype: torch.dtype) -> Float[Tensor, "B V"]:
        """Keyed Gumbel noise -log(-log u) of every token."""
        name, size = str(dtype).removeprefix("torch."), {"num_elements": self.vocab_size}
        if self.scheme.is_vllm:
            words = vllm_lanes(stream.seeds, stream.key, **size)
            return prf.interleave([-torch.log(_vllm_exponential(w, dtype)) for w in words], self.vocab_size)
        words = prf.lanes(stream.key, stream.seeds, site=stream.site, **size)
        noise = prf.interleave([-torch.log(prng.exponential(w, dtype=name)) for w in words], self.vocab_size)
        return noise if stream.payload is None else prf.shift(noise, stream.payload)


class Stream(NamedTuple):
    """Where the words of each row come from: the arguments of prf.lanes, and the payload's shift."""

    key: prf.Halves  # [B 1]
    seeds: Int64[Tensor, "B S"]
    site: Int64[Tensor, "B 1"]
    payload: Int[Tensor, " B"] | None

    def where(self, is_active: Bool[Tensor, " B"], sample: OrdinaryDraw) -> Stream:
        """Return this stream for active rows, that of the ordinary draw for others."""
        rows, chosen = sample.row_ids.to(torch.int64), is_active[:, None]
        plain = torch.stack([rows, torch.full_like(rows, sample.step)], dim=-1)
        return Stream(
            tuple(torch.where(chosen, keyed, ordinary) for keyed, ordinary in zip(self.key, sample.key)),
            torch.where(chosen, self.seeds, plain),
            torch.where(chosen, self.site, philox.site_id("sample")),
            None if self.payload is None else torch.where(is_active, self.payload, 0),
        )


# vLLM's function


def vllm_state(contexts: Int[Tensor, "*shape h"], key: prf.Halves) -> Int64[Tensor, "*shape 4"]:
    """Return the states of contexts, whose places before the text's start are -1 (see schemes/gumbel.py)."""
    contexts, width = contexts.to(torch.int64) & philox.MASK32, contexts.shape[-1]
    words: Any = tuple(torch.full_like(key[0], word) for word in (CONTEXT_DOMAIN, width, 0, 0))
    for offset in range(0, width, 4):
        block = [
            contexts[..., offset + i] if offset + i < width else torch.full_like(key[0], philox.MASK32 - i)
            for i in range(4)
        ]
        words = prf.random_blocks(tuple(w ^ b for w, b in zip(words, block)), (key[0] ^ offset, key[1]))
    return torch.stack(torch.broadcast_tensors(*words), dim=-1)


def vllm_token_words(
    states: Int64[Tensor, "*shape 4"], tokens: Int[Tensor, "*shape"], key: prf.Halves
) -> Int64[Tensor, "*shape"]:
    """Return the word of each token given its context's state."""
    tokens = tokens.to(torch.int64) & philox.MASK32
    pair = (key[0] ^ states[..., 3], key[1] ^ TOKEN_DOMAIN)
    return prf.pick_word(prf.random_blocks((tokens >> 2, states[..., 0], states[..., 1], states[..., 2]), pair), tokens)


def vllm_lanes(states: Int64[Tensor, "B 4"], key: prf.Halves, *, num_elements: int) -> prf.Lanes:
    """Return the words of tokens 0..num_elements-1 given each row's state, in lanes."""
    pair = (key[0] ^ states[:, 3:], key[1] ^ TOKEN_DOMAIN)
    return prf.random_blocks(
        (prf.block_numbers(num_elements, device=key[0].device), states[:, :1], states[:, 1:2], states[:, 2:3]), pair
    )


def _vllm_exponential(words: Int64[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """-log u of vLLM's uniform u = ((w >> 8) + 1) / (2**24 + 1), by log1p of the complement above one half."""
    k, scale = (words >> 8) + 1, torch.tensor(2.0**24 + 1.0, dtype=dtype, device=words.device)
    is_low = k < 2**23
    low = torch.where(is_low, k, 1).to(dtype) / scale
    complement = torch.where(is_low, 0, 2**24 + 1 - k).to(dtype) / scale
    return torch.where(is_low, -torch.log(low), -torch.log1p(-complement))
