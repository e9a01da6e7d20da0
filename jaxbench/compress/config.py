"""Shape, parameters and batches of a context compressor (S file).

An encoder made of the decoder's first layers reads text in chunks of `chunk` tokens, each independently. Every `ratio`
tokens of a chunk become one vector, which the decoder reads like a token embedding. Axis letters: C chunks of a row,
M vectors of a chunk, S inputs of the decoder, U targets, P tokens that the local head predicts.

Sources: ARC-Encoder (2025, arXiv:2510.20535) for averaged queries of the last layer; ICAE (Ge et al. 2023,
arXiv:2307.06945) for reconstruction and continuation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pydantic
from jaxtyping import Bool, Float, Int

from jaxbench import initial
from jaxbench.config import Base, TransformerConfig
from jaxbench.lora.config import LoraConfig, with_lora

Array = np.ndarray
TAGS = (
    "reconstruct",
    "continue",
    "answer",
    "blank",
)  # what is to follow the vectors; blank: an input that is hidden
EMBEDDING_RMS = 0.1356  # of SmolLM2-135M's embedding rows: the initial gain of vectors


class CompressorConfig(Base):
    """Shape of a compressor and of the decoder that reads its vectors."""

    decoder: TransformerConfig
    num_layers: int = pydantic.Field(default=12, ge=1)  # of the encoder: the decoder's first ones
    chunk: int = pydantic.Field(default=256, ge=2)  # tokens that are encoded together
    ratios: tuple[int, ...] = (2, 4, 8, 16, 32)  # numbers of tokens that a vector may stand for
    d_connector: int = pydantic.Field(default=1152, ge=1)  # width of the connector's feed-forward layer
    d_local: int = pydantic.Field(default=576, ge=1)  # width of the local head
    gain: float = pydantic.Field(default=EMBEDDING_RMS, gt=0)  # of vectors, initially
    prefix: int = pydantic.Field(default=1, ge=1)  # vectors of a tag; several are a soft prompt (arXiv:2104.08691)
    lora: LoraConfig | None = None  # adapters of the decoder; None = the decoder is frozen

    @pydantic.model_validator(mode="after")
    def _check(self) -> CompressorConfig:
        odd = [r for r in self.ratios if r < 1 or self.chunk % r]
        if odd or not self.ratios or list(self.ratios) != sorted(set(self.ratios)):
            raise ValueError(f"compressor: ratios={list(self.ratios)} must rise and divide chunk={self.chunk}")
        if self.num_layers > self.decoder.num_layers:
            raise ValueError(
                f"compressor: num_layers={self.num_layers} of a decoder that has {self.decoder.num_layers}"
            )
        if self.decoder.sliding_window is not None or self.decoder.layer_kind is not None:
            raise ValueError(
                f"compressor: the decoder has sliding_window={self.decoder.sliding_window} and layers of kind "
                f"{self.decoder.layer_kind}; wanted neither"
            )
        if self.decoder.position != "rotary" or not self.decoder.is_causal:
            raise ValueError(
                f"compressor: the decoder has position={self.decoder.position} and is_causal={self.decoder.is_causal}; "
                "wanted rotary and true"
            )
        return self

    @property
    def encoder(self) -> TransformerConfig:
        """Shape of the encoder's layers."""
        return self.decoder.model_copy(update={"num_layers": self.num_layers, "is_causal": False, "dropout": 0.0})

    @property
    def adapted(self) -> TransformerConfig:
        """The decoder with its adapters, if it has any."""
        return with_lora(self.decoder, self.lora)

    def tag(self, index: int) -> slice:
        """Rows of a tag among the vectors of all tags."""
        return slice(index * self.prefix, (index + 1) * self.prefix)

    def check_ratio(self, ratio: int) -> None:
        """Check that a ratio is one of this compressor's.

        Raises:
          ValueError: it is not.
        """
        if ratio not in self.ratios:
            raise ValueError(f"compressor: ratio={ratio}; wanted one of {', '.join(map(str, self.ratios))}")


# Parameters


