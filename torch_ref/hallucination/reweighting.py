"""Reweight a decoder's heads and feed-forward layers per token, and decode answers with it (AARF).

Twin: jaxbench/hallucination/reweighting.py.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jaxbench import extension, philox
from jaxbench.config import TransformerConfig
from jaxbench.hallucination import mitigation
from jaxbench.hallucination.layout import PromptArrays
from jaxbench.hallucination.mitigation import Mitigation, Token
from torch_ref.attention import KVCache, Spans
from torch_ref.hallucination import reader, token_scores
from torch_ref.hallucination.reader import Prompt, Responses, Trace


class State(NamedTuple):
    """Decoding state of a batch of answers."""

    prompt: Prompt
    num_attended: Int[Tensor, " B"]
    cache: KVCache  # of P + new slots
    tokens: Int[Tensor, "B 1"]  # the next to be read
    positions: Int[Tensor, "B 1"]
    slot: int  # cache slot of these tokens


@contextlib.contextmanager
def reweighted(model: Any, heads: Float[Tensor, "L B N"], layers: Float[Tensor, "L B"]) -> Iterator[None]:
    """Within the context, scale a model's attention weights after the softmax and its feed-forward outputs, by row.

    Scaling a head's weights scales its output by the same factor, so that any attention kernel will do.
    """
    hooks = []
    for layer, head, factor in zip(model.layers, heads, layers):
        hooks.append(layer.attention.o_proj.register_forward_pre_hook(functools.partial(_of_scaled, head)))
        hooks.append(layer.mlp.register_forward_hook(functools.partial(_scaled, factor)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _of_scaled(factor: Float[Tensor, "B N"], _: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
    (x,) = inputs
    width = x.shape[-1] // factor.shape[1]
    return (x * factor.repeat_interleave(width, dim=1)[:, None].to(x.dtype),)


def _scaled(factor: Float[Tensor, " B"], _: Any, inputs: tuple[Tensor], fed: Tensor) -> Tensor:
    return fed * factor[:, None, None].to(fed.dtype)


@torch.no_grad()
def read(model: Any, state: State) -> tuple[Trace, KVCache]:
    """Read one token of each row after what is cached; return its trace and the cache, which is written in place."""
    key_positions = state.cache.positions.clone()
    key_positions[:, state.slot] = state.positions[:, 0]
    spans = Spans(state.positions, key_positions, torch.zeros_like(state.positions), torch.zeros_like(key_positions))
    hidden, context = model.begin(state.tokens, spans, slot=state.slot)
    cached, stream, middle = extension.by_layer(state.cache), [hidden], []
    for i, (layer, sites) in enumerate(zip(model.layers, philox.dropout_sites(len(model.layers)))):
        between, cached[i] = layer.attend(stream[-1], context, sites[0], cached[i])
        middle.append(between)
        stream.append(layer.feed(between, context, sites[1]))
    keys, values = extension.by_kind(cached)
    trace = Trace(torch.stack(stream), torch.stack(middle), model.final_norm(stream[-1]), keys, context)
    return trace, KVCache(keys, values, key_positions)


@torch.no_grad()
def scores(
    model: Any, state: State, trace: Trace, settings: Mitigation
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Mean external score of the heads, and mean parametric score of the layers, at the tokens of a trace."""
    batch, new = len(state.tokens), trace.context.spans.key_positions.shape[1] - state.prompt.hidden.shape[1]
    # Which tokens are generated matters only to the lookback ratio.
    nothing = torch.zeros((batch, new), dtype=torch.bool, device=state.tokens.device)
    responses = Responses(state.tokens, state.tokens, state.positions, torch.zeros_like(state.tokens), nothing)
    of_heads, place = np.unique(np.array(settings.heads)[:, 0], return_inverse=True)
    some = types.SimpleNamespace(layers=[model.layers[i] for i in of_heads.tolist()])
    streams = trace.stream[np.concatenate([of_heads, of_heads[-1:] + 1])]
    of_some = trace._replace(stream=streams, keys=tuple(trace.keys[i] for i in of_heads))
    found = token_scores.attention_scores(some, state.prompt, responses, of_some, state.num_attended)
    external = found.external[place, np.array(settings.heads)[:, 1], :, 0]
    layers = np.array(settings.layers)
    of_some = trace._replace(stream=trace.stream[np.concatenate([[0], layers + 1])], middle=trace.middle[layers])
    slots = torch.arange(batch, device=state.tokens.device)
    parametric = token_scores.parametric_scores(model, of_some, slots, batch)
    return torch.mean(external, dim=0), torch.mean(parametric, dim=1)


