"""A reader whose upper blocks are tuned to labelled tokens: its shape, its parameters and its rows (S file).

The blocks below are unchanged and computed once; the prompt's keys and values stay those of the plain reader, so that
adapters act only on the tokens of responses. Axis letters: L tuned blocks, P tokens of the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pydantic
from jaxtyping import Bool, Float, Int

from jaxbench import initial
from jaxbench.config import Base, TransformerConfig
from jaxbench.lora.config import PARAMETERS, LoraConfig, LoraTransformerConfig, with_lora
from jaxbench.training.step_config import OptimizerConfig

Array = np.ndarray
MAX_RESPONSES = 16  # of a row
PROMPT_SIZES = (256, 512, 1024, 2048, 4096, 8192)  # that batches are padded to: one program each
HEAD = ("head.kernel", "head.bias")


class TunedConfig(Base):
    """Shape of a tuned reader."""

    decoder: TransformerConfig  # the reader
    lora: LoraConfig  # adapters of the tuned blocks, which `first` and `num_blocks` name
    first: int = pydantic.Field(ge=0)  # the first tuned block, counted from 0
    num_blocks: int = pydantic.Field(ge=1)  # the head reads the output of the last of them

    @pydantic.model_validator(mode="after")
    def _check(self) -> TunedConfig:
        if self.blocks.stop > self.decoder.num_layers:
            raise ValueError(
                f"tuned reader: blocks {self.first} to {self.blocks.stop - 1} are wanted of a decoder of "
                f"{self.decoder.num_layers}"
            )
        if self.lora.layers is not None:
            raise ValueError(f"tuned reader: lora.layers={list(self.lora.layers)}; wanted none, `first` names them")
        return self

    @property
    def blocks(self) -> range:
        """Numbers of the tuned blocks in the decoder."""
        return range(self.first, self.first + self.num_blocks)

    @property
    def adapted(self) -> LoraTransformerConfig:
        """The decoder with adapters in the tuned blocks."""
        return with_lora(self.decoder, self.lora.model_copy(update={"layers": tuple(self.blocks)}))


class TunedOptimizer(OptimizerConfig):
    """An optimiser of only the adapters and the head."""

    def is_trained(self, name: str) -> bool:
        """True for the head's parameters and those of adapters, by dotted name."""
        return name in HEAD or re.fullmatch(PARAMETERS, name) is not None


# Parameters


