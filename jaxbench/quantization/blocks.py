"""Convert a matrix on a grid to the rows that native kernels pack and GGUF files hold (S file)."""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8

from jaxbench.native import formats
from jaxbench.quantization.grids import NAMED, Quantized


def name(matrix: Quantized) -> str | None:
    """Return the format of native/formats.py that holds a matrix exactly; None if there is none."""
    return next((name for name in formats.FORMATS if NAMED.get(name) == matrix.grid), None)


def rows(matrix: Quantized) -> formats.Rows | None:
    """Convert a matrix to the format that holds it exactly; None if there is none."""
    format = name(matrix)
    if format is None:
        return None
    if format == "int8":
        return formats.Rows(format, matrix.codes, np.ascontiguousarray(matrix.scales[:, 0]), matrix.codes.shape[1])
    return formats.Rows(format, _blocks(matrix, format), None, matrix.codes.shape[1])


def _blocks(matrix: Quantized, format: str) -> UInt8[np.ndarray, "outputs bytes"]:
    """GGUF blocks: scale, minimum weight, codes; 4-bit codes are paired 16 apart."""
    codes = matrix.codes.reshape(len(matrix.codes), -1, formats.GROUP)
    heads = [matrix.scales] if matrix.zeros is None else [matrix.scales, matrix.zeros]
    head = np.stack(heads, axis=2).astype("<f2").view(np.uint8)
    if format == "q8_0":
        body = codes.view(np.uint8)
    else:
        unsigned = (codes.astype(np.int16) + (8 if format == "q4_0" else 0)).astype(np.uint8)
        body = unsigned[:, :, :16] | unsigned[:, :, 16:] << 4
    return np.concatenate([head, body], axis=2).reshape(len(codes), -1)
