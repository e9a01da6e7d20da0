"""PyTorch's own 4-bit weights on a CPU: the product that gpt-fast and torchao use there.

Weights are 4-bit codes with a scale and a zero in bfloat16 for each group of 32 inputs: 5 bits per weight, as in GGUF's
Q4_1. The product is fast in bfloat16 only; in float32 it is PyTorch's reference loop, a thousand times slower.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_ref import nn

GROUP = 32  # inputs that share a scale and a zero; the product also takes 64, 128 and 256
MULTIPLE = 16  # of outputs, wanted by the product's layout
LARGEST = 15  # code


class Int4Linear(torch.nn.Module):
    """Affine map with a 4-bit weight, for inference."""

    def __init__(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None):
        super().__init__()
        codes, scales_and_zeros = quantized(weight)
        self.register_buffer("packed", torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1))
        self.register_buffer("scales_and_zeros", scales_and_zeros)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        """Affine map x @ weight.T (+ bias)."""
        rows = x.reshape(-1, x.shape[-1])
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.scales_and_zeros)
        y = y.reshape(*x.shape[:-1], y.shape[-1])
        return y if self.bias is None else y + self.bias


def quantized(weight: Float[Tensor, "O I"]) -> tuple[Int[Tensor, "O I"], Float[Tensor, "groups O 2"]]:
    """Return 4-bit codes of a weight, and the scale and zero of each group: weight = (code - 8) * scale + zero.

    The range of a group is its least to its largest value, so the codes of a weight that was Q4_1 are found again.

    Raises:
      ValueError: the sizes are no multiples of what the product takes.
    """
    num_outputs, num_inputs = weight.shape
    if num_outputs % MULTIPLE or num_inputs % GROUP:
        raise ValueError(
            f"int4: a weight of {num_outputs} outputs and {num_inputs} inputs; PyTorch's product takes multiples of "
            f"{MULTIPLE} and {GROUP}"
        )
    groups = weight.detach().float().reshape(num_outputs, -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    codes = ((groups - low) / scale).round().clamp(0, LARGEST).to(torch.int32)
    scales_and_zeros = torch.cat([scale, low + 8 * scale], dim=-1).transpose(0, 1)
    return codes.reshape(num_outputs, num_inputs), scales_and_zeros.contiguous().to(torch.bfloat16)


def quantize(model: torch.nn.Module) -> int:
    """Give every linear layer and the tied head of a twin a 4-bit weight; return the bytes of all of them.

    The embedding table stays as it is: looking up rows reads few of its bytes.
    """
    made = []
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                made.append(Int4Linear(layer.kernel.T, layer.bias))
                setattr(module, name, made[-1])
    if getattr(model, "head", None) is None:
        made.append(Int4Linear(model.embed.embedding, None))
        model.embed.attend = made[-1].forward
    return sum(each.packed.nbytes + each.scales_and_zeros.nbytes for each in made)
