"""Linear layers with 8-bit weights and inputs: int8, or e4m3 floats.

Twins: torch_ref/quantization/linear.py, jaxbench/eqx/quantization/linear.py.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxbench import functional, transformer
from jaxbench.quantization.products import matmul
from jaxbench.quantization.recipe import QuantizedModel, dequantized, layer_matrices


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
    """Build the decoder of a quantised model; with 8-bit activations its layers' products are QuantizedLinear.

    Raises:
      ValueError: 8-bit activations, and weights in groups or with zeros (see recipe.layer_matrices).
    """
    decoder = transformer.build(model.config, dequantized(model), dtype=dtype)
    if model.activations == "float":
        return decoder
    for name, matrix in layer_matrices(model).items():
        _, index, part, module = name.split(".")
        parent = getattr(decoder.layers[int(index)], part)
        bias = model.params.get(f"{name}.bias")
        scale, limit = np.ascontiguousarray(matrix.scales[:, 0]), model.input_ranges.get(name)
        setattr(parent, module, QuantizedLinear(np.ascontiguousarray(matrix.codes.T), scale, bias, limit))
    return decoder
