"""Classify which tokens of a response are hallucinated: a small model on a reader's features of them, in Flax NNX.

Twin: torch_ref/hallucination/token_classifier.py.
Data flow: a token's columns (token_inputs.py) -> linear map -> residual layers (norm, convolution with three taps,
GELU) -> norm -> logit. A response's logit is the log-sum-exp of its tokens' logits minus one; it is trained on too, so
that tokens are right jointly and not only one by one. Axis letters: C columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from jaxbench import functional, nn
from jaxbench.dilated_convolution import DilatedConvolution, gelu
from jaxbench.hallucination.token_inputs import (
    LIMIT,
    RESPONSE_WEIGHT,
    Arrays,
    Scale,
    TokenConfig,
    Trained,
    dropout_sites,
)


class Batch(NamedTuple):
    """One step's data."""

    columns: Float[Array, "B T C"]  # standardised
    is_token: Bool[Array, "B T"]
    labels: Float[Array, "B T"]  # 1 = hallucinated


class TokenClassifier(nnx.Module):
    """A classifier from columns of tokens to one logit per token."""

    def __init__(self, *, num_columns: int, d_model: int, dilations: Sequence[int], dropout: float, norm_eps: float,
                 dtype: str):  # fmt: skip
        self.embed = nn.Linear(num_columns, d_model, use_bias=True, dtype=dtype)
        self.site, *sites = dropout_sites(len(dilations))
        common = {"norm_eps": norm_eps, "dtype": dtype, "dropout": dropout}
        layers = [DilatedConvolution(d_model, dilation=d, site=s, **common) for d, s in zip(dilations, sites)]
        self.layers = nnx.List(layers)
        self.norm = nn.RMSNorm(d_model, eps=norm_eps, dtype=dtype)
        self.head = nn.Linear(d_model, 1, use_bias=True, dtype=dtype)
        self.dropout, self.dtype = dropout, dtype

    def __call__(
        self, columns: Float[Array, "B T C"], is_token: Bool[Array, "B T"], *, dropout: Any = None
    ) -> Float[Array, "B T"]:
        """Log-odds that each token is hallucinated; dropout is (Philox key, step), None outside training."""
        x = functional.dropout(gelu(self.embed(columns.astype(self.dtype))), self.dropout, dropout, site=self.site)
        for layer in self.layers:
            x = layer(x, is_token, dropout)
        return self.head(self.norm(x))[:, :, 0]


def standardised(columns: Float[Array, "B T C"], scale: Scale) -> Float[Array, "B T C"]:
    """Standardise columns: subtract the mean, divide by the deviation, clip to +-LIMIT; float32."""
    mean, deviation = (each[None, None, :] for each in scale)
    return jnp.clip((columns.astype(jnp.float32) - mean) / deviation, -LIMIT, LIMIT)


def response_logits(logits: Float[Array, "B T"], is_token: Bool[Array, "B T"]) -> Float[Array, " B"]:
    """Log-odds that each response has a hallucinated token, from its tokens' log-odds; -inf without tokens."""
    return jax.nn.logsumexp(jnp.where(is_token, logits, -jnp.inf), axis=1) - 1.0


def predict(model: TokenClassifier, batch: Batch, *, dropout: Any = None) -> Float[Array, "B T"]:
    """Token logits of a batch; 0 at padding."""
    return jnp.where(batch.is_token, model(batch.columns, batch.is_token, dropout=dropout), 0.0)


def loss_of(output: Float[Array, "B T"], batch: Batch) -> Float[Array, ""]:
    """Mean binary cross-entropy of tokens, plus RESPONSE_WEIGHT times that of responses, nats, in at least float32.

    A row without tokens only fills up a batch, and does not count as a response.
    """
    wide = output.astype(jnp.promote_types(output.dtype, jnp.float32))
    labels = batch.labels.astype(wide.dtype)
    of_tokens = masked_mean(jax.nn.softplus(wide) - labels * wide, batch.is_token)
    is_response = jnp.any(batch.is_token, axis=1)
    logits = jnp.where(is_response, response_logits(wide, batch.is_token | ~is_response[:, None]), 0.0)
    of_responses = masked_mean(jax.nn.softplus(logits) - jnp.max(labels, axis=1) * logits, is_response)
    return of_tokens + RESPONSE_WEIGHT * of_responses


def masked_mean(x: Float[Array, "..."], where: Bool[Array, "..."]) -> Float[Array, ""]:
    """Mean of x where `where` is true; 0 if it is true nowhere."""
    return jnp.sum(jnp.where(where, x, 0.0)) / jnp.maximum(jnp.sum(where), 1)


def loss_fn(model: TokenClassifier, batch: Batch, *, dropout: Any = None) -> Float[Array, ""]:
    """The model's loss on a batch, nats."""
    return loss_of(predict(model, batch, dropout=dropout), batch)


def build(config: TokenConfig, params: Mapping[str, np.ndarray], *, dtype: str = "float32") -> TokenClassifier:
    """Build the classifier of a configuration with `params`, cast to dtype.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; all names are listed.
    """
    return nn.load_params(TokenClassifier(**dict(config), dtype=dtype), params)


def scorer(trained: Trained) -> Callable[[Arrays], Float[np.ndarray, "B T"]]:
    """Return a function from batches to token logits, compiled once per shape, whatever the parameters."""
    state = nnx.split(build(trained.config, trained.params))[1]
    scale, program = single(trained.scale), _program(trained.config)
    return lambda arrays: np.asarray(program(state, scale, Batch(*arrays)), np.float64)


def single(scale: Scale) -> Scale:
    """A scale in float32."""
    return Scale(*(jnp.asarray(each, jnp.float32) for each in scale))


@functools.cache
def _program(config: TokenConfig) -> Callable:
    graph = nnx.split(TokenClassifier(**dict(config), dtype="float32"))[0]

    def run(state: Any, scale: Scale, batch: Batch) -> Array:
        batch = batch._replace(columns=standardised(batch.columns, scale))
        return predict(nnx.merge(graph, state), batch)

    return jax.jit(run)
