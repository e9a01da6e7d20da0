"""Reweight a decoder's heads and feed-forward layers per token, and decode answers with it (AARF).

Twin: torch_ref/hallucination/reweighting.py; the method: mitigation.py. Axis letters: reader.py.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jaxbench import extension, philox
from jaxbench.attention import KVCache, Spans
from jaxbench.config import TransformerConfig
from jaxbench.hallucination import mitigation, reader, token_scores
from jaxbench.hallucination.layout import PromptArrays
from jaxbench.hallucination.mitigation import Mitigation, Token
from jaxbench.hallucination.reader import Prompt, Responses, Trace


class State(NamedTuple):
    """Decoding state of a batch of answers."""

    prompt: Prompt
    num_attended: Int[Array, " B"]
    cache: KVCache  # of P + new slots
    tokens: Int[Array, "B 1"]  # the next to be read
    positions: Int[Array, "B 1"]
    slot: Int[Array, ""] | int  # cache slot of these tokens


@contextlib.contextmanager
def reweighted(model: Any, heads: Float[Array, "L B N"], layers: Float[Array, "L B"]) -> Iterator[None]:
    """Within the context, scale a model's attention weights after the softmax and its feed-forward outputs, by row.

    Scaling a head's weights scales its output by the same factor, so that any attention kernel will do.
    """
    kept = [(layer.attention.o_proj, layer.mlp) for layer in model.layers]
    for layer, (project, feed), head, factor in zip(model.layers, kept, heads, layers):
        layer.attention.o_proj = functools.partial(_of_scaled, project, head)
        layer.mlp = functools.partial(_scaled, feed, factor)
    try:
        yield
    finally:
        for layer, (project, feed) in zip(model.layers, kept):
            layer.attention.o_proj, layer.mlp = project, feed


def _of_scaled(project: Callable[[Array], Array], factor: Float[Array, "B N"], x: Float[Array, "B T NH"]) -> Array:
    width = x.shape[-1] // factor.shape[1]
    return project(x * jnp.repeat(factor, width, axis=1)[:, None].astype(x.dtype))


def _scaled(feed: Callable[[Array], Array], factor: Float[Array, " B"], x: Float[Array, "B T D"]) -> Array:
    return feed(x) * factor[:, None, None].astype(x.dtype)


def read(model: Any, state: State) -> tuple[Trace, KVCache]:
    """Read one token of each row after what is cached; return its trace and the cache that includes it."""
    key_positions = lax.dynamic_update_slice_in_dim(state.cache.positions, state.positions, state.slot, axis=1)
    spans = Spans(state.positions, key_positions, jnp.zeros_like(state.positions), jnp.zeros_like(key_positions))
    hidden, context = model.begin(state.tokens, spans, slot=state.slot)
    cached, stream, middle = extension.by_layer(state.cache), [hidden], []
    for i, (layer, sites) in enumerate(zip(model.layers, philox.dropout_sites(len(model.layers)))):
        between, cached[i] = layer.attend(stream[-1], context, sites[0], cached[i])
        middle.append(between)
        stream.append(layer.feed(between, context, sites[1]))
    keys, values = extension.by_kind(cached)
    trace = Trace(jnp.stack(stream), jnp.stack(middle), model.final_norm(stream[-1]), keys, context)
    return trace, KVCache(keys, values, key_positions)


def scores(
    model: Any, state: State, trace: Trace, settings: Mitigation
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Mean external score of the heads, and mean parametric score of the layers, at the tokens of a trace."""
    batch, new = len(state.tokens), trace.context.spans.key_positions.shape[1] - state.prompt.hidden.shape[1]
    nothing = jnp.zeros((batch, new), bool)  # which tokens are generated matters only to the lookback ratio
    responses = Responses(state.tokens, state.tokens, state.positions, jnp.zeros_like(state.tokens), nothing)
    of_heads, place = np.unique(np.array(settings.heads)[:, 0], return_inverse=True)
    some = types.SimpleNamespace(layers=[model.layers[i] for i in of_heads.tolist()])
    streams = trace.stream[np.concatenate([of_heads, of_heads[-1:] + 1])]
    of_some = trace._replace(stream=streams, keys=tuple(trace.keys[i] for i in of_heads))
    found = token_scores.attention_scores(some, state.prompt, responses, of_some, state.num_attended)
    external = found.external[place, np.array(settings.heads)[:, 1], :, 0]
    layers = np.array(settings.layers)
    of_some = trace._replace(stream=trace.stream[np.concatenate([[0], layers + 1])], middle=trace.middle[layers])
    parametric = token_scores.parametric_scores(model, of_some, jnp.arange(batch), batch)
    return jnp.mean(external, axis=0), jnp.mean(parametric, axis=1)


