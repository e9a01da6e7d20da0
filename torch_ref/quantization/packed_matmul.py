"""Product of float rows with weights that stay packed integers in memory: the reference, in PyTorch.

Twin: jaxbench/quantization/packed_matmul.py; jaxbench/quantization/packing.py defines the byte layout. Differs from the
twin: the whole kernel is materialised before its one product, because eager PyTorch fuses nothing into a product.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from jaxbench.quantization import packing
from jaxbench.quantization.packing import Form
from torch_ref import functional


class Weights(NamedTuple):
    """A packed matrix on a device."""

    form: Form
    codes: Shaped[Tensor, "bytes O"]  # uint8, or e4m3
    scales: Float[Tensor, "groups O"]  # of the grid's scale_dtype
    zeros: Shaped[Tensor, "groups O"] | None  # uint8 where they are codes, else of the grid's scale_dtype


def put(packed: packing.Packed, *, device: str = "cpu") -> Weights:
    """Put a packed matrix on a device."""
    arrays = (packed.codes, packed.scales, packed.zeros)
    held = (None if array is None else _tensor(array).to(device) for array in arrays)
    return Weights(packed.form, *held)


def _tensor(array: np.ndarray) -> Tensor:
    """Copy an array; a type that numpy lacks goes through float32, which is exact."""
    is_known = array.dtype.kind in "iuf"
    return torch.tensor(array if is_known else array.astype(np.float32), dtype=getattr(torch, array.dtype.name))


def matmul(x: Float[Tensor, "*rows I"], weights: Weights) -> Float[Tensor, "*rows O"]:
    """Product of x with the weights, in x's type.

    Raises:
      ValueError: x and the weights differ in their number of inputs.
    """
    check_inputs(tuple(x.shape), weights.form)
    form, outputs = weights.form, weights.codes.shape[1]
    codes = weights.codes.reshape(-1, form.span, outputs)
    scales, zeros = (None if part is None else part[:, None, :] for part in (weights.scales, weights.zeros))
    parts = [values(codes, scales, zeros, form=form, place=place).to(x.dtype) for place in range(form.per_byte)]
    return functional.matmul(x, torch.stack(parts, dim=1).reshape(form.inputs, outputs))


def check_inputs(shape: tuple[int, ...], form: Form) -> None:
    """Check the last axis of the multiplied array.

    Raises:
      ValueError: its length is not the weights' number of inputs.
    """
    if shape[-1] != form.inputs:
        raise ValueError(f"weight_only: x has shape {shape}, but the weights have {form.inputs} inputs")


def values(
    codes: Shaped[Tensor, "*codes O"],
    scales: Float[Tensor, "*scales O"],
    zeros: Shaped[Tensor, "*scales O"] | None,
    *,
    form: Form,
    place: int,
) -> Float[Tensor, "*codes O"]:
    """Float32 weights of the codes at one place within the bytes; scales and zeros broadcast against them."""
    if form.grid.type == "e4m3":
        return codes.float() * scales.float()
    steps = codes.int()
    if form.per_byte > 1:
        steps = (steps >> (form.width * place)) & (2**form.width - 1)
    if form.grid.zero == "none":
        return (steps - form.offset).float() * scales.float()
    if form.grid.zero == "integer":
        return (steps - zeros.int()).float() * scales.float()
    return steps.float() * scales.float() + zeros.float()
