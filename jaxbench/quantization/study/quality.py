"""The quality cost of every quantisation method: settings, figures by window, intervals (S file).

Data flow: settings -> for each method a model (methods.py) -> figures of every window of every text (measure.py),
kept as a part of the run -> means with intervals over windows, and differences between methods on the same windows
(report.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from jaxbench.config import Base
from jaxbench.measure import verdicts
from jaxbench.quantization.recipe import Recipe

FIGURES = ("nll", "kl", "agreement", "recall")  # of a window: means over its tokens, nats or shares


WHOLE = "float32"  # name of the unquantised model among the methods' figures
PEERS = ("torchao", "qwix")  # other libraries that round instead of recipes and ggml


class Native(Base):
    """The method's model run by native kernels."""

    activations: Literal["float32", "int8", "bfloat16"] = "float32"
    cache: Literal["float32", "bfloat16", "int8"] = "float32"


class Method(Base):
    """One row of the table: exactly one way to make the model, and what runs it."""

    recipe: Recipe | None = None
    rounded: Literal["bfloat16", "q8_0", "q4_0", "q4_1"] | None = None  # as ggml rounds, or to bfloat16
    torchao: Literal["int8", "int4"] | None = None  # torchao's weight-only configurations, int4 in groups of 32
    qwix: Literal["int8", "int4"] | None = None  # the same for qwix
    native: Native | None = None  # null = XLA in float32

    @model_validator(mode="after")
    def _one(self) -> Method:
        given = [name for name in ("recipe", "rounded", *PEERS) if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a method has one of recipe, rounded, torchao and qwix, got {given}")
        if self.native is not None and self.recipe is not None and self.recipe.activations != "float":
            raise ValueError(f"recipe.activations={self.recipe.activations} with native: native has its own setting")
        if self.native is not None and given[0] in PEERS:
            raise ValueError(f"{given[0]}={getattr(self, given[0])} with native: its numbers are not packed")
        return self


class Calibration(Base):
    """Text for methods that calibrate."""

    data: str | None = None  # file; null = the first half of the default text
    rows: int = Field(128, ge=1)
    length: int = Field(256, ge=8)  # tokens of a row


class Quality(Base):
    """Settings of the table: configs/quantization/*.yaml."""

    calibration: Calibration = Calibration()
    # name: file; null = the second half of the default text
    texts: dict[str, str | None] = Field({"default": None}, min_length=1)
    windows: int = Field(64, ge=2)  # of each text
    length: int = Field(256, ge=16)  # tokens of a window
    methods: dict[str, Method] = Field(min_length=1)
    pairs: list[tuple[str, str]] = []  # methods compared on the same windows, the better one first

    @model_validator(mode="after")
    def _known(self) -> Quality:
        if WHOLE in self.methods:
            raise ValueError(f"methods: {WHOLE} is the model that all are compared with; give {WHOLE} another name")
        if strange := [name for name in self.methods if "/" in name or not name]:
            raise ValueError(f"methods: {strange[0]!r} is no name of a file; wanted one without /")
        unknown = sorted({name for pair in self.pairs for name in pair} - self.methods.keys())
        if unknown:
            raise ValueError(f"pairs name methods that are not there: {', '.join(unknown)}")
        return self


class Estimate(NamedTuple):
    """A mean over windows with its 95 % interval."""

    mean: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and t-interval over windows. NaN if a value is not finite: the method broke the model."""
    if not np.isfinite(values).all():
        return Estimate(math.nan, math.nan, math.nan)
    found = verdicts.t_interval(values)
    return Estimate(found.mean, found.low, found.high)


def _share(values: Sequence[float]) -> Estimate:
    """Estimate of a share: its interval ends at 0 and 1."""
    found = estimate(values)
    return Estimate(found.mean, max(found.low, 0.0), min(found.high, 1.0))


def row(found: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """A method's figures by text, from its windows and those of the float model."""
    texts = {}
    for name, own in found["texts"].items():
        base = reference["texts"][name]
        per_byte = np.array(base["tokens"]) / np.array(base["bytes"]) / math.log(2)
        bits = np.array(own["nll"]) * per_byte
        texts[name] = {
            "bits_per_byte": estimate(bits),
            "bits_added": estimate(bits - np.array(base["nll"]) * per_byte),
            "kl": estimate(own["kl"]),
            "agreement": _share(own["agreement"]),
            "recall": _share(own["recall"]),
        }
    return {"bits_per_weight": found["bits_per_weight"], "bytes": found["bytes"], "texts": texts}


def difference(found: Mapping[str, Any], other: Mapping[str, Any], figure: str = "kl") -> dict[str, Estimate]:
    """Difference of a figure, `found` minus `other`, by text, on the same windows."""
    return {
        name: estimate(np.array(own[figure]) - np.array(other["texts"][name][figure]))
        for name, own in found["texts"].items()
    }
