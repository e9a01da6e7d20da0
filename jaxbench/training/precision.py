"""Number types of a training run by name, and dynamic loss scaling (S file: neither JAX nor PyTorch)."""

from __future__ import annotations

from typing import NamedTuple

import pydantic

from jaxbench.config import Base


class Policy(NamedTuple):
    """Number types of parameters, products, sums and the loss."""

    parameter: str  # weights and moments
    compute: str  # activations and matrix products, which accumulate in at least float32
    accumulation: str  # gradients of micro-batches, their norm, the update
    output: str  # the loss; logits are widened to it before the softmax
    is_scaled: bool  # gradients are scaled against underflow
    is_float8: bool = False  # the layers' products are computed in 8 bits (float8.py)


# Micikevicius et al. 2018, arXiv:1710.03740 (float16 with float32 weights and loss scaling); Kalamkar et al. 2019,
# arXiv:1905.12322 (bfloat16, which has float32's range and needs no scaling); Micikevicius et al. 2022,
# arXiv:2209.05433 (float8: e4m3 forward, e5m2 for gradients, each tensor with its own scale).
POLICIES = {
    "float64": Policy("float64", "float64", "float64", "float64", False),
    "float32": Policy("float32", "float32", "float32", "float32", False),
    "bfloat16": Policy("float32", "bfloat16", "float32", "float32", False),
    "float16": Policy("float32", "float16", "float32", "float32", True),
    "float8": Policy("float32", "bfloat16", "float32", "float32", False, True),
}


class LossScaling(Base):
    """Dynamic loss scaling with the defaults and rules of torch.amp.GradScaler."""

    initial: float = pydantic.Field(default=65536.0, gt=0)
    growth: float = pydantic.Field(default=2.0, gt=1)  # factor after `interval` finite steps in a row
    backoff: float = pydantic.Field(default=0.5, gt=0, lt=1)  # factor after a step that was not finite
    interval: int = pydantic.Field(default=2000, ge=1)  # steps


class DelayedScaling(Base):
    """How float8 finds the scale of a tensor; the defaults are those of NVIDIA's Transformer Engine."""

    history: int = pydantic.Field(default=1024, ge=1)  # steps over which the largest magnitude is taken
    margin: int = pydantic.Field(default=0, ge=0, le=8)  # powers of two of headroom above it


def uniform(dtype: str) -> Policy:
    """Policy of a step that stores, computes and accumulates in one type; losses are at least float32."""
    return Policy(dtype, dtype, dtype, "float64" if dtype == "float64" else "float32", False)
