"""PyTorch's own fast products on a CPU: oneDNN's, with each weight brought into its layout once.

What torch.matmul does with float32 on a CPU is MKL's product, which serves AMD processors at less than half the rate
that oneDNN, in the same wheel, reaches there; for narrow types it is oneDNN's, but the weight is brought into its
layout at every call. Inductor packs weights too (`freezing`), but as constants, so that every layer has a program of
its own. So the twin's linear layers call the operators that Inductor calls, in eager and compiled code.

What it is worth: docs/comparison.md, "The rival at its best" (arm torch_plain is the control); on an
Intel Xeon one row of float32 is slower so, and several are faster ("Another processor").
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_ref import nn

_weights: list[Tensor] = []  # in oneDNN's layout, which a compiled program cannot take as an argument
_library = torch.library.Library("jaxbench_packed", "DEF")
_library.define("linear(Tensor x, Tensor index, Tensor? bias, int num_outputs) -> Tensor")


def is_possible(dtype: str, device: str) -> bool:
    """True where oneDNN has a product of this type on this device."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == "float32" or (dtype == "bfloat16" and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(model: torch.nn.Module) -> int:
    """Have every linear layer and tied head of a twin multiply by a packed weight; the number of them.

    Inference only: a layer's kernel is dropped, and a change of an embedding's table does not reach the packed head.
    """
    before = len(_weights)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = _product(module.kernel.detach().T, module.bias)
            module.kernel = torch.nn.Parameter(module.kernel.new_empty(0), requires_grad=False)
    if getattr(model, "head", None) is None:
        model.embed.attend = _product(model.embed.embedding.detach(), None)
    return len(_weights) - before


def release() -> None:
    """Drop all packed weights."""
    _weights.clear()


def _product(weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None):
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    index, num_outputs = torch.tensor(len(_weights)), weight.shape[0]
    _weights.append(packed)

    def product(x: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        if torch.compiler.is_compiling():
            return torch.ops.jaxbench_packed.linear(x, index, bias, num_outputs)
        return _linear(x, packed, bias)

    return product


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _by_index(
    x: Float[Tensor, "*rows I"], index: Int[Tensor, ""], bias: Float[Tensor, " O"] | None, num_outputs: int
) -> Float[Tensor, "*rows O"]:
    return _linear(x, _weights[index.item()], bias)


_library.impl("linear", _by_index, "CPU")


@torch.library.register_fake("jaxbench_packed::linear", lib=_library)
def _shape(x: Tensor, index: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], num_outputs))
