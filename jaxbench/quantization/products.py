"""Products of 8-bit inputs and weights: int8, or e4m3 floats.

Twin: torch_ref/quantization/products.py. On CPUs XLA's int8 products are slow and e4m3 is emulated; the native kernels
(jaxbench/native) quantise inputs to int8 themselves, with one scale per 32 inputs.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Shaped

LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0}  # the largest code by the kernel's type


def matmul(
    x: Float[Array, "*rows I"],
    kernel: Shaped[Array, "I O"],
    scale: Float[Array, " O"],
    input_range: float | None,
) -> Float[Array, "*rows O"]:
    """Multiply x, rounded to the kernel's type, by scale * kernel; the result has x's type.

    Args:
      input_range: the |x| that becomes the type's largest value (static); None = the largest of each row (dynamic).

    A row with a NaN gives NaN throughout: no integer represents it.
    """
    rows, limit = x.reshape(-1, x.shape[-1]).astype(jnp.float32), LIMITS[kernel.dtype.name]
    is_int = kernel.dtype == jnp.int8
    if input_range is None or is_int:  # NaN if the row has one; a float8 holds NaN itself
        largest = jnp.max(jnp.abs(rows), axis=1, keepdims=True)
    if input_range is None:
        bound = largest
    else:
        bound = jnp.float32(input_range)
        bound = jnp.where(jnp.isnan(largest), largest, bound) if is_int else bound
    step = jnp.where(bound == 0, limit, bound) / limit
    codes = jnp.clip(jnp.round(rows / step) if is_int else rows / step, -limit, limit).astype(kernel.dtype)
    wide = jnp.int32 if is_int else jnp.float32
    product = lax.dot_general(codes, kernel, (((1,), (0,)), ((), ())), preferred_element_type=wide)
    out = product.astype(jnp.float32) * step * scale[None, :]
    return out.astype(x.dtype).reshape(*x.shape[:-1], -1)