class Answerer:
    """Greedy decoding steps, compiled once per size of prompts and batch."""

    def __init__(self, model: Any, settings: Mitigation | None, *, config: TransformerConfig):
        """settings: None = unmitigated answers, and no scores.

        Raises:
          ValueError: the model has no such head or layer.
        """
        graph, self._weights = nnx.split(model)
        self._merge, self._settings, self._dtype = functools.partial(nnx.merge, graph), settings, model.dtype
        if jax.default_backend() == "cpu" and model.dtype in ("bfloat16", "float16"):
            self._dtype = "float32"  # of the cache, as in prompts.GeneratorBase
        self._factors = None if settings is None else mitigation.factors(settings, config)
        self._start = jax.jit(self._begin, static_argnames="new_tokens")
        self._next = jax.jit(self._step, donate_argnames="cache")

    def start(self, prompts: PromptArrays, last: Int[np.ndarray, " B"], new_tokens: int) -> State:
        """Read prompts without their last tokens, and make room for an answer in the cache."""
        return self._start(self._weights, *prompts, last, new_tokens=new_tokens)

    def advance(self, state: State, is_open: Bool[np.ndarray, " B"]) -> tuple[State, Token]:
        """Decode the next token of each row; return the state after it and the token. Only open rows are reweighted.

        The state passed in must not be used again.
        """
        cache, token = self._next(self._weights, state._replace(cache=None), is_open, cache=state.cache)
        tokens = token.ids[:, None].astype(state.tokens.dtype)
        state = state._replace(cache=cache, tokens=tokens, positions=state.positions + 1, slot=state.slot + 1)
        kept = {name: np.asarray(value) for name, value in token._asdict().items() if name != "logits"}
        return state, token._replace(**kept)

    def _begin(self, weights, tokens, positions, is_context, num_attended, last, *, new_tokens: int) -> State:
        prompt = reader.read_prompt(self._merge(weights), tokens, positions, is_context)
        slot = tokens.shape[1]
        cache = prompt.cache.padded(slot + new_tokens, dtype=self._dtype)
        start = jnp.max(positions, axis=1)[:, None] + 1
        prompt = prompt._replace(cache=None)
        return State(prompt, num_attended, cache, last[:, None], start, jnp.int32(slot))

    def _step(self, weights, state: State, is_open: Array, *, cache: KVCache) -> tuple[KVCache, Token]:
        model, settings, state = self._merge(weights), self._settings, state._replace(cache=cache)
        external = parametric = jnp.zeros(len(is_open))
        if settings is None:
            trace, cache = read(model, state)
            hidden, is_high = trace.hidden, jnp.zeros_like(is_open)
        elif settings.tau is None:
            (hidden, cache), is_high = self._again(weights, state, is_open), is_open
        else:
            trace, cache = read(model, state)
            external, parametric = scores(model, state, trace, settings)
            is_high = (settings.score(external, parametric) > settings.tau) & is_open
            again = functools.partial(self._again, weights, state._replace(cache=cache), is_high)
            hidden, cache = lax.cond(jnp.any(is_high), again, lambda: (trace.hidden, cache))
        logits = model.logits(hidden)[:, 0]
        return cache, Token(jnp.argmax(logits, axis=-1), logits, external, parametric, is_high)

    def _again(self, weights, state: State, is_high: Array) -> tuple[Array, KVCache]:
        """Read with reweighting, overwriting the cache slot of the first pass; return hidden states and cache."""
        model, made = self._merge(weights), self._factors  # a separate model: this may be traced inside a branch
        heads = jnp.where(is_high[:, None], made.heads[:, None], 1.0)
        layers = jnp.where(is_high, made.layers[:, None], 1.0)
        with reweighted(model, heads, layers):
            trace, cache = read(model, state)
        return trace.hidden, cache
