"""Shape of a decoder with memory layers, its parameters and initial values (S file)."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import numpy as np
import pydantic
from pydantic import Field

from jaxbench import initial
from jaxbench.config import Base, TransformerConfig
from jaxbench.memory import block_config
from jaxbench.memory.bank_config import BankConfig
from jaxbench.memory.block_config import BlockConfig
from jaxbench.memory.config import NeuralMemoryConfig

PARAMETERS = r"layers\.\d+\.(block\..*|gate)"  # names of a decoder's parameters that are its memory's


class DecoderMemory(Base):
    """Which layers of a decoder have memory, and what kind."""

    kind: Literal["mac", "mag", "mal", "lmm", "bank"]  # of block; it stands in place of the layer's attention
    layers: tuple[int, ...] | None = None  # which layers, from 0; None = all
    insert: bool = False  # lmm beside the layer's own attention, through a gate that is 0 at the start: identity
    window: int | None = Field(default=None, gt=0)  # tokens that the block's attention sees; mac: a segment
    num_persistent: int = Field(default=0, ge=0)  # learned tokens that it always sees
    neural: NeuralMemoryConfig | None = None  # of mac, mag, mal, lmm
    bank: BankConfig | None = None  # of bank; lmm takes either
    max_documents: int = Field(default=1, ge=1)  # in a row; each has a memory of its own, and costs as much as a row
    loss_weight: float = Field(default=1.0, ge=0)  # of the loss that trains a bank's compression
    learn: bool = True  # False: neural memories answer from their first weights; a bank goes on keeping what it reads

    def block(self, **sizes: Any) -> BlockConfig:
        """Return the shape of a layer's block in a decoder of these sizes."""
        shared = {name: getattr(self, name) for name in ("kind", "num_persistent", "neural", "bank")}
        return BlockConfig(**shared, **sizes, window=self.window or 1)


class MemoryTransformerConfig(TransformerConfig):
    """Shape of a decoder with memory layers."""

    memory: DecoderMemory

    @pydantic.model_validator(mode="after")
    def _check_memory(self) -> MemoryTransformerConfig:
        m = self.memory
        wrong = [i for i in m.layers or () if not 0 <= i < self.num_layers]
        if wrong or m.layers == () or len(set(m.layers or ())) != len(m.layers or ()):
            raise ValueError(
                f"memory: layers={list(m.layers)} must be different layers from 0 to {self.num_layers - 1}"
            )
        if m.insert and m.kind != "lmm":
            raise ValueError(f"memory: insert=true keeps the layer's attention, so kind must be lmm, got {m.kind}")
        if m.window is None and m.kind != "lmm":
            raise ValueError(f"memory: window is missing, kind={m.kind} has an attention of its own")
        if self.qk_norm and m.kind != "lmm":
            raise ValueError(
                f"memory: kind={m.kind} has an attention of its own, which does not normalise queries and keys; with "
                "qk_norm=true use kind=lmm, or set qk_norm=false"
            )
        self.block()
        return self

    def indices(self) -> tuple[int, ...]:
        """Return the layers that have memory."""
        return tuple(range(self.num_layers)) if self.memory.layers is None else self.memory.layers

    def block(self) -> BlockConfig:
        """Return the shape of every memory layer's block."""
        sizes = ("d_model", "num_heads", "num_kv_heads", "head_dim", "rope_theta", "norm_eps")
        return self.memory.block(**{name: getattr(self, name) for name in sizes})


def with_memory(model: TransformerConfig, memory: DecoderMemory | None) -> TransformerConfig:
    """Return a decoder's shape with memory layers; without a memory, as it is.

    Raises:
      ValueError: the memory does not fit the decoder.
    """
    if memory is None:
        return model
    try:
        return MemoryTransformerConfig(**model.model_dump(), memory=memory)
    except pydantic.ValidationError as error:
        problems = [problem["msg"].removeprefix("Value error, ") for problem in error.errors(include_url=False)]
        raise ValueError("; ".join(problems)) from error


def memory_of(config: TransformerConfig) -> DecoderMemory | None:
    """Return a decoder's memory, None where it has none."""
    return getattr(config, "memory", None)


def parameter_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a decoder, with or without memory, by its dotted name."""
    shapes = initial.parameter_shapes(config)
    if memory_of(config) is None:
        return shapes
    for i in config.indices():
        if not config.memory.insert:
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith(f"layers.{i}.attention.")}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def num_parameters(config: TransformerConfig) -> int:
    """Return how many numbers parameter_shapes names, without listing the layers."""
    if memory_of(config) is None:
        return initial.num_parameters(config)
    layers = config.memory.layers
    added = sum(math.prod(shape) for shape in _layer_shapes(config).values())
    replaced = 0 if config.memory.insert else initial.layer_parameters(config, "attention.")
    return initial.num_parameters(config) + (config.num_layers if layers is None else len(layers)) * (added - replaced)


def _layer_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    shapes = {f"block.{name}": shape for name, shape in block_config.parameter_shapes(config.block()).items()}
    return shapes | ({"gate": (config.d_model,)} if config.memory.insert else {})


def initial_params(
    config: TransformerConfig, seed: int, *, distinct: bool = False, std: float = initial.STANDARD_DEVIATION
) -> dict[str, np.ndarray]:
    """Return float64 initial values by name: the decoder's, and the memory's of every layer.

    A memory that is inserted starts with a gate of 0: the decoder computes what it did without. With distinct=True
    every tensor is random. std is that of kernels and embeddings.
    """
    params = initial.initial_params(config, seed, distinct=distinct, std=std)
    return inserted(config, params, seed, distinct=distinct, std=std)


def inserted(
    config: TransformerConfig,
    params: dict[str, np.ndarray],
    seed: int,
    *,
    distinct: bool = False,
    std: float = initial.STANDARD_DEVIATION,
) -> dict[str, np.ndarray]:
    """Return a decoder's parameters with the initial values of its memory, each layer's drawn from its own seed."""
    if memory_of(config) is None:
        return params
    wanted = parameter_shapes(config)
    params = {name: value for name, value in params.items() if name in wanted}
    for i in config.indices():
        values = block_config.initial_params(config.block(), seed + 1 + i, distinct=distinct, std=std)
        params |= {f"layers.{i}.block.{name}": value for name, value in values.items()}
        if config.memory.insert:
            random = np.random.default_rng((seed, i))
            params[f"layers.{i}.gate"] = (0.1 if distinct else 0.0) * random.standard_normal(config.d_model)
    return params


def is_memory(name: str) -> bool:
    """Return True for a parameter that a decoder has because of its memory."""
    return re.fullmatch(PARAMETERS, name) is not None


def check_documents(config: TransformerConfig, segments: np.ndarray) -> None:
    """Check that rows [B T] of segment ids, 0 = padding, have no more documents than a decoder's memory reads.

    Raises:
      ValueError: a row has more.
    """
    if (memory := memory_of(config)) is None:
        return
    number = segments.max(axis=1) - np.where(segments > 0, segments, segments.max()).min(axis=1) + 1
    if number.max() > memory.max_documents:
        row = int(number.argmax())
        raise ValueError(
            f"memory: row {row} holds {number[row]} documents, and memory.max_documents={memory.max_documents} of a "
            "row have memory; raise it, or shorten data.seq_len"
        )
