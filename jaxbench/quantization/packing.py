"""Pack matrices on grids for accelerators: codes packed into bytes, kernel layout (in, out), in numpy (S file).

| bits | codes a byte |
|---|---|
| 2 | 4 |
| 3, 4 | 2 (3 bits are stored in 4) |
| 5, 6, 7, 8, e4m3 | 1 |

If the inputs that share a scale do not divide evenly (an odd group), fewer codes share a byte. Stored codes are
unsigned integers: 2^(bits-1) is added to the codes of a grid without zero; e4m3 codes are stored as they are. The codes
of one byte belong to one output and one group: with `span` bytes per group, byte s holds the codes of the group's
inputs s, span + s, 2 span + s ..., the first in the lowest bits. One shift and one mask then give the weights of a
contiguous part of every group, and nothing is interleaved.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Shaped

from jaxbench.quantization.grids import Grid, Quantized
from jaxbench.quantization.recipe import QuantizedModel, dequantized

WIDTHS = {2: 2, 3: 4, 4: 4}  # bits that hold a code; 8 for all others
IMPLEMENTATIONS = ("xla", "pallas", "triton", "mosaic")  # of the product, see weight_only_pallas.matmul


@dataclasses.dataclass(frozen=True)
class Form:
    """Layout of the bytes; hashable, a constant of compiled programs."""

    grid: Grid
    inputs: int

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.grid.group_size or self.inputs

    @property
    def per_byte(self) -> int:
        """Codes in a byte: 1, 2 or 4."""
        most = 8 // WIDTHS.get(self.grid.bits, 8)
        return next(count for count in (most, 2, 1) if self.group % count == 0)

    @property
    def span(self) -> int:
        """Bytes that hold a group of one output."""
        return self.group // self.per_byte

    @property
    def width(self) -> int:
        """Bits that hold a code."""
        return 8 // self.per_byte

    @property
    def offset(self) -> int:
        """Offset added to a code before it is stored."""
        return 2 ** (self.grid.bits - 1) if self.grid.zero == "none" and self.grid.type == "int" else 0


class Packed(NamedTuple):
    """A matrix in its memory layout."""

    form: Form
    codes: Shaped[np.ndarray, "bytes outputs"]  # uint8, or e4m3
    scales: Float[np.ndarray, "groups outputs"]  # of the grid's scale_dtype
    zeros: Shaped[np.ndarray, "groups outputs"] | None  # uint8 where they are codes, else of the grid's scale_dtype

    @property
    def bytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return sum(part.nbytes for part in (self.codes, self.scales, self.zeros) if part is not None)


def pack(matrix: Quantized) -> Packed:
    """Pack a matrix's codes into bytes; nothing is rounded.

    Raises:
      ValueError: a scale is not representable in the grid's scale_dtype.
    """
    form = Form(matrix.grid, matrix.codes.shape[1])
    codes = np.ascontiguousarray(matrix.codes.T)
    if matrix.grid.type == "int":
        # [group, code of a byte, byte, output]
        wide = (codes.astype(np.int32) + form.offset).reshape(-1, form.per_byte, form.span, codes.shape[1])
        shifts = form.width * np.arange(form.per_byte)[:, None, None]
        codes = (wide << shifts).sum(axis=1).astype(np.uint8).reshape(-1, codes.shape[1])
    zeros = matrix.zeros
    if zeros is not None:
        zeros = _narrowed(zeros, "uint8" if matrix.grid.zero == "integer" else matrix.grid.scale_dtype)
    return Packed(form, codes, _narrowed(matrix.scales, matrix.grid.scale_dtype), zeros)


def _narrowed(part: np.ndarray, dtype: str) -> np.ndarray:
    import ml_dtypes

    narrow = np.ascontiguousarray(part.T).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if not np.array_equal(narrow.astype(np.float32), part.T):
        worst = np.abs(narrow.astype(np.float32) - part.T).max()
        raise ValueError(f"pack: scales or zeros are no values of {dtype}, the largest difference is {worst}")
    return narrow


def check_implementation(name: str) -> None:
    """Check the name of an implementation of the product.

    Raises:
      ValueError: it is unknown.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"weight_only: implementation={name!r} is not one of {', '.join(IMPLEMENTATIONS)}")


def parameters(model: QuantizedModel) -> tuple[dict[str, Packed], dict[str, np.ndarray]]:
    """Packed matrices of a decoder's layers by module name, and all of the decoder's parameters by dotted name.

    Embedding and head are dequantised floats.

    Raises:
      ValueError: the model's activations are quantised too, or a scale is not representable in its grid's scale_dtype.
    """
    if model.activations != "float":
        raise ValueError(f"weight_only: activations={model.activations}, wanted float: use quantization.linear.build")
    held = {name: pack(matrix) for name, matrix in model.matrices.items() if name.startswith("layers.")}
    floats = {name: matrix for name, matrix in model.matrices.items() if name not in held}
    params = dequantized(model._replace(matrices=floats))
    for name, packed in held.items():
        parts = {"codes": packed.codes, "scales": packed.scales, "zeros": packed.zeros}
        params |= {f"{name}.{part}": array for part, array in parts.items() if array is not None}
    return held, params
