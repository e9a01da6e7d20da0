"""Matrix products of narrow types with custom gradients, in forms that XLA:CPU multiplies fast (docs/xla_cpu.md).

The default gradient multiplies the wide cotangent by a narrow operand, and a product that contracts rows takes a
transposed view of an array: XLA:CPU copies the narrow operand of the first into a wider type and multiplies the
second in float32. PyTorch needs neither workaround. I and O are a kernel's in and out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float


def wide_type(dtype: Any) -> jnp.dtype:
    """Return the wider of a type and float32."""
    return jnp.promote_types(dtype, jnp.float32)


def as_rounded(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Convert x to at least float32; bfloat16 on NVIDIA GPUs from its bits.

    XLA elides a conversion back to float32: where x was just rounded, it would keep, and write, the float32 values as
    well. From the bits, the kernel that computes x can also sum it (docs/gpu.md).
    """

    def from_bits(x: Array) -> Array:
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16, jnp.float32)

    wide = wide_type(x.dtype)
    if x.dtype != jnp.bfloat16:
        return x.astype(wide)
    return lax.platform_dependent(x, cuda=from_bits, default=lambda x: x.astype(wide))


def stored_transpose(x: Float[Array, "*batch R C"]) -> Float[Array, "*batch C R"]:
    """Swap the last two axes of an operand; on CPUs the result is stored in memory in that order.

    XLA:CPU multiplies in float32 if an operand is a transposed view of an array (docs/xla_cpu.md, rule 16). A reshape
    ends the view; a layout constraint would too, but costs an all-gather on a mesh.
    """
    swapped = functools.partial(jnp.swapaxes, axis1=-1, axis2=-2)

    def stored(x: Array) -> Array:  # without the barrier, x would be computed in its transpose's order
        return swapped(lax.optimization_barrier(x)[None]).reshape(*x.shape[:-2], x.shape[-1], x.shape[-2])

    return lax.platform_dependent(x, cpu=stored, default=swapped)


def contract(x: Float[Array, "*rows I"], kernel: Float[Array, "..."], axis: int) -> Float[Array, "*rows O"]:
    """Contract the last axis of x with one axis of a kernel; accumulate wide, return x's dtype."""
    dimensions = (((x.ndim - 1,), (axis,)), ((), ()))

    def rounded(x: Array, kernel: Array, dtype: jnp.dtype) -> Array:
        return lax.dot_general(x, kernel, dimensions, preferred_element_type=dtype).astype(x.dtype)

    wide = functools.partial(rounded, dtype=wide_type(x.dtype))
    if x.dtype == wide_type(x.dtype):
        return wide(x, kernel)
    # NVIDIA's kernels accumulate wide and round as they write; asked for float32, cuBLAS would write it (docs/gpu.md).
    return lax.platform_dependent(x, kernel, cuda=functools.partial(rounded, dtype=x.dtype), default=wide)


_is_native: ContextVar[bool] = ContextVar("native products", default=False)


@contextlib.contextmanager
def native(is_on: bool) -> Iterator[None]:
    """Make programs traced inside use native kernels for bfloat16 products of rows (native/products.py), if is_on."""
    token = _is_native.set(is_on)
    try:
        yield
    finally:
        _is_native.reset(token)


def multiply(x: Float[Array, "R I"], kernel: Float[Array, "..."], axis: int) -> Float[Array, "R O"]:
    """Multiply rows by a kernel: (in, out) with axis 0, (out, in) with axis 1."""
    if _is_native.get() and x.dtype == jnp.bfloat16:
        from jaxbench.native import products  # which needs a compiler

        return products.multiply(x, kernel, axis)
    return _multiply(x, kernel, axis)


_multiply = jax.custom_vjp(contract, nondiff_argnums=(2,))


def _multiply_forward(x: Array, kernel: Array, axis: int) -> tuple[Array, tuple[Array, Array]]:
    return contract(x, kernel, axis), (x, kernel)


def _multiply_backward(axis: int, residuals: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    left, right = (x, grad) if axis == 0 else (grad, x)
    return contract(grad, kernel, 1 - axis), contract(stored_transpose(left), right, 0)


_multiply.defvjp(_multiply_forward, _multiply_backward)


def product(left: Float[Array, "*batch R I"], right: Float[Array, "*batch I O"]) -> Float[Array, "*batch R O"]:
    """Product of each pair of matrices of one dtype, in at least float32; narrow ones have narrow gradients."""
    is_narrow = jnp.finfo(left.dtype).bits < 32
    return (_narrow_product if is_narrow else _wide_product)(left, right)


def _wide_product(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, preferred_element_type=wide_type(left.dtype))


_narrow_product = jax.custom_vjp(_wide_product)


def _product_forward(left: Array, right: Array) -> tuple[Array, tuple[Array, Array]]:
    return _wide_product(left, right), (left, right)


def _product_backward(residuals: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    left, right = residuals
    grad = grad.astype(left.dtype)
    left_grad = _wide_product(grad, jnp.swapaxes(right, -1, -2))
    return left_grad.astype(left.dtype), _wide_product(stored_transpose(left), grad).astype(right.dtype)


_narrow_product.defvjp(_product_forward, _product_backward)
