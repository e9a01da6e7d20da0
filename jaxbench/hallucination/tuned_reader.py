"""Classify which tokens of a response are hallucinated: a reader whose upper blocks have adapters, in Flax NNX.

Twin: torch_ref/hallucination/tuned_reader.py.
Data flow: residual stream before the first tuned block, and the prompt's keys and values (tuned_inputs.py) ->
blocks with adapters -> norm -> logit of the token that was read. A response's logit is the log-sum-exp of its tokens'
logits minus one, as in token_classifier.py. Axis letters: L tuned blocks, P tokens of the prompt, M responses of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxbench import functional, nn, philox, rotary
from jaxbench.attention import SHARED, Context, Spans
from jaxbench.config import Compute
from jaxbench.hallucination.token_classifier import masked_mean
from jaxbench.hallucination.token_inputs import RESPONSE_WEIGHT
from jaxbench.hallucination.tuned_inputs import MAX_RESPONSES, Arrays, TunedConfig
from jaxbench.lora import layers


class Batch(NamedTuple):
    """Rows of responses, with their prompts' keys and values."""

    stream: Float[Array, "B T D"]  # residual stream before the first tuned block
    keys: Float[Array, "B L K H P"]  # of the prompt, by tuned block
    values: Float[Array, "B L K P H"]
    prompt_positions: Int[Array, "B P"]  # -1 = padding
    positions: Int[Array, "B T"]  # of the responses' tokens, after the prompt; -1 = padding
    segments: Int[Array, "B T"]  # index of the response in its row
    mask: Bool[Array, "B T"]  # True for tokens
    labels: Float[Array, "B T"]  # 1 = hallucinated


class TunedReader(nnx.Module):
    """Upper blocks of a decoder with adapters, and a head of one logit."""

    def __init__(self, config: TunedConfig, compute: Compute):
        decoder, dtype = config.adapted, compute.dtype
        self.layers = nnx.List([layers.make_layer(decoder.at_layer(i), i, compute) for i in config.blocks])
        self.final_norm = nn.norm(decoder.norm, decoder.d_model, eps=decoder.norm_eps, dtype=dtype)
        self.head = nn.Linear(decoder.d_model, 1, use_bias=True, dtype=dtype)
        self.frequencies = self.local_frequencies = None
        if decoder.position == "rotary":
            self.frequencies = rotary.frequencies(decoder.head_dim, decoder.rope_theta, decoder.rope_scaling)
        if decoder.local_rope_theta is not None:
            self.local_frequencies = rotary.frequencies(decoder.head_dim, decoder.local_rope_theta, None)
        self.sites = philox.dropout_sites(decoder.num_layers)[config.first : config.blocks.stop]
        self.dtype = str(dtype)

    def __call__(self, batch: Batch, *, dropout: Any = None) -> Float[Array, "B T"]:
        """Log-odds that each token is hallucinated; dropout is (Philox key, step), None outside training."""
        rows, num_prompt = batch.prompt_positions.shape
        shared = jnp.full((rows, num_prompt), SHARED, batch.segments.dtype)
        spans = Spans(
            batch.positions, jnp.concatenate([batch.prompt_positions, batch.positions], axis=1),
            batch.segments, jnp.concatenate([shared, batch.segments], axis=1),
        )  # fmt: skip
        angles = [
            None if each is None else functional.rotary_angles(batch.positions, each, dtype=self.dtype)
            for each in (self.frequencies, self.local_frequencies)
        ]
        context = Context(spans, angles[0], num_prompt, dropout, angles[1])
        room = (0, batch.positions.shape[1])
        keys = jnp.pad(batch.keys.astype(self.dtype), ((0, 0),) * 4 + (room,))
        values = jnp.pad(batch.values.astype(self.dtype), ((0, 0),) * 3 + (room, (0, 0)))
        x = batch.stream.astype(self.dtype)
        for i, (layer, sites) in enumerate(zip(self.layers, self.sites)):
            cached = tuple(each[:, i].reshape(-1, *each.shape[3:]) for each in (keys, values))
            x, _ = layer(x, context, sites, cached)
        return self.head(self.final_norm(x))[:, :, 0]


def predict(model: TunedReader, batch: Batch, *, dropout: Any = None) -> Float[Array, "B T"]:
    """Token logits of a batch; 0 at padding."""
    return jnp.where(batch.mask, model(batch, dropout=dropout), 0.0)


def loss_of(output: Float[Array, "B T"], batch: Batch) -> Float[Array, ""]:
    """Mean binary cross-entropy of tokens, plus RESPONSE_WEIGHT times that of responses, nats, in at least float32."""
    wide = output.astype(jnp.promote_types(output.dtype, jnp.float32))
    labels = batch.labels.astype(wide.dtype)
    of_tokens = masked_mean(jax.nn.softplus(wide) - labels * wide, batch.mask)
    member = batch.mask[:, :, None] & (batch.segments[:, :, None] == jnp.arange(MAX_RESPONSES)[None, None])
    is_response = jnp.any(member, axis=1)
    member = member | ~is_response[:, None]  # absent responses get a logit too, which no mean includes
    logits = jax.nn.logsumexp(jnp.where(member, wide[:, :, None], -jnp.inf), axis=1) - 1.0
    logits = jnp.where(is_response, logits, 0.0)
    wrong = jnp.max(jnp.where(member, labels[:, :, None], 0.0), axis=1)
    return of_tokens + RESPONSE_WEIGHT * masked_mean(jax.nn.softplus(logits) - wrong * logits, is_response)


def loss_fn(model: TunedReader, batch: Batch, *, dropout: Any = None) -> Float[Array, ""]:
    """The model's loss on a batch, nats."""
    return loss_of(predict(model, batch, dropout=dropout), batch)


def build(config: TunedConfig, params: Mapping[str, np.ndarray], *, dtype: str = "float32") -> TunedReader:
    """Build the tuned reader of a configuration with `params`, cast to dtype.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; all names are listed.
    """
    model = nnx.eval_shape(lambda: TunedReader(config, Compute(dtype=dtype)))
    return nn.load_params(model, params)


def scorer(model: TunedReader) -> Callable[[Arrays], Float[np.ndarray, "B T"]]:
    """Return a function from rows to token logits in float64, compiled once per size."""
    graph, state = nnx.split(model)
    program = jax.jit(lambda state, batch: predict(nnx.merge(graph, state), batch))
    return lambda arrays: np.asarray(program(state, Batch(*arrays)), np.float64)
