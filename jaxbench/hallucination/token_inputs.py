"""The token classifier's inputs, shape, parameters and batches (S file)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from pydantic import Field

from jaxbench import philox
from jaxbench.config import Base
from jaxbench.hallucination import layout, lexical
from jaxbench.hallucination.pooled import HEADS
from jaxbench.hallucination.response_features import ResponseFeatures, finite_states

Array = np.ndarray
RESPONSE_WEIGHT = 0.3  # of the responses' loss, relative to the tokens'
LIMIT = 6.0  # standard deviations at which a column is clipped
BUCKETS = (64, 128, 192, 256, 384, 512, 768, 1024)  # lengths in tokens that rows are padded to: one program each


class TokenConfig(Base):
    """Shape of the token classifier."""

    num_columns: int = Field(ge=1, le=2**20)  # input features per token
    d_model: int = Field(default=64, ge=1, le=2**14)
    dilations: tuple[int, ...] = (1, 2, 4, 8)  # distance in tokens of a convolution's three taps, one per layer
    dropout: float = Field(default=0.3, ge=0, lt=1)  # of every layer's output in training
    norm_eps: float = Field(default=1e-5, gt=0)


class Training(Base):
    """How a token classifier is trained."""

    epochs: int = Field(default=4, ge=1)
    batch_size: int = Field(default=16, ge=1)  # responses
    learning_rate: float = Field(default=1e-3, gt=0)  # peak, after a short warm-up; falls linearly to 0
    weight_decay: float = Field(default=0.1, ge=0)
    seed: int = Field(default=0, ge=0, lt=2**63)
    num_seeds: int = Field(default=1, ge=1)  # classifiers whose log-odds are averaged
    d_model: int = Field(default=64, ge=1, le=2**14)
    dilations: tuple[int, ...] = (1, 2, 4, 8)
    dropout: float = Field(default=0.3, ge=0, lt=1)

    def shape(self) -> dict[str, Any]:
        """Return the settings of the model's shape."""
        return self.model_dump(include={"d_model", "dilations", "dropout"})


class Tokens(NamedTuple):
    """A response's tokens."""

    columns: Float[Array, "T C"]  # float16, of tokens()
    offsets: Int[Array, "T 2"]  # characters: start, end

    @property
    def width(self) -> Array:
        """Characters of each token [T]."""
        return np.diff(self.offsets, axis=1)[:, 0]

    def labels(self, marks: Sequence[tuple[int, int]]) -> Bool[Array, " T"]:
        """True for tokens that have a character inside one of the marks (start, end)."""
        start, end = self.offsets[:, 0], np.maximum(self.offsets[:, 1], self.offsets[:, 0] + 1)
        return np.any([(start < b) & (a < end) for a, b in marks] or [np.zeros(len(start), bool)], axis=0)


class Arrays(NamedTuple):
    """One batch in numpy; the fields of a backend's Batch. C: columns."""

    columns: Float[Array, "B T C"]  # standardised
    is_token: Bool[Array, "B T"]
    labels: Float[Array, "B T"]  # 1 = hallucinated

    @property
    def positions(self) -> Array:
        """Position of each token in its row [B T], -1 = padding."""
        return np.where(self.is_token, np.arange(self.is_token.shape[1]), -1)


def tokens(features: ResponseFeatures, response: str, lexicon: lexical.Lexicon) -> Tokens:
    """Input features of each token: scores of every head, the hidden state, losses, position, kind of word."""
    num_tokens = len(features["loss"])
    heads = [features[name].reshape(-1, num_tokens).T for name in HEADS]
    loss, entropy, without, entropy_without = (
        features[name].astype(np.float32) for name in ("loss", "entropy", "loss_without", "entropy_without")
    )
    place = np.arange(num_tokens) / num_tokens
    scalars = [loss, entropy, without, entropy_without, without - loss, entropy_without - entropy, place]
    scalars.append(np.full(num_tokens, np.log(num_tokens)))
    kinds = _kinds(response, lexicon)[np.clip(features["offsets"][:, 1] - 1, 0, None)]
    parts = [*heads, finite_states(features), np.stack(scalars, axis=1), kinds]
    return Tokens(np.concatenate([part.astype(np.float16) for part in parts], axis=1), features["offsets"])


def _kinds(response: str, lexicon: lexical.Lexicon) -> Float[Array, "characters 3"]:
    """For each character: is its word a content word, a content word absent from the context, one with a digit?"""
    found = np.zeros((len(response), 3), np.float32)
    for word in lexical.tokens(response):
        text = response[word.start : word.end]
        is_new = word.is_content and lexical.is_novel(word, lexicon)
        found[word.start : word.end] = word.is_content, is_new, any(letter.isdecimal() for letter in text)
    return found


# Parameters


def dropout_sites(num_layers: int) -> list[int]:
    """Philox sites of dropout: after the first linear map, and after every layer."""
    return [philox.site_id(f"{name}.dropout") for name in ("embed", *(f"layers.{i}" for i in range(num_layers)))]