def parameter_shapes(config: CompressorConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by dotted name."""
    c, width = config, config.decoder.d_model
    encoder = initial.parameter_shapes(c.encoder)
    shapes = {f"encoder.{name}": shape for name, shape in encoder.items() if name.startswith(("layers.", "final_norm"))}
    norm = {name.removeprefix("final_norm."): shape for name, shape in encoder.items() if name.startswith("final_norm")}
    shapes["encoder.slots.embedding"] = (sum(c.ratios), width)
    shapes |= {f"connector.norm.{name}": shape for name, shape in norm.items()}
    wide = c.encoder.model_copy(update={"d_ff": c.d_connector})
    mlp = {name: shape for name, shape in initial.parameter_shapes(wide).items() if name.startswith("layers.0.mlp.")}
    shapes |= {f"connector.{name.removeprefix('layers.0.')}": shape for name, shape in mlp.items()}
    shapes["connector.centers.embedding"] = (len(c.ratios), width)
    shapes |= {"connector.gain.scale": (width,), "tags.embedding": (len(TAGS) * c.prefix, width)}
    shapes |= {"local.up_proj.kernel": (width, c.d_local), "local.down_proj.kernel": (c.d_local, max(c.ratios) * width)}
    return shapes | {f"decoder.{name}": shape for name, shape in initial.parameter_shapes(c.adapted).items()}


def initial_params(config: CompressorConfig, seed: int, *, distinct: bool = False) -> dict[str, Array]:
    """Float64 values by name of a compressor on a decoder with random weights."""
    decoder = initial.initial_params(config.adapted, seed, distinct=distinct)
    if not distinct:
        return starting_params(config, decoder, seed=seed)
    random, found = np.random.default_rng(seed), {}
    for name, shape in parameter_shapes(config).items():
        noise = random.standard_normal(shape)
        kinds = {"scale": 1.0 + 0.1 * noise, "bias": 0.1 * noise}
        found[name] = kinds.get(name.rsplit(".", 1)[1], 0.1 * noise)
    return found | {f"decoder.{name}": value for name, value in decoder.items()}


def starting_params(config: CompressorConfig, decoder: Mapping[str, Array], *, seed: int) -> dict[str, Array]:
    """Initial parameters of a compressor, from a decoder's.

    The encoder is the decoder's first layers; the connector's feed-forward layer and the slots add 0. So a vector is
    m + sqrt(ratio) * (mean embedding of its tokens - m), m the mean embedding of the vocabulary; embeddings are as the
    first layer gets them, in Gemma scaled. Plain means are so close to m that the decoder does worse with them than
    with nothing (lab log). The local head gives all tokens equal probability; a tag is m, followed by what
    `with_prefix` appends; adapters add nothing.
    """
    c, random, found = config, np.random.default_rng(seed), {}
    adapted = {**c.adapted.own_params(seed, distinct=False, std=initial.STANDARD_DEVIATION), **decoder}
    mean = np.asarray(decoder["embed.embedding"]).mean(axis=0) * c.decoder.embedding_scale
    for name, shape in parameter_shapes(config).items():
        room, inner = name.split(".", 1)
        if room in ("decoder", "encoder") and inner in adapted:
            found[name] = np.array(adapted[inner])
        elif name == "tags.embedding":
            found[name] = with_prefix(np.tile(mean, (len(TAGS), 1)), c, decoder, seed=seed)
        elif name == "connector.centers.embedding":
            found[name] = (1.0 - np.sqrt(c.ratios))[:, None] * mean
        elif name == "connector.gain.scale":
            found[name] = np.full(shape, c.gain)
        elif inner.endswith((".scale", ".bias")):
            found[name] = np.full(shape, 1.0 if inner.endswith(".scale") else 0.0)
        elif name in ("encoder.slots.embedding", "connector.mlp.down_proj.kernel", "local.down_proj.kernel"):
            found[name] = np.zeros(shape)
        else:  # its inputs are normalised, or vectors as large as embeddings
            size = c.gain if room == "local" else 1.0
            found[name] = random.standard_normal(shape) / (np.sqrt(shape[0]) * size)
    return found


def with_prefix(tags: Array, config: CompressorConfig, decoder: Mapping[str, Array], *, seed: int) -> Array:
    """Extend one-vector tags to config.prefix vectors: each is followed by means of itself and random embeddings."""
    if config.prefix == 1:
        return tags
    table, random = np.asarray(decoder["embed.embedding"]), np.random.default_rng((seed, 1))
    drawn = table[random.integers(len(table), size=(len(tags), config.prefix - 1))] * config.decoder.embedding_scale
    return np.concatenate([tags[:, None], (tags[:, None] + drawn) / 2], axis=1).reshape(-1, tags.shape[1])


def is_trained(name: str) -> bool:
    """True for parameters that training changes, by dotted name: all but the decoder's own."""
    return not name.startswith("decoder.") or ".lora_" in name


# Batches


class Arrays(NamedTuple):
    """Rows of compressed text and the decoder's targets after it; the fields of a backend's Batch.

    A decoder input v + m, v the size of the vocabulary, is vector m of the row, counted over all its chunks in order;
    the tags' vectors follow.
    """

    context: Int[Array, "B C T"]  # token ids, -1 = padding after a chunk's tokens
    groups: Int[Array, "B C M"]  # position of each vector's tokens, -1 = it has none
    inputs: Int[Array, "B S"]  # of the decoder
    positions: Int[Array, "B S"]  # -1 = padding
    places: Int[Array, "B U"]  # indices into S whose next token is a target
    targets: Int[Array, "B U"]
    mask: Bool[Array, "B U"]  # True where a target counts
    sampled: Int[Array, "B C P"]  # tokens of a chunk that the local head predicts, -1 = none
    teacher_tokens: Int[Array, "B U K"] | None = None  # the K most probable tokens after the whole text
    teacher_probs: Float[Array, "B U K"] | None = None


def group_positions(length: int, ratio: int, chunk: int) -> Int[Array, " M"]:
    """Position of each vector of a chunk of `length` tokens: the middle of its tokens; -1 = it has none."""
    starts = np.arange(0, chunk, ratio, dtype=np.int32)
    tokens = np.minimum(ratio, length - starts)
    return np.where(tokens > 0, starts + tokens // 2, -1).astype(np.int32)


def parity_arrays(config: CompressorConfig, *, batch: int, length: int, seed: int, step: int) -> Arrays:
    """Random data of one step for the parity engine: two chunks per row, the second of odd rows not full."""
    random, c, count = np.random.default_rng((seed, step)), config, 2
    size, ratio = config.decoder.vocab_size, config.ratios[seed % len(config.ratios)]
    context = random.integers(0, size, (batch, count, c.chunk), dtype=np.int32)
    context[1::2, 1, c.chunk - ratio - 1 :] = -1
    lengths = (context >= 0).sum(axis=2)
    groups = np.stack([[group_positions(n, ratio, c.chunk) for n in row] for row in lengths])
    vectors = np.arange(count * c.chunk // ratio, dtype=np.int32)
    asked = random.integers(0, size, (batch, length + 1), dtype=np.int32)
    first = len(vectors) + c.prefix  # index of the first input after the tag
    inputs = np.zeros((batch, first + length), np.int32)
    inputs[:, : len(vectors)] = size + vectors
    tags = np.array([c.tag(row % len(TAGS)).start for row in range(batch)])
    inputs[:, len(vectors) : first] = size + len(vectors) + tags[:, None] + np.arange(c.prefix)
    inputs[:, first:] = asked[:, 1:]
    is_input = np.concatenate([groups.reshape(batch, -1) >= 0, np.ones((batch, c.prefix + length), bool)], axis=1)
    positions = np.where(is_input, np.cumsum(is_input, axis=1) - 1, -1).astype(np.int32)
    places = np.tile(np.arange(first - 1, first - 1 + length, dtype=np.int32), (batch, 1))
    sampled = np.stack([[random.integers(0, n, 3) for n in row] for row in lengths]).astype(np.int32)
    sampled[0, 0, 0] = -1
    probs = random.random((batch, length, 3))
    return Arrays(
        context, groups, inputs, positions, places, asked[:, 1:], random.random((batch, length)) < 0.9, sampled,
        random.integers(0, size, (batch, length, 3), dtype=np.int32), probs / probs.sum(axis=2, keepdims=True) * 0.9,
    )  # fmt: skip