class Answerer:
    """Greedy decoding steps."""

    def __init__(self, model: Any, settings: Mitigation | None, *, config: TransformerConfig):
        """settings: None = unmitigated answers, and no scores.

        Raises:
          ValueError: the model has no such head or layer.
        """
        self._model, self._settings = model, settings
        self._device = model.embed.embedding.device
        made = None if settings is None else mitigation.factors(settings, config)
        self._factors = None if made is None else [torch.from_numpy(each).to(self._device) for each in made]

    @torch.no_grad()
    def start(self, prompts: PromptArrays, last: Int[np.ndarray, " B"], new_tokens: int) -> State:
        """Read prompts without their last tokens, and make room for an answer in the cache."""
        tokens, positions, is_context, num_attended = (torch.from_numpy(x).to(self._device) for x in prompts)
        prompt = reader.read_prompt(self._model, tokens, positions, is_context)
        slot = tokens.shape[1]
        cache = prompt.cache.padded(slot + new_tokens, dtype=self._model.dtype)
        start = torch.amax(positions, dim=1)[:, None] + 1
        last = torch.from_numpy(last)[:, None].to(self._device)
        return State(prompt._replace(cache=None), num_attended, cache, last, start, slot)

    @torch.no_grad()
    def advance(self, state: State, is_open: Bool[np.ndarray, " B"]) -> tuple[State, Token]:
        """Decode the next token of each row; return the state after it and the token. Only open rows are reweighted.

        The state passed in must not be used again.
        """
        cache, token = self._step(state, torch.from_numpy(is_open.copy()).to(self._device))
        tokens = token.ids[:, None].to(state.tokens.dtype)
        state = state._replace(cache=cache, tokens=tokens, positions=state.positions + 1, slot=state.slot + 1)
        kept = {name: value.numpy(force=True) for name, value in token._asdict().items() if name != "logits"}
        return state, token._replace(**kept)

    def _step(self, state: State, is_open: Tensor) -> tuple[KVCache, Token]:
        settings = self._settings
        external = parametric = torch.zeros(len(is_open), device=self._device)
        if settings is None:
            trace, cache = read(self._model, state)
            hidden, is_high = trace.hidden, torch.zeros_like(is_open)
        elif settings.tau is None:
            (hidden, cache), is_high = self._again(state, is_open), is_open
        else:
            trace, cache = read(self._model, state)
            external, parametric = scores(self._model, state, trace, settings)
            is_high = (settings.score(external, parametric) > settings.tau) & is_open
            hidden = trace.hidden
            if is_high.any():
                hidden, cache = self._again(state._replace(cache=cache), is_high)
        logits = self._model.logits(hidden)[:, 0]
        return cache, Token(torch.argmax(logits, dim=-1), logits, external, parametric, is_high)

    def _again(self, state: State, is_high: Tensor) -> tuple[Tensor, KVCache]:
        """Read with reweighting, overwriting the cache slot of the first pass; return hidden states and cache."""
        heads = torch.where(is_high[:, None], self._factors[0][:, None], 1.0)
        layers = torch.where(is_high, self._factors[1][:, None], 1.0)
        with reweighted(self._model, heads, layers):
            trace, cache = read(self._model, state)
        return trace.hidden, cache
