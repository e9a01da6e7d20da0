"""Linear layers whose weights and inputs have eight bits: int8, or e4m3 floats.

Twins: torch_ref/quantization/linear.py, jaxbench/eqx/quantization/linear.py. On CPUs XLA's int8 products are slow and
e4m3 is emulated; native kernels (jaxbench/native) have int8 inputs of their own, with a scale for every 32.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Shaped

from jaxbench import functional, transformer
from jaxbench.quantization.recipe import QuantizedModel, dequantized

LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0}  # the largest code by the kernel's type


def matmul(
    x: Float[Array, "*rows I"],
    kernel: Shaped[Array, "I O"],
    scale: Float[Array, " O"],
    input_range: float | None,
) -> Float[Array, "*rows O"]:
    """Product of x, rounded to the kernel's type, with scale * kernel, in x's type.

    Args:
      input_range: the |x| that becomes the type's largest value (static); None = the largest of each row (dynamic).
    """
    rows, limit = x.reshape(-1, x.shape[-1]).astype(jnp.float32), LIMITS[kernel.dtype.name]
    largest = jnp.max(jnp.abs(rows), axis=1, keepdims=True) if input_range is None else jnp.float32(input_range)
    step = jnp.where(largest > 0, largest, limit) / limit
    is_int = kernel.dtype == jnp.int8
    codes = jnp.clip(jnp.round(rows / step) if is_int else rows / step, -limit, limit).astype(kernel.dtype)
    wide = jnp.int32 if is_int else jnp.float32
    product = lax.dot_general(codes, kernel, (((1,), (0,)), ((), ())), preferred_element_type=wide)
    out = product.astype(jnp.float32) * step * scale[None, :]
    return out.astype(x.dtype).reshape(*x.shape[:-1], -1)


class QuantizedLinear(nnx.Module):
    """Affine map of the last axis in eight bits."""

    def __init__(self, kernel: np.ndarray, scale: np.ndarray, bias: Array | None, input_range: float | None):
        self.kernel, self.scale = nnx.Param(jnp.asarray(kernel)), nnx.Param(jnp.asarray(scale))
        self.bias = None if bias is None else nnx.Param(jnp.asarray(bias))
        self.input_range = input_range

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        """Affine map x @ (scale * kernel) (+ bias)."""
        out = matmul(x, self.kernel[...], self.scale[...], self.input_range)
        return functional.add_bias(out, None if self.bias is None else self.bias[...].astype(out.dtype))


def build(model: QuantizedModel, *, dtype: str = "float32") -> transformer.Transformer:
    """Decoder of a quantised model; with activations of eight bits its layers' products are QuantizedLinear."""
    decoder = transformer.build(model.config, dequantized(model), dtype=dtype)
    if model.activations == "float":
        return decoder
    for name, matrix in model.matrices.items():
        if name.startswith("layers."):
            _, index, part, module = name.split(".")
            parent = getattr(decoder.layers[int(index)], part)
            bias = model.params.get(f"{name}.bias")
            scale, limit = np.ascontiguousarray(matrix.scales[:, 0]), model.input_ranges.get(name)
            setattr(parent, module, QuantizedLinear(np.ascontiguousarray(matrix.codes.T), scale, bias, limit))
    return decoder
