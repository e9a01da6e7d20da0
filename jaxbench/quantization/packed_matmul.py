"""Product of float rows with weights that stay packed integers in memory: the reference, left to XLA's fusions.

Twin: torch_ref/quantization/packed_matmul.py; Equinox shares this file. packing.py defines the byte layout. Weights
have the values of `grids.dequantized`, rounded to the type of the rows; products accumulate in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Shaped

from jaxbench.quantization import packing
from jaxbench.quantization.packing import Form

jax.tree_util.register_static(Form)  # so that Weights can be an argument of a compiled function
PRECISIONS = {"float32": lax.Precision.HIGHEST}  # of products by the type of x: float32 takes no narrower path


class Weights(NamedTuple):
    """A packed matrix on a device."""

    form: Form
    codes: Shaped[Array, "bytes O"]  # uint8, or e4m3
    scales: Float[Array, "groups O"]  # of the grid's scale_dtype
    zeros: Shaped[Array, "groups O"] | None  # uint8 where they are codes, else of the grid's scale_dtype


def put(packed: packing.Packed) -> Weights:
    """Put a packed matrix on the default device."""
    zeros = None if packed.zeros is None else jnp.asarray(packed.zeros)
    return Weights(packed.form, jnp.asarray(packed.codes), jnp.asarray(packed.scales), zeros)


def matmul(x: Float[Array, "*rows I"], weights: Weights) -> Float[Array, "*rows O"]:
    """Product of x with the weights, in x's type; float32 rows are multiplied in full float32 on every device.

    Raises:
      ValueError: x and the weights differ in their number of inputs.
    """
    check_inputs(x.shape, weights.form)
    arrays = (x, weights.codes, weights.scales, weights.zeros)

    def product(*arrays: Array) -> Array:
        return _product(arrays[0], Weights(weights.form, *arrays[1:]))

    def alone(*arrays: Array) -> Array:
        """Product in a branch: otherwise XLA:CPU would first dequantise all matrices of a program, and keep them."""
        shape = (*x.shape[:-1], weights.codes.shape[1])
        is_taken = lax.optimization_barrier(jnp.bool_(True))
        return lax.cond(is_taken, product, lambda *_: jnp.zeros(shape, x.dtype), *arrays)

    def one(*arrays: Array) -> Array:
        return _product(arrays[0], Weights(weights.form, *arrays[1:]), is_alone=x.size == x.shape[-1])

    return lax.platform_dependent(*arrays, cpu=alone, cuda=one, default=product)


def _sum(rows: Float[Array, "R I"], kernel: Float[Array, "I O"], *, is_alone: bool) -> Float[Array, "R O"]:
    """Product in float32; for one row as a sum, which XLA:GPU fuses with the dequantisation."""
    if is_alone:
        return jnp.sum(rows[0, :, None].astype(jnp.float32) * kernel.astype(jnp.float32), axis=0)[None]
    precision = PRECISIONS.get(rows.dtype.name)
    return jnp.dot(rows, kernel, precision=precision, preferred_element_type=jnp.float32)


def _product(x: Float[Array, "*rows I"], weights: Weights, *, is_alone: bool = False) -> Float[Array, "*rows O"]:
    form, outputs = weights.form, weights.codes.shape[1]
    grouped = x.reshape(-1, form.inputs // form.group, form.per_byte, form.span)
    codes = weights.codes.reshape(-1, form.span, outputs)
    scales, zeros = (None if part is None else part[:, None, :] for part in (weights.scales, weights.zeros))
    total = jnp.float32(0)
    for place in range(form.per_byte):
        kernel = values(codes, scales, zeros, form=form, place=place).astype(x.dtype)
        rows = grouped[:, :, place].reshape(len(grouped), -1)
        total += _sum(rows, kernel.reshape(-1, outputs), is_alone=is_alone)
    return total.astype(x.dtype).reshape(*x.shape[:-1], outputs)


def check_inputs(shape: tuple[int, ...], form: Form) -> None:
    """Check the last axis of the multiplied array.

    Raises:
      ValueError: its length is not the weights' number of inputs.
    """
    if shape[-1] != form.inputs:
        raise ValueError(f"weight_only: x has shape {shape}, but the weights have {form.inputs} inputs")


def values(
    codes: Shaped[Array, "*codes O"],
    scales: Float[Array, "*scales O"],
    zeros: Shaped[Array, "*scales O"] | None,
    *,
    form: Form,
    place: int,
) -> Float[Array, "*codes O"]:
    """Float32 weights of the codes at one place within the bytes; scales and zeros broadcast against them."""
    if form.grid.type == "e4m3":
        return codes.astype(jnp.float32) * scales.astype(jnp.float32)
    steps = codes.astype(jnp.int32)
    if form.per_byte > 1:
        steps = (steps >> (form.width * place)) & (2**form.width - 1)
    if form.grid.zero == "none":
        return (steps - form.offset).astype(jnp.float32) * scales.astype(jnp.float32)
    if form.grid.zero == "integer":
        return (steps - zeros.astype(jnp.int32)).astype(jnp.float32) * scales.astype(jnp.float32)
    return steps.astype(jnp.float32) * scales.astype(jnp.float32) + zeros.astype(jnp.float32)
