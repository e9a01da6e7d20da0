"""Configuration of a block with memory: parameter shapes, initial values and parity batches (S file).

The blocks are those of Titans (Behrouz et al. 2024, arXiv:2501.00663, section 4), and attention with a bank.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Literal

import numpy as np
import pydantic
from pydantic import Field

from jaxbench import initial, philox
from jaxbench.config import Base
from jaxbench.memory import bank_config, config
from jaxbench.memory.bank_config import BankConfig
from jaxbench.memory.config import Arrays, NeuralMemoryConfig


class BlockConfig(Base):
    """Shape of a block: sliding-window attention and a memory, combined in one of five ways."""

    kind: Literal["mac", "mag", "mal", "lmm", "bank"]  # memory as context, gate, layer, alone; attention with a bank
    d_model: int = Field(gt=0)  # width of the residual stream
    num_heads: int = Field(gt=0)  # query heads of the attention
    num_kv_heads: int = Field(gt=0)  # its key-value heads; divides num_heads
    head_dim: int = Field(gt=0)  # width of a head, even
    window: int = Field(gt=0)  # tokens that a query sees, itself included; mac: length of a segment
    num_persistent: int = Field(default=0, ge=0)  # learned tokens that attention always sees; not for lmm
    rope_theta: float = Field(default=10000.0, gt=0)  # rotary base wavelength parameter
    norm_eps: float = Field(default=1e-5, gt=0)
    neural: NeuralMemoryConfig | None = None  # for mac, mag, mal, lmm
    bank: BankConfig | None = None  # for bank; lmm takes either

    @pydantic.model_validator(mode="after")
    def _check(self) -> BlockConfig:
        is_given = (self.neural is not None, self.bank is not None)
        wanted = {"bank": [(False, True)], "lmm": [(False, True), (True, False)]}.get(self.kind, [(True, False)])
        if is_given not in wanted:
            raise ValueError(
                f"block: kind={self.kind} takes {'bank' if self.kind == 'bank' else 'neural'} alone, got neural "
                f"{'given' if is_given[0] else 'unset'} and bank {'given' if is_given[1] else 'unset'}"
            )
        name = "neural" if is_given[0] else "bank"
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError(
                f"block: num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}, and "
                f"head_dim={self.head_dim} even"
            )
        memory = getattr(self, name)
        if memory.d_model != self.d_model:
            raise ValueError(f"block: {name}.d_model={memory.d_model} is not the block's d_model={self.d_model}")
        if self.kind == "mac" and (memory.chunk_size != self.window or memory.num_persistent):
            raise ValueError(
                f"block: mac's segment is the memory's chunk, and its persistent tokens are the attention's: wanted "
                f"neural.chunk_size={self.window} and neural.num_persistent=0, got {memory.chunk_size} and "
                f"{memory.num_persistent}"
            )
        if self.kind == "lmm" and self.num_persistent:
            raise ValueError(
                f"block: kind=lmm has no attention that would see num_persistent={self.num_persistent} learned tokens; "
                "wanted 0 (a neural memory's own are neural.num_persistent)"
            )
        if self.kind == "bank" and (memory.num_heads, memory.head_dim) != (self.num_heads, self.head_dim):
            raise ValueError(
                f"block: the bank's answers are mixed with the attention's head by head: wanted bank.num_heads="
                f"{self.num_heads} and bank.head_dim={self.head_dim}, got {memory.num_heads} and {memory.head_dim}"
            )
        return self

    @property
    def has_attention(self) -> bool:
        """False if the block is a memory alone."""
        return self.kind != "lmm"


def parameter_shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a block's parameters by dotted name; kernels are (in, out)."""
    name, source, memory = _memory(config)
    shapes = {f"{name}.{inner}": shape for inner, shape in source.parameter_shapes(memory).items()}
    # Norms of the attention's and the memory's outputs, or of the attention's input.
    norms = {"mac": ("answer_norm", "memory_norm"), "mag": ("answer_norm", "memory_norm"), "mal": ("input_norm",)}
    shapes |= {f"{norm}.scale": (config.d_model,) for norm in norms.get(config.kind, ())}
    return _attention_shapes(config) | shapes


def _attention_shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    c = config
    if not c.has_attention:
        return {}
    query_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"attention.q_proj.kernel": (c.d_model, query_width)}
    shapes |= {f"attention.{x}_proj.kernel": (c.d_model, kv_width) for x in "kv"}
    if c.kind != "bank":  # the bank's output projection replaces it
        shapes["attention.o_proj.kernel"] = (query_width, c.d_model)
    if c.num_persistent:
        shapes["attention.persistent"] = (c.num_persistent, c.d_model)
    return shapes


def _memory(block: BlockConfig) -> tuple[str, ModuleType, NeuralMemoryConfig | BankConfig]:
    """Name of a block's memory, the module of its configuration, and its shape."""
    if block.bank is not None:
        return "bank", bank_config, block.bank
    return "memory", config, block.neural


def initial_params(
    config: BlockConfig, seed: int, *, distinct: bool = False, std: float = initial.STANDARD_DEVIATION
) -> dict[str, np.ndarray]:
    """Initial values in float64 by name, drawn from Philox.

    Kernels are normal with standard deviation std, persistent tokens with 1; scales are 1. The memory's own values are
    those of its configuration module. With distinct=True every tensor is random.
    """
    name, source, memory = _memory(config)
    values = source.initial_params(memory, seed, distinct=distinct, std=std)
    params = {f"{name}.{inner}": value for inner, value in values.items()}
    for name, shape in parameter_shapes(config).items():
        if name in params:
            continue
        noise = philox.normal(seed, step=0, site=name, num_elements=math.prod(shape)).reshape(shape)
        kind = name.rpartition(".")[2]
        centre = 1.0 if kind == "scale" else 0.0
        spread = {"scale": 0.0, "persistent": 1.0}.get(kind, std)
        params[name] = centre + (max(5 * spread, 0.1) if distinct else spread) * noise
    return params


def parity_arrays(block: BlockConfig, *, batch: int, length: int, seed: int, step: int) -> Arrays:
    """Random data of one step of a parity case; with an odd seed every second row starts with padding."""
    return config.parity_arrays(block, batch=batch, length=length, seed=seed, step=step)
