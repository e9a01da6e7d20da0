"""PyTorch's own fast matrix products on a CPU: oneDNN's, with each weight packed into oneDNN's layout once.

torch.matmul on a CPU uses MKL for float32, which on AMD processors reaches less than half the rate of oneDNN, in the
same wheel. For narrow types it uses oneDNN, but packs the weight at every call. Inductor packs weights too
(`freezing`), but as constants, so that every layer needs its own program. So the twin's linear layers call the
operators that Inductor calls, in eager and compiled code.

For its effect see docs/comparison.md, "The rival at its best" (arm torch_plain is the control). On an Intel Xeon
packing makes one row of float32 slower and several faster ("Another processor"), so single rows are tried both ways.

Where oneDNN has no bfloat16 product (no AVX-512), PyTorch multiplies that type by scalar code: 1.2 GFLOP/s with the
twin's kernels (I, O) and 17 with weights (O, I), where float32 reaches 140 (512 rows, 2 cores of an AMD EPYC, AVX2).
So weights are held as (O, I) there, and several rows are multiplied in float32 (functional.matmul), as XLA does.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_ref import functional, nn

Product = Callable[[Tensor], Tensor]

TRIAL_BYTES = 2**27  # bytes of weights that a trial reads: more than a cache holds
TRIAL_ROUNDS = 9
LEAST_GAIN = 1.1  # below this, a second copy of every weight is not worth its memory
FEW_ROWS = 4  # up to these, scalar bfloat16 code is faster than a product in float32 with the weight's conversion

_weights: list[Tensor] = []  # in oneDNN's layout, which a compiled program cannot take as an argument; or (O, I)
_library = torch.library.Library("jaxbench_packed", "DEF")
_library.define("linear(Tensor x, Tensor index, Tensor? bias, int num_outputs) -> Tensor")


def is_possible(dtype: str, device: str) -> bool:
    """Return True if oneDNN has a product of this type on this device."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == "float32" or getattr(torch, dtype) in functional.NARROW_PRODUCTS


def is_scalar(dtype: str, device: str) -> bool:
    """Return True if PyTorch multiplies this type by scalar code on this device."""
    return device == "cpu" and dtype == "bfloat16" and not is_possible(dtype, device)


def pack(model: torch.nn.Module) -> int:
    """Make every linear layer and tied head of a twin multiply by a packed weight; return the number packed.

    A bfloat16 weight for which oneDNN has no product is held as (O, I), its products widened to float32.

    Inference only: a layer's kernel is dropped, and changes to an embedding's table do not reach the packed head.
    """
    before = len(_weights)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.packed_index = len(_weights)
            module.forward = _product(module.kernel.detach().T, module.bias)
            module.kernel = torch.nn.Parameter(module.kernel.new_empty(0), requires_grad=False)
    if getattr(model, "head", None) is None:
        model.embed.attend = _product(model.embed.embedding.detach(), None)
    return len(_weights) - before


def hold_both_forms(model: torch.nn.Module) -> bool:
    """Make a packed model multiply single rows by plain weights if that is faster here; return whether it is.

    The trial alternates both forms on the model's own layers, enough of them to exceed any cache. If plain products win
    by a tenth in all rounds but one, every layer gets its kernel back in addition to the packed weight, which is still
    used for several rows.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    tried, read = [], 0
    for layer in layers:
        if read < TRIAL_BYTES:
            weight = _weights[layer.packed_index].to_dense()
            read += weight.numel() * weight.element_size()
            tried.append(
                (layer.forward, _plain_product(weight.T.contiguous(), layer.bias), weight.new_ones(1, weight.shape[1]))
            )
    gain = _gain(tried)
    del tried  # before the whole model's kernels are made
    if gain < LEAST_GAIN:
        return False
    for layer in layers:
        layer.kernel = torch.nn.Parameter(_weights[layer.packed_index].to_dense().T.contiguous(), requires_grad=False)
        layer.forward = _by_rows(_plain_product(layer.kernel, layer.bias), layer.forward)
    if getattr(model, "head", None) is None:
        model.embed.attend = _by_rows(functools.partial(nn.Embed.attend, model.embed), model.embed.attend)
    return True


def release() -> None:
    """Drop all packed weights."""
    _weights.clear()


def _product(weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None):
    packed = weight.contiguous()
    if weight.dtype == torch.float32 or weight.dtype in functional.NARROW_PRODUCTS:
        packed = torch.ops.mkldnn._reorder_linear_weight(packed, None)
    index, num_outputs = torch.tensor(len(_weights)), weight.shape[0]
    _weights.append(packed)

    def product(x: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        if torch.compiler.is_compiling():
            return torch.ops.jaxbench_packed.linear(x, index, bias, num_outputs)
        return _linear(x, packed, bias)

    return product


def _plain_product(kernel: Float[Tensor, "I O"], bias: Float[Tensor, " O"] | None) -> Product:
    return lambda x: functional.linear(x, kernel, bias)


def _by_rows(plain: Product, packed: Product) -> Product:
    return lambda x: plain(x) if x.numel() == x.shape[-1] else packed(x)


def _gain(tried: list[tuple[Product, Product, Tensor]]) -> float:
    """Time of packed over plain products of single rows: the second lowest ratio of all rounds but the first."""

    def seconds(which: int) -> float:
        start = time.perf_counter()
        for products in tried:
            products[which](products[2])
        return time.perf_counter() - start

    with torch.inference_mode():
        ratios = [seconds(0) / seconds(1) for _ in range(TRIAL_ROUNDS + 1)]
    return sorted(ratios[1:])[1]


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    if not packed.is_mkldnn:
        return _widened(x, packed, bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _widened(
    x: Float[Tensor, "*rows I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None
) -> Float[Tensor, "*rows O"]:
    if x.numel() <= FEW_ROWS * x.shape[-1]:
        return torch.nn.functional.linear(x, weight, bias)
    return functional.linear(x, weight.T, bias)


def _by_index(
    x: Float[Tensor, "*rows I"], index: Int[Tensor, ""], bias: Float[Tensor, " O"] | None, num_outputs: int
) -> Float[Tensor, "*rows O"]:
    return _linear(x, _weights[index.item()], bias)


_library.impl("linear", _by_index, "CPU")


@torch.library.register_fake("jaxbench_packed::linear", lib=_library)
def _shape(x: Tensor, index: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], num_outputs))
