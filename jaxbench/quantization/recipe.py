"""How a model is quantised: the fields of a recipe, and a quantised model (S file)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from jaxbench.config import Base, TransformerConfig
from jaxbench.quantization import grids
from jaxbench.quantization.grids import Grid, Quantized


class Recipe(Base):
    """How the matrices of a decoder's layers are quantised. Norms, biases and positions are unchanged."""

    bits: int = Field(4, ge=2, le=8)  # of a weight
    group_size: int | None = Field(32, ge=1)  # inputs that share a scale; null = one scale per output
    zero: Literal["none", "integer", "least"] = "none"  # grids.Grid
    scale_dtype: Literal["float32", "float16", "bfloat16"] = "float16"
    type: Literal["int", "e4m3"] = "int"
    scales: Literal["minmax", "percentile", "mse"] = "minmax"  # how they are chosen: grids.nearest
    rounding: Literal["nearest", "gptq"] = "nearest"
    equalize: Literal["none", "awq", "smoothquant"] = "none"  # channels scaled beforehand: equalize.py
    activations: Literal["float", "dynamic", "static"] = (
        "float"  # 8 bits of `type`: one scale per token, or from calibration
    )
    activation_scales: Literal["minmax", "percentile", "mse"] = "percentile"  # of static ones
    embedding_bits: int | None = Field(8, ge=2, le=8)  # of embedding and head; null = unchanged

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        if self.activations != "float" and self.grid not in (grids.NAMED["int8"], grids.NAMED["fp8"]):
            raise ValueError(
                f"activations={self.activations} need weights of 8 bits with a scale an output (group_size: null, "
                f"zero: none, scale_dtype: float32), got {self.grid}"
            )
        if self.type == "e4m3" and (self.bits != 8 or self.zero != "none"):
            raise ValueError(f"type=e4m3 has 8 bits and zero=none, got bits={self.bits}, zero={self.zero}")
        return self

    @property
    def grid(self) -> Grid:
        """Grid of the layers' matrices."""
        return Grid(self.bits, self.group_size, self.zero, self.scale_dtype, self.type)

    @property
    def embedding_grid(self) -> Grid | None:
        """Grid of embedding and head; eight bits need no zero."""
        if self.embedding_bits is None:
            return None
        zero = "none" if self.embedding_bits == 8 else self.zero
        return Grid(self.embedding_bits, self.group_size or 32, zero, "float16")

    @property
    def needs_calibration(self) -> bool:
        """True if statistics of the matrices' inputs are needed."""
        return self.rounding == "gptq" or self.equalize != "none" or self.activations == "static"


class QuantizedModel(NamedTuple):
    """A decoder whose matrices are on grids."""

    config: TransformerConfig
    matrices: dict[str, Quantized]  # by module name; outputs x inputs
    params: dict[str, np.ndarray]  # all other parameters by dotted name, scaled where channels were
    activations: str  # float, dynamic or static
    input_ranges: dict[str, float]  # static: the |x| that becomes 127, by module name
    errors: dict[str, float]  # by module name: relative 2-norm of the change of products; uncalibrated: of weights

    @property
    def bytes(self) -> int:
        """Bytes of all weights: codes, scales and zeros by their bits, other parameters in float32."""
        bits = 0.0
        for matrix in self.matrices.values():
            inputs = matrix.codes.shape[1]
            grid = matrix.grid._replace(group_size=matrix.grid.group_size or inputs)  # a scale per output counts here
            bits += matrix.codes.size * grid.bits_per_weight
        return round(bits / 8) + sum(4 * value.size for value in self.params.values())


def dequantized(model: QuantizedModel) -> dict[str, np.ndarray]:
    """Parameters by dotted name, as any decoder loads them: the matrices dequantised to float32."""
    params = dict(model.params)
    for name, matrix in model.matrices.items():
        values = grids.dequantized(matrix)
        is_embedding = name == "embed"
        params[f"{name}.{'embedding' if is_embedding else 'kernel'}"] = values if is_embedding else values.T
    return params


def layer_matrices(model: QuantizedModel) -> dict[str, Quantized]:
    """Matrices of the layers by module name, of a model whose products with rounded inputs are of codes alone.

    Raises:
      ValueError: a matrix has more than one scale per output, or zeros, which such a product has no place for.
    """
    found = {name: matrix for name, matrix in model.matrices.items() if name.startswith("layers.")}
    for name, matrix in found.items():
        if matrix.scales.shape[1] != 1 or matrix.zeros is not None:
            raise ValueError(
                f"linear: activations={model.activations} with {name} on {matrix.grid}, wanted one scale per output "
                "and zero=none; set activations='float' for its weights alone"
            )
    return found


def layer_modules(decoder: Any, names: Iterable[str]) -> list[Any]:
    """Modules of a decoder's layers by name, such as layers.0.mlp.up_proj, of any backend."""
    paths = (name.split(".") for name in names)
    return [getattr(getattr(decoder.layers[int(index)], part), module) for _, index, part, module in paths]