def parameter_shapes(config: TunedConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by dotted name; block i here is block `first` + i of the decoder."""
    shapes = _of_blocks(config, initial.parameter_shapes(config.adapted))
    return shapes | {"head.kernel": (config.decoder.d_model, 1), "head.bias": (1,)}


def initial_params(config: TunedConfig, seed: int, *, distinct: bool = False) -> dict[str, Array]:
    """Draw float64 random values by name, as for a decoder; the head's are small."""
    params = _of_blocks(config, initial.initial_params(config.adapted, seed, distinct=distinct))
    random = np.random.default_rng(seed)
    kernel = random.standard_normal((config.decoder.d_model, 1)) / np.sqrt(config.decoder.d_model)
    return params | {"head.kernel": kernel, "head.bias": 0.1 * distinct * random.standard_normal(1)}


def starting_params(config: TunedConfig, params: Mapping[str, Array], *, seed: int, rate: float) -> dict[str, Array]:
    """Parameters before the first step, from a decoder's: adapters add nothing, the head returns log-odds of a rate.

    rate: share of hallucinated tokens, 0 < rate < 1.
    """
    own = config.adapted.own_params(seed, distinct=False, std=0.02)
    found = _of_blocks(config, {**params, **own})
    kernel = np.zeros((config.decoder.d_model, 1), np.float32)
    return found | {"head.kernel": kernel, "head.bias": np.full(1, np.log(rate / (1.0 - rate)), np.float32)}


def with_trained(config: TunedConfig, params: Mapping[str, Array], trained: Mapping[str, Array]) -> dict[str, Array]:
    """Join the parameters of a decoder's blocks with the adapters and head that were trained on them.

    Raises:
      ValueError: the trained parameters are not those of this configuration.
    """
    shapes = parameter_shapes(config)
    wanted = {name: shape for name, shape in shapes.items() if TunedOptimizer().is_trained(name)}
    found = {name: value.shape for name, value in trained.items()}
    if found != wanted:
        odd = sorted({name for name in {*found, *wanted} if found.get(name) != wanted.get(name)})
        raise ValueError(f"tuned reader: {odd[0]} is {found.get(odd[0])}; wanted {wanted.get(odd[0])}")
    return _of_blocks(config, params) | dict(trained)


def _of_blocks(config: TunedConfig, values: Mapping[str, tuple | Array]) -> dict[str, tuple | Array]:
    """Select the values of the tuned blocks, renumbered from 0, and of the final norm."""
    found = {name: value for name, value in values.items() if name.startswith("final_norm.")}
    for place, number in enumerate(config.blocks):
        start = f"layers.{number}."
        found |= {f"layers.{place}.{name[len(start) :]}": x for name, x in values.items() if name.startswith(start)}
    return found


# Rows


class Arrays(NamedTuple):
    """Rows of responses in numpy; the fields of a backend's Batch."""

    stream: Float[Array, "B T D"]  # residual stream before the first tuned block
    keys: Float[Array, "B L K H P"]  # of the prompt, by tuned block
    values: Float[Array, "B L K P H"]
    prompt_positions: Int[Array, "B P"]  # -1 = padding
    positions: Int[Array, "B T"]  # of the responses' tokens, after the prompt; -1 = padding
    segments: Int[Array, "B T"]  # index of the response in its row, below MAX_RESPONSES
    mask: Bool[Array, "B T"]  # True for tokens
    labels: Float[Array, "B T"]  # 1 = hallucinated


class Row(NamedTuple):
    """Responses to one prompt that share a row, without padding."""

    stream: Float[Array, "T D"]
    keys: Float[Array, "L K H P"]
    values: Float[Array, "L K P H"]
    lengths: tuple[int, ...]  # tokens of each response
    labels: Sequence[Bool[Array, " T"]]  # of each response's tokens


def padded(rows: Sequence[Row], *, prompt_size: int, size: int) -> Arrays:
    """Batch of rows, padded at the end to prompts of prompt_size tokens and to rows of size."""
    width, (num_blocks, heads, head_dim, _) = rows[0].stream.shape[1], rows[0].keys.shape
    count, kind = len(rows), rows[0].stream.dtype
    made = Arrays(
        np.zeros((count, size, width), kind),
        np.zeros((count, num_blocks, heads, head_dim, prompt_size), kind),
        np.zeros((count, num_blocks, heads, prompt_size, head_dim), kind),
        np.full((count, prompt_size), -1, np.int32),
        np.full((count, size), -1, np.int32),
        np.zeros((count, size), np.int32),
        np.zeros((count, size), bool),
        np.zeros((count, size), np.float32),
    )
    for i, row in enumerate(rows):
        prompt, used = row.keys.shape[-1], sum(row.lengths)
        made.stream[i, :used], made.mask[i, :used] = row.stream, True
        made.keys[i, ..., :prompt], made.values[i, :, :, :prompt] = row.keys, row.values
        made.prompt_positions[i, :prompt] = np.arange(prompt)
        made.positions[i, :used] = prompt + np.concatenate([np.arange(length) for length in row.lengths])
        made.segments[i, :used] = np.repeat(np.arange(len(row.lengths)), row.lengths)
        made.labels[i, :used] = np.concatenate(list(row.labels))
    return made


def parity_arrays(config: TunedConfig, *, batch: int, length: int, seed: int, step: int) -> Arrays:
    """Random data of one step for the parity engine: two responses per row, prompts of two lengths, padded."""
    random, decoder = np.random.default_rng((seed, step)), config.decoder
    heads = (config.num_blocks, decoder.num_kv_heads)
    rows = []
    for i in range(batch):
        prompt, lengths = 9 - i % 2, (length // 2, length // 2 - 2 * (i % 2))
        rows.append(Row(
            random.standard_normal((sum(lengths), decoder.d_model)),
            random.standard_normal((*heads, decoder.head_dim, prompt)),
            random.standard_normal((*heads, prompt, decoder.head_dim)),
            lengths, [random.random(each) < 0.3 * (j + i > 0) for j, each in enumerate(lengths)],
        ))  # fmt: skip
    return padded(rows, prompt_size=9, size=length)
