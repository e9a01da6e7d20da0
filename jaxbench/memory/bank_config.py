"""Configuration of the memory bank: parameter shapes, initial values, parity batches, state statistics (S file)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import pydantic
from pydantic import Field

from jaxbench import initial, philox
from jaxbench.config import Base
from jaxbench.memory import config
from jaxbench.memory.config import Arrays

# Bound of a cosine's rounding error, in units of eps: cosines of equal states of width 2,048 were up to 5 from 1.
ROUNDING = 16
AGE_EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # blocks; the last bin is open


class BankConfig(Base):
    """Shape of a memory bank: recent blocks uncompressed, older ones compressed into slots."""

    d_model: int = Field(gt=0)  # width of the residual stream whose states it keeps
    num_heads: int = Field(gt=0)  # heads of the attention read-out
    head_dim: int = Field(gt=0)
    block_size: int = Field(gt=0)  # tokens written, and later compressed, together
    recent_blocks: int = Field(default=1, ge=1)  # blocks kept uncompressed
    memory_slots: int = Field(gt=0)  # compressed states kept, a multiple of block_size / ratio
    ratio: int = Field(ge=1)  # tokens a slot stands for; divides block_size
    compression: Literal["mean", "max", "conv", "most_used", "learned"] = "conv"
    mass_decay: float = Field(default=0.9, ge=0, lt=1)  # decay per block of an entry's moving average of attention mass
    min_surprise: float | None = Field(default=None, ge=0, lt=2)  # 1 - cosine that starts a new slot; None = any
    initial_match: bool = False  # the key projection starts equal to the query projection

    @pydantic.model_validator(mode="after")
    def _check(self) -> BankConfig:
        if self.block_size % self.ratio:
            raise ValueError(f"bank: block_size={self.block_size} is not a multiple of ratio={self.ratio}")
        if self.memory_slots % self.slots_per_block:
            raise ValueError(
                f"bank: memory_slots={self.memory_slots} is not a multiple of the {self.slots_per_block} slots that a "
                f"block becomes (block_size={self.block_size} / ratio={self.ratio})"
            )
        return self

    @property
    def slots_per_block(self) -> int:
        """Number of slots that a block is compressed into."""
        return self.block_size // self.ratio


def parameter_shapes(config: BankConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a bank's parameters by dotted name; none depends on memory_slots."""
    c, width = config, config.num_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {f"{x}_proj.kernel": (c.d_model, width) for x in "qkv"}
    if c.compression == "conv":
        shapes["compress.kernel"] = (c.ratio * c.d_model, c.d_model)
    if c.compression == "learned":
        shapes["compress.kernel"] = (c.d_model, c.slots_per_block)
    return shapes | {"gate": (c.num_heads, c.head_dim), "o_proj.kernel": (width, c.d_model)}


def initial_params(
    config: BankConfig, seed: int, *, distinct: bool = False, std: float = initial.STANDARD_DEVIATION
) -> dict[str, np.ndarray]:
    """Initial values in float64 by name, drawn from Philox with the parameter's name as site.

    Kernels are normal with standard deviation std; a convolution's are centred on the mean of its tokens. Gates start
    half open (0). With initial_match the key projection equals the query projection. With distinct=True every tensor
    is random.
    """
    params = {}
    for name, shape in parameter_shapes(config).items():
        noise = philox.normal(seed, step=0, site=name, num_elements=math.prod(shape)).reshape(shape)
        spread = 0.0 if name == "gate" else std
        centre = 0.0
        if name == "compress.kernel" and config.compression == "conv":
            centre = np.tile(np.eye(config.d_model) / config.ratio, (config.ratio, 1))
        params[name] = centre + (max(5 * spread, 0.1) if distinct else spread) * noise
    if config.initial_match and not distinct:
        params["k_proj.kernel"] = params["q_proj.kernel"].copy()
    return params


