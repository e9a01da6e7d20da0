"""Linear layers whose weights and inputs have eight bits: int8, or e4m3 floats.

Twins: jaxbench/quantization/linear.py, jaxbench/eqx/quantization/linear.py. Differs from them: e4m3 codes are widened
before the product, because PyTorch has no such product on CPUs.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from jaxbench.quantization.recipe import QuantizedModel, dequantized
from torch_ref import functional, transformer

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest code by the kernel's type
CUDA_ROWS = 32  # cuBLAS takes no fewer rows of int8


def matmul(
    x: Float[Tensor, "*rows I"],
    kernel: Shaped[Tensor, "I O"],
    scale: Float[Tensor, " O"],
    input_range: float | None,
) -> Float[Tensor, "*rows O"]:
    """Product of x, rounded to the kernel's type, with scale * kernel, in x's type.

    Args:
      input_range: the |x| that becomes the type's largest value (static); None = the largest of each row (dynamic).
    """
    rows, limit = x.reshape(-1, x.shape[-1]).float(), LIMITS[kernel.dtype]
    if input_range is None:
        largest = rows.abs().amax(dim=1, keepdim=True)
    else:
        largest = torch.tensor(input_range, dtype=torch.float32, device=x.device)
    step = torch.where(largest > 0, largest, limit) / limit
    is_int = kernel.dtype == torch.int8
    codes = torch.clamp(torch.round(rows / step) if is_int else rows / step, -limit, limit).to(kernel.dtype)
    if is_int:
        padding = max(0, CUDA_ROWS - len(codes)) if x.is_cuda else 0
        codes = torch.nn.functional.pad(codes, (0, 0, 0, padding))
        product = torch._int_mm(codes, kernel)[: len(rows)]
    else:
        product = codes.float() @ kernel.float()
    out = product.float() * step * scale
    return out.to(x.dtype).reshape(*x.shape[:-1], -1)


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
