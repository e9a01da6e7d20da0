"""Products of inputs and weights that have eight bits: int8, or e4m3 floats.

Twin: jaxbench/quantization/products.py. Differs from it: e4m3 codes are widened before the product, because PyTorch has
no such product on CPUs.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

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

    A row with a NaN is NaN throughout: no integer stands for it.
    """
    rows, limit = x.reshape(-1, x.shape[-1]).float(), LIMITS[kernel.dtype]
    is_int = kernel.dtype == torch.int8
    if input_range is None or is_int:  # NaN where one is, which a float8 is too
        largest = rows.abs().amax(dim=1, keepdim=True)
    if input_range is None:
        bound = largest
    else:
        bound = torch.tensor(input_range, dtype=torch.float32, device=x.device)
        bound = torch.where(torch.isnan(largest), largest, bound) if is_int else bound
    step = torch.where(bound == 0, limit, bound) / limit
    codes = torch.clamp(torch.round(rows / step) if is_int else rows / step, -limit, limit).to(kernel.dtype)
    if is_int:
        padding = max(0, CUDA_ROWS - len(codes)) if x.is_cuda else 0
        codes = torch.nn.functional.pad(codes, (0, 0, 0, padding))
        product = torch._int_mm(codes, kernel)[: len(rows)]
    else:
        product = codes.float() @ kernel.float()
    out = product.float() * step * scale
    return out.to(x.dtype).reshape(*x.shape[:-1], -1)
