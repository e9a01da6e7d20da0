"""Linear layers with 8-bit weights and inputs: int8, or e4m3 floats.

Twins: jaxbench/quantization/linear.py, torch_ref/quantization/linear.py.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxbench import functional
from jaxbench.eqx import transformer
from jaxbench.quantization.products import matmul
from jaxbench.quantization.recipe import QuantizedModel, dequantized, layer_matrices, layer_modules


class QuantizedLinear(eqx.Module):
    """Affine map of the last axis in eight bits."""

    kernel: Array
    scale: Array
    bias: Array | None
    input_range: float | None = eqx.field(static=True)

    def __init__(self, kernel: np.ndarray, scale: np.ndarray, bias: np.ndarray | None, input_range: float | None):
        self.kernel, self.scale = jnp.asarray(kernel), jnp.asarray(scale)
        self.bias = None if bias is None else jnp.asarray(bias)
        self.input_range = input_range

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        """Affine map x @ (scale * kernel) (+ bias)."""
        out = matmul(x, self.kernel, self.scale, self.input_range)
        return functional.add_bias(out, None if self.bias is None else self.bias.astype(out.dtype))


def build(model: QuantizedModel, *, dtype: str = "float32") -> transformer.Transformer:
    """Build the decoder of a quantised model; with 8-bit activations its layers' products are QuantizedLinear.

    Raises:
      ValueError: 8-bit activations, and weights in groups or with zeros (see recipe.layer_matrices).
    """
    decoder = transformer.build(model.config, dequantized(model), dtype=dtype)
    if model.activations == "float":
        return decoder
    held, new = layer_matrices(model), []
    for name, matrix in held.items():
        limit = model.input_ranges.get(name)
        scale = np.ascontiguousarray(matrix.scales[:, 0])
        kernel = np.ascontiguousarray(matrix.codes.T)
        new.append(QuantizedLinear(kernel, scale, model.params.get(f"{name}.bias"), limit))
    return eqx.tree_at(lambda tree: layer_modules(tree, held), decoder, new)