def parity_arrays(bank: BankConfig, *, batch: int, length: int, seed: int, step: int) -> Arrays:
    """Random data of one step of a parity case; with an odd seed every second row starts with padding."""
    return config.parity_arrays(bank, batch=batch, length=length, seed=seed, step=step)


class MemoryStats(NamedTuple):
    """Statistics of each row's slots; arrays are [B] unless noted."""

    occupancy: np.ndarray  # filled slots / capacity
    utilisation: np.ndarray  # share of filled slots that are not dead
    effective_slots: np.ndarray  # exp(entropy) of the attention mass over filled slots
    dead_slots: np.ndarray  # filled slots with at most dead_share of an even share of the attention mass
    age_histogram: np.ndarray  # [B A] filled slots by age in blocks, edges AGE_EDGES
    evictions: np.ndarray  # slots dropped for newer ones
    compression_ratio: np.ndarray  # measured: tokens compressed / slots that they became; 0 before the first
    reconstruction_cosine: np.ndarray  # of attention outputs: last compressed block versus the block uncompressed


def memory_stats(state: Any, *, dead_share: float = 0.1) -> MemoryStats:
    """Compute statistics of a BankState of either backend, of any dtype, with or without gradients.

    A slot is dead if its share of the attention mass is at most dead_share of an even share, 0 < dead_share < 1, and
    its age is not 0.

    Raises:
      ValueError: dead_share is outside its range.
    """
    if not 0 < dead_share < 1:
        raise ValueError(f"memory_stats: dead_share={dead_share} is outside (0, 1)")
    # numpy cannot read a tensor with gradients, on a GPU or in bfloat16; PyTorch's double() converts bfloat16.
    plain = (x.detach().cpu().double() if hasattr(x, "detach") else x for x in state)
    values = {name: np.asarray(x, np.float64) for name, x in zip(state._fields, plain, strict=True)}
    capacity, num_slots = values["slots"].shape[1], values["num_slots"]
    filled = np.arange(capacity)[None] < num_slots[:, None]
    mass = np.where(filled, values["mass"][:, -capacity:], 0.0)
    total = mass.sum(axis=1, keepdims=True)
    # Before any attention, all filled slots have equal shares.
    even = filled / np.maximum(num_slots, 1)[:, None]
    share = np.where(total > 0, mass / np.where(total > 0, total, 1.0), even)
    is_used = filled & ((share > dead_share * even) | (values["age"] == 0))  # the newest slots were not attended to yet
    entropy = -np.sum(share * np.log(np.where(share > 0, share, 1.0)), axis=1)
    ages = np.digitize(values["age"], AGE_EDGES) - 1
    histogram = np.stack([(filled & (ages == i)).sum(axis=1) for i in range(len(AGE_EDGES))], axis=1)
    num_made = num_slots + values["evicted"]
    return MemoryStats(
        occupancy=num_slots / capacity,
        utilisation=is_used.sum(axis=1) / np.maximum(num_slots, 1),
        effective_slots=np.where(num_slots > 0, np.exp(entropy), 0.0),
        dead_slots=(filled & ~is_used).sum(axis=1),
        age_histogram=histogram,
        evictions=values["evicted"],
        compression_ratio=values["compressed"] / np.maximum(num_made, 1),
        reconstruction_cosine=values["cosine"],
    )


def scalars(states: Mapping[int, Any]) -> dict[str, float]:
    """Compute statistics of banks for TensorBoard by name, means over rows; states: BankState by layer, as numpy."""
    values = {}
    ends = [*(f"below_{edge}" for edge in AGE_EDGES[1:]), f"from_{AGE_EDGES[-1]}"]
    for layer, state in states.items():
        stats = memory_stats(state)
        means = {name: float(value.mean()) for name, value in stats._asdict().items() if value.ndim == 1}
        ages = zip(ends, stats.age_histogram.mean(axis=0), strict=True)
        means |= {f"age_{end}_blocks": float(count) for end, count in ages}
        values |= {f"bank_{layer}/{name}": mean for name, mean in means.items()}
    return values
