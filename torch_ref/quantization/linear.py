"""Linear layers with 8-bit weights and inputs: int8, or e4m3 floats.

Twins: jaxbench/quantization/linear.py, jaxbench/eqx/quantization/linear.py.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from jaxbench.quantization.recipe import QuantizedModel, dequantized, layer_matrices
from torch_ref import functional, transformer
from torch_ref.quantization.products import matmul


class QuantizedLinear(torch.nn.Module):
    """Affine map of the last axis in eight bits."""

    def __init__(self, kernel: np.ndarray, scale: np.ndarray, bias: np.ndarray | None, input_range: float | None):
        super().__init__()
        codes = kernel if kernel.dtype == np.int8 else kernel.view(np.uint8)
        held = torch.tensor(codes) if kernel.dtype == np.int8 else torch.tensor(codes).view(torch.float8_e4m3fn)
        self.register_buffer("kernel", held)
        self.register_buffer("scale", torch.tensor(scale))
        self.register_buffer("bias", None if bias is None else torch.tensor(bias))
        self.input_range = input_range

    def forward(self, x: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        """Affine map x @ (scale * kernel) (+ bias)."""
        out = matmul(x, self.kernel, self.scale, self.input_range)
        return functional.add_bias(out, None if self.bias is None else self.bias.to(out.dtype))


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
