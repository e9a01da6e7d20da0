"""Read responses to a prompt with a decoder: residual streams and keys of the responses' tokens, in one pass.

Twin: torch_ref/hallucination/reader.py.

A prompt is read once for all its responses. These are packed into rows; each response is a segment that attends to the
prompt and to itself. Slot t predicts the token `targets[t]`: a response's first slot holds the prompt's last token,
which is therefore left out when the prompt is read. Axis P: tokens of that shortened prompt; M: slots of responses
whose logit lens is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxbench import extension, philox
from jaxbench.attention import SHARED, Context, KVCache, Spans


class Prompt(NamedTuple):
    """What is computed once per prompt, and which of its tokens are context."""

    cache: KVCache  # of P slots
    hidden: Float[Array, "B P D"]  # after the final norm
    is_context: Bool[Array, "B P"]


class Responses(NamedTuple):
    """Responses packed into rows."""

    tokens: Int[Array, "B T"]  # of a response: the prompt's last token, then all of its own but the last
    targets: Int[Array, "B T"]  # of a response: all of its own
    positions: Int[Array, "B T"]  # -1 = padding
    segments: Int[Array, "B T"]  # index of the response in its row, from 0
    is_generated: Bool[Array, "B T"]  # False for the prompt's last token


class Trace(NamedTuple):
    """What a decoder computed at the slots of responses."""

    stream: Float[Array, "L+1 B T D"]  # residual stream before each block, and after the last
    middle: Float[Array, "L B T D"]  # between a block's attention and its feed-forward layer
    hidden: Float[Array, "B T D"]  # after the final norm
    keys: tuple[Float[Array, "E H S"], ...]  # of each layer: P slots of the prompt, then T
    context: Context


def check(config: Any) -> None:
    """Check that a decoder can be a reader.

    Raises:
      ValueError: its layers cache something other than keys and values.
    """
    if (kind := config.layer_kind) is not None:
        raise ValueError(f"reader: the model's layers are of kind {kind!r}; wanted a decoder of plain attention")


def read_prompt(
    model: Any, tokens: Int[Array, "B P"], positions: Int[Array, "B P"], is_context: Bool[Array, "B P"]
) -> Prompt:
    """Read a prompt without its last token; position -1 is padding."""
    hidden, cache = model.features(tokens, positions)
    return Prompt(cache, hidden, is_context & (positions >= 0))


def read_responses(model: Any, prompt: Prompt, responses: Responses) -> Trace:
    """Read responses after a prompt, in one pass."""
    batch, num_prompt = prompt.cache.positions.shape
    cache = prompt.cache.padded(num_prompt + responses.tokens.shape[1], dtype=model.dtype)
    key_positions = jnp.concatenate([prompt.cache.positions, responses.positions], axis=1)
    shared = jnp.full((batch, num_prompt), SHARED, responses.segments.dtype)
    spans = Spans(
        responses.positions, key_positions, responses.segments, jnp.concatenate([shared, responses.segments], axis=1)
    )
    hidden, context = model.begin(responses.tokens, spans, slot=num_prompt)
    cached, stream, middle = extension.by_layer(cache), [hidden], []
    for i, (layer, sites) in enumerate(zip(model.layers, philox.dropout_sites(len(model.layers)))):
        between, cached[i] = layer.attend(stream[-1], context, sites[0], cached[i])
        middle.append(between)
        stream.append(layer.feed(between, context, sites[1]))
    keys, _ = extension.by_kind(cached)
    return Trace(jnp.stack(stream), jnp.stack(middle), model.final_norm(stream[-1]), keys, context)
