"""Products of 8-bit inputs and weights: int8, or e4m3 floats.

Twin: jaxbench/quantization/products.py. Differs from it: e4m3 codes are widened before the product, because PyTorch has
no e4m3 product on CPUs.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest code by the kernel's type
CUDA_ROWS = 32  # fewest int8 rows that cuBLAS takes


def matmul(
    x: Float[Tensor, "*rows I"],
    kernel: Shaped[Tensor, "I O"],
    scale: Float[Tensor, " O"],
    input_range: float | None,
) -> Float[Tensor, "*rows O"]:
    """Multiply x, rounded to the kernel's type, by scale * kernel; the result has x's type.

    Args:
      input_range: the |x| that becomes the type's largest value (static); None = the largest of each row (dynamic).

    A row with a NaN gives NaN throughout: no integer represents it.
    """
    rows, limit = x.reshape(-1, x.shape[-1]).float(), LIMITS[kernel.dtype]
    is_int = kernel.dtype == torch.int8
    if input_range is None or is_int:  # NaN if the row has one; a float8 holds NaN itself
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
