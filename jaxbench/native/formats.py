"""Formats of packed weights, and the values that each represents, in numpy (S file).

A matrix of `outputs` x `inputs` is stored in tiles of 32 outputs. Each is one stream of bytes, scales included, in the
order in which a product reads it: a processor reads one stream at the memory's full rate, and many strided ones at a
third.

| format | bits per weight | weight of output o and input k |
|---|---|---|
| float32, bfloat16 | 32, 16 | itself |
| int8 | 8 | scale[o] q[o, k], q in [-127, 127] |
| q8_0 | 8.5 | scale[o, k // 32] q[o, k]; GGUF's blocks, scales in 16 bits |
| q4_0 | 4.5 | scale[o, k // 32] (q[o, k] - 8), q in [0, 15]; GGUF's |
| q4_1 | 5 | scale[o, k // 32] q[o, k] + least[o, k // 32]; GGUF's |

Source of GGUF's blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int8, UInt8

TILE, GROUP = 32, 32  # outputs of a tile; inputs of a group
FORMATS = ("float32", "bfloat16", "int8", "q8_0", "q4_0", "q4_1")  # indices are the numbers of src/native.h
GGUF_TYPES = {"Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1"}  # by the type's name in the `gguf` package
BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}  # of 32 weights in a GGUF file
GROUP_BYTES = {"float32": 4096, "bfloat16": 2048, "int8": 1024, "q8_0": 1088, "q4_0": 576, "q4_1": 640}  # of a tile
INT8_SCALES = 4 * TILE  # bytes at the head of a tile of `int8`
SMALLEST = 127 * float(np.finfo(np.float32).tiny)  # of `int8`: a scale with fewer bits would not divide to 127 at most


class Rows(NamedTuple):
    """A matrix before it is packed, one output per row."""

    format: str  # of FORMATS
    values: np.ndarray  # [outputs, inputs] float32, uint16 bits of bfloat16, int8; or bytes of GGUF's blocks
    scales: Float[np.ndarray, " outputs"] | None  # of int8
    inputs: int

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return len(self.values)


def tile_bytes(format: str, inputs: int) -> int:
    """Bytes of one tile."""
    return -(-inputs // GROUP) * GROUP_BYTES[format] + (INT8_SCALES if format == "int8" else 0)


def packed_bytes(format: str, inputs: int, outputs: int) -> int:
    """Bytes of a packed matrix."""
    return -(-outputs // TILE) * tile_bytes(format, inputs)


def dequantized(rows: Rows) -> Float[np.ndarray, "outputs inputs"]:
    """Dequantise a matrix to float32 weights: the reference for products."""
    if rows.format == "float32":
        return rows.values.astype(np.float32)
    if rows.format == "bfloat16":
        return (rows.values.astype(np.uint32) << 16).view(np.float32)
    if rows.format == "int8":
        return rows.values.astype(np.float32) * rows.scales[:, None]
    blocks = rows.values.reshape(rows.outputs, -1, BLOCK_BYTES[rows.format])
    scale = _half(blocks, 0)
    if rows.format == "q8_0":
        out = blocks[:, :, 2:].view(np.int8).astype(np.float32) * scale
    else:
        nibbles = blocks[:, :, 2 if rows.format == "q4_0" else 4 :]
        q = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).astype(np.float32)
        out = (q - 8) * scale if rows.format == "q4_0" else q * scale + _half(blocks, 2)
    return out.reshape(rows.outputs, -1)


def _half(blocks: UInt8[np.ndarray, "outputs blocks bytes"], at: int) -> Float[np.ndarray, "outputs blocks 1"]:
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16).astype(np.float32)


def packed(rows: Rows) -> UInt8[np.ndarray, " bytes"]:
    """Pack a matrix into tiles in numpy: the reference for src/common.c, which is used because it is faster."""
    groups, tiles = -(-rows.inputs // GROUP), -(-rows.outputs // TILE)
    size = (tiles * TILE, groups * GROUP)
    if rows.format in ("float32", "bfloat16"):
        values = np.zeros(size, rows.values.dtype)
        values[: rows.outputs, : rows.inputs] = rows.values
        axes = values.reshape(tiles, 2, 16, groups * 16, 2)  # tile, half, output, pair of inputs, which of the pair
        order = (0, 3, 1, 4, 2) if rows.format == "float32" else (0, 3, 1, 2, 4)
        return np.ascontiguousarray(axes.transpose(order)).reshape(-1).view(np.uint8)
    scales, q = _integers(rows, size)
    per_byte = 1 if rows.format in ("int8", "q8_0") else 2
    # tile, half, output, group, step, which half of the byte, byte -> tile, group, step, half, output, byte
    axes = q.reshape(tiles, 2, 16, groups, 8 // per_byte, per_byte, 4).transpose(0, 3, 4, 1, 2, 6, 5)
    lanes = axes[..., 0] if per_byte == 1 else axes[..., 0] | axes[..., 1] << 4
    lanes = np.ascontiguousarray(lanes).reshape(tiles, groups, -1)
    if rows.format == "int8":
        return np.concatenate([scales.view(np.uint8), lanes.reshape(tiles, -1)], axis=1).reshape(-1)
    return np.concatenate([scales, lanes], axis=2).reshape(-1)


def _integers(rows: Rows, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Scales in the tiles' layout, and the stored unsigned integers [outputs, inputs], padded."""
    tiles, groups = size[0] // TILE, size[1] // GROUP
    if rows.format == "int8":
        q, scales = np.full(size, 128, np.uint8), np.zeros(size[0], np.float32)
        q[: rows.outputs, : rows.inputs] = (rows.values.astype(np.int16) + 128).astype(np.uint8)
        scales[: rows.outputs] = rows.scales
        return scales.reshape(tiles, TILE), q
    count = 2 if rows.format == "q4_1" else 1
    blocks = np.zeros((size[0], groups, BLOCK_BYTES[rows.format]), np.uint8)
    blocks[: rows.outputs] = rows.values.reshape(rows.outputs, groups, -1)
    body = blocks[:, :, 2 * count :]
    q = body + np.uint8(128) if rows.format == "q8_0" else np.concatenate([body & 15, body >> 4], axis=2)
    scales = np.ascontiguousarray(blocks[:, :, : 2 * count]).view(np.uint16).reshape(tiles, TILE, groups, count)
    scales = np.ascontiguousarray(scales.transpose(0, 2, 3, 1)).view(np.uint8).reshape(tiles, groups, -1)
    return scales, q.reshape(size)


def as_bfloat16(values: Float[np.ndarray, "..."]) -> np.ndarray:
    """Round values to bfloat16, to nearest, ties to even; return their bits. NaN stays NaN, whatever its bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(bits.view(np.float32))] = 0x7FC0  # GPUs' own NaN, 0x7FFFFFFF, would be rounded up to -0
    return rounded


def as_int8(values: Float[np.ndarray, "outputs inputs"]) -> tuple[Int8[np.ndarray, "outputs inputs"], np.ndarray]:
    """Integers and scale of each output, round to nearest, symmetric: the largest weight of an output becomes 127.

    An output whose weights are all below SMALLEST becomes zeros.
    """
    largest = np.abs(values).max(axis=1)
    scales = np.where(largest < SMALLEST, 1, largest / 127).astype(np.float32)  # NaN is kept: packing raises for it
    with np.errstate(invalid="ignore"):
        return np.rint(values / scales[:, None]).astype(np.int8), scales