def parameter_shapes(config: TokenConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by its dotted name; kernels are (in, out)."""
    width = config.d_model
    linear = {"embed": (config.num_columns, width)}
    linear |= {f"layers.{i}.conv": (3 * width, width) for i in range(len(config.dilations))}
    linear |= {"head": (width, 1)}
    shapes = {f"layers.{i}.norm.scale": (width,) for i in range(len(config.dilations))} | {"norm.scale": (width,)}
    for name, shape in linear.items():
        shapes |= {f"{name}.kernel": shape, f"{name}.bias": shape[1:]}
    return shapes


def initial_params(config: TokenConfig, seed: int, *, distinct: bool = False, rate: float = 0.05) -> dict[str, Array]:
    """Draw float64 initial values by name from Philox, with the parameter's name as site.

    Kernels have variance 1 / fan-in, scales are 1, biases 0. The head's bias adds the log-odds of rate, the share of
    hallucinated tokens. With distinct=True, scales and biases are random as well (scales 1 +- 0.1, biases +- 0.1), so
    that a swapped one shows.
    """
    params = {}
    for name, shape in parameter_shapes(config).items():
        kind = name.rsplit(".", 1)[1]
        noise = philox.normal(seed, step=0, site=name, num_elements=int(np.prod(shape))).reshape(shape)
        params[name] = (kind == "scale") + (shape[0] ** -0.5 if kind == "kernel" else 0.1 * distinct) * noise
    params["head.bias"] += np.log(rate / (1.0 - rate))
    return params


def parity_arrays(config: TokenConfig, *, batch: int, length: int, seed: int, step: int) -> Arrays:
    """Random data of one step for the parity engine: every second row ends in a quarter of padding."""
    random = np.random.default_rng((seed, step))
    is_token = np.ones((batch, length), bool)
    is_token[1::2, length - length // 4 :] = False
    values = random.standard_normal((batch, length, config.num_columns))
    labels = (random.random((batch, length)) < 0.2) & (np.arange(batch) % 4 > 0)[:, None]  # every fourth row has none
    return Arrays(values, is_token, (labels & is_token).astype(np.float64))


# Batches


class Scale(NamedTuple):
    """Mean and standard deviation of every column over the tokens that a classifier was fitted to."""

    mean: Float[Array, " C"]
    deviation: Float[Array, " C"]


class Trained(NamedTuple):
    """A trained token classifier."""

    config: TokenConfig
    params: Mapping[str, Array]
    scale: Scale


class Nested(NamedTuple):
    """Classifiers trained on all responses, and token logits by others, trained without the response's source."""

    trained: tuple[Trained, ...]
    logits: Sequence[Float[Array, " T"]]
    threshold: float  # probability from which a token is marked


def scale_of(tokens: Sequence[Float[Array, "T C"]]) -> Scale:
    """Compute the scale of responses' columns; a constant column has deviation 1.

    Raises:
      ValueError: a column is not finite.
    """
    count = sum(len(each) for each in tokens)
    mean = sum(each.sum(0, dtype=np.float64) for each in tokens) / count
    if not np.isfinite(mean).all():
        bad = int(np.argmax(~np.isfinite(mean)))
        raise ValueError(f"token classifier: column {bad} of {len(mean)} is not finite")
    variance = sum(np.square(each - mean.astype(np.float32), dtype=np.float32).sum(0) for each in tokens) / count
    return Scale(mean, np.where(variance > 1e-12, np.sqrt(variance), 1.0))


def padded(
    tokens: Sequence[Float[Array, "T C"]], labels: Sequence[Bool[Array, " T"]] | None, *, num_rows: int
) -> Arrays:
    """Pad responses to a batch of num_rows and of the next length in BUCKETS; columns are not standardised here."""
    longest = max(map(len, tokens))
    length = layout.bucket(longest, BUCKETS)
    values = np.zeros((num_rows, length, tokens[0].shape[1]), tokens[0].dtype)
    is_token, targets = np.zeros((num_rows, length), bool), np.zeros((num_rows, length), np.float32)
    for i, each in enumerate(tokens):
        values[i, : len(each)], is_token[i, : len(each)] = each, True
        if labels is not None:
            targets[i, : len(each)] = labels[i]
    return Arrays(values, is_token, targets)


def batches(lengths: Array, *, size: int, random: np.random.Generator) -> Iterator[Array]:
    """Yield the response indices of one epoch's batches, each of similar lengths.

    About 8 batches of random responses are sorted by length at a time. The last few that fill no batch are dropped.
    """
    order = random.permutation(len(lengths))
    chunks = np.array_split(order, max(1, len(order) // (8 * size)))
    near = np.concatenate([chunk[np.argsort(lengths[chunk], kind="stable")] for chunk in chunks])
    rows = near[: len(near) // size * size].reshape(-1, size)
    yield from rows[random.permutation(len(rows))]
