"""A small trained detector on per-token evidence and token ids, in Flax NNX.

Twin: torch_ref/watermark/detector/neural.py.
Data flow: token vector + linear map of the token's evidence -> residual layers (norm, convolution with three taps,
GELU) -> P numbers per token -> their sum over the n scored tokens divided by sqrt(n), their mean and their log-mean-exp
-> one hidden layer -> logit, large for marked text. The sum over sqrt(n) is the form of a z-score; the log-mean-exp, a
soft maximum, finds a marked passage inside human text. The logit is not a p-value: neural_detection.py calibrates it on
human text. Axis letters: P pooled numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxbench import nn
from jaxbench.dilated_convolution import DilatedConvolution, gelu
from jaxbench.watermark.detector.features import FEATURES, NeuralConfig


class Batch(NamedTuple):
    """The data of one step."""

    tokens: Int[Array, "B T"]  # -1 = padding
    evidence: Float[Array, "B T"]  # in (0, 1), larger = more marked; features.py says how
    scored: Bool[Array, "B T"]  # True where the evidence counts
    labels: Float[Array, " B"]  # 1 = marked, 0 = not


class NeuralDetector(nnx.Module):
    """Maps evidence and tokens to one logit per text."""

    def __init__(self, *, num_rows: int, d_model: int, dilations: Sequence[int], num_pooled: int, d_hidden: int,
                 norm_eps: float, dtype: str):  # fmt: skip
        self.embed = nn.Embed(num_rows, d_model, dtype=dtype)
        self.evidence = nn.Linear(FEATURES, d_model, use_bias=True, dtype=dtype)
        layers = [DilatedConvolution(d_model, dilation=d, norm_eps=norm_eps, dtype=dtype) for d in dilations]
        self.layers = nnx.List(layers)
        self.pool = nn.Linear(d_model, num_pooled, use_bias=True, dtype=dtype)
        self.hidden = nn.Linear(3 * num_pooled, d_hidden, use_bias=True, dtype=dtype)
        self.head = nn.Linear(d_hidden, 1, use_bias=True, dtype=dtype)
        self.num_rows, self.dtype = num_rows, dtype

    def __call__(
        self, tokens: Int[Array, "B T"], evidence: Float[Array, "B T"], scored: Bool[Array, "B T"]
    ) -> Float[Array, " B"]:
        """A logit for each text."""
        rows = table_rows(tokens, self.num_rows)
        x = self.embed(rows) + self.evidence(token_features(evidence, scored, dtype=self.dtype))
        for layer in self.layers:
            x = layer(x, tokens >= 0)
        pooled = pool(self.pool(x), scored)
        return self.head(gelu(self.hidden(pooled)))[:, 0]


def table_rows(tokens: Int[Array, "B T"], num_rows: int) -> Int[Array, "B T"]:
    """Return each token's row of the token table: its own if the id is below num_rows / 2, else shared; padding row 0.

    Ids of a byte-pair vocabulary follow its merge order, so frequent tokens have small ids.
    """
    half, tokens = num_rows // 2, jnp.maximum(tokens, 0)
    return jnp.where(tokens < half, tokens, half + tokens % (num_rows - half))


def token_features(evidence: Float[Array, "B T"], scored: Bool[Array, "B T"], *, dtype: str) -> Float[Array, "B T F"]:
    """Compute 2 e - 1, -log(1 - e) - 1 (both with mean 0 for uniform e, and 0 where not scored) and `scored`."""
    evidence = evidence.astype(jnp.promote_types(evidence.dtype, jnp.float32))
    parts = (2.0 * evidence - 1.0, -jnp.log1p(-evidence) - 1.0, jnp.ones_like(evidence))
    zero = jnp.zeros((), evidence.dtype)
    return jnp.stack([jnp.where(scored, part, zero) for part in parts], axis=-1).astype(dtype)


def pool(x: Float[Array, "B T P"], scored: Bool[Array, "B T"]) -> Float[Array, "B Q"]:
    """Compute sum / sqrt(n), mean and log-mean-exp over each text's n scored tokens, Q = 3 P; zeros if n = 0."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    zero = jnp.zeros((), wide.dtype)
    is_scored = scored[:, :, None]
    count = jnp.maximum(jnp.sum(scored, axis=1), 1).astype(wide.dtype)[:, None]
    total = jnp.sum(jnp.where(is_scored, wide, zero), axis=1)
    # In a text without scored tokens, all values are 0, so that no infinity enters a gradient.
    is_open = is_scored | ~jnp.any(scored, axis=1)[:, None, None]
    highest = jnp.where(is_open, jnp.where(is_scored, wide, zero), zero - jnp.inf)
    highest = jax.nn.logsumexp(highest, axis=1) - jnp.log(count)
    highest = jnp.where(jnp.any(scored, axis=1)[:, None], highest, zero)
    return jnp.concatenate([total / jnp.sqrt(count), total / count, highest], axis=-1).astype(x.dtype)


def predict(model: NeuralDetector, batch: Batch, *, dropout: Any = None) -> Float[Array, " B"]:
    """Logits of a batch; there is no dropout."""
    return model(batch.tokens, batch.evidence, batch.scored)


def loss_of(output: Float[Array, " B"], batch: Batch) -> Float[Array, ""]:
    """Mean binary cross-entropy of logits, nats per text, in at least float32."""
    wide = output.astype(jnp.promote_types(output.dtype, jnp.float32))
    labels = batch.labels.astype(wide.dtype)
    return jnp.mean(jax.nn.softplus(wide) - labels * wide)


def loss_fn(model: NeuralDetector, batch: Batch, *, dropout: Any = None) -> Float[Array, ""]:
    """The model's loss on a batch, nats per text."""
    return loss_of(predict(model, batch, dropout=dropout), batch)


def build(config: NeuralConfig, params: Mapping[str, np.ndarray], *, dtype: str = "float32") -> NeuralDetector:
    """Build a detector with `params`, cast to dtype.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; the message lists all names.
    """
    model = NeuralDetector(**dict(config), dtype=dtype)
    return nn.load_params(model, params)
