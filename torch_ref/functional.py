"""The decoder's arithmetic as pure functions on tensors: products, norms, rotary positions, dropout.

Twin: jaxbench/functional.py. Statistics of norms and rotary angles use float32 where the dtype is narrower. Kernels are
(in, out). Axis letters: WORKSPACE.md; I and O are a projection's in and out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torch_ref import prng

# Narrow types that oneDNN multiplies on this CPU. PyTorch multiplies the others by scalar code, such as bfloat16 where
# there is no AVX-512: 768 ms for 512 rows by a kernel of 576 x 1,536 where float32 takes 6 (2 cores of an AMD EPYC).
NARROW_PRODUCTS = frozenset(
    dtype
    for dtype, name in ((torch.bfloat16, "_is_mkldnn_bf16_supported"), (torch.float16, "_is_mkldnn_fp16_supported"))
    if torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, name)()
)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class DropoutStream(NamedTuple):
    """Random stream of one step's dropout masks."""

    key: Tensor  # of Philox
    step: Int[Tensor, ""] | int


def matmul(
    x: Float[Tensor, "*rows I"], kernel: Float[Tensor, "..."], *, transposed: bool = False
) -> Float[Tensor, "*rows O"]:
    """Multiply rows by a kernel (in, out), or (out, in) where transposed: the one matrix product of the models.

    On CPUs, types that are not in NARROW_PRODUCTS are multiplied in float32 and the product is rounded, as XLA does.
    """
    kernel = kernel.T if transposed else kernel
    if x.device.type != "cpu":
        return torch.matmul(x, kernel)
    is_cast = x.dtype != torch.float64 and torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if is_cast else x.dtype
    if dtype not in (torch.bfloat16, torch.float16) or dtype in NARROW_PRODUCTS:
        return torch.matmul(x, kernel)
    with torch.autocast("cpu", enabled=False):
        return torch.matmul(x.to(dtype).float(), kernel.to(dtype).float()).to(dtype)


def rotary_angles(
    positions: Int[Tensor, "B T"], frequencies: tuple[float, ...], *, dtype: str
) -> tuple[Float[Tensor, "B T h"], Float[Tensor, "B T h"]]:
    """Rotary cosine and sine of position times frequency, in at least float32; h is half of the head width."""
    wide = _wide(getattr(torch, dtype))
    table = torch.tensor(frequencies, dtype=torch.float64, device=positions.device).to(wide)
    angles = positions.to(wide)[:, :, None] * table[None, None, :]
    return torch.cos(angles), torch.sin(angles)


def rotate(
    x: Float[Tensor, "B T N H"], cosine: Float[Tensor, "B T h"], sine: Float[Tensor, "B T h"]
) -> Float[Tensor, "B T N H"]:
    """Rotate pairs (i, i + H/2) of each head by the angles of their position (Su et al. 2021, arXiv:2104.09864)."""
    x_wide, half = x.to(cosine.dtype), x.shape[-1] // 2
    first, second = x_wide[..., :half], x_wide[..., half:]  # chunk() becomes a sequence in ONNX, which TensorRT lacks
    cosine, sine = cosine[:, :, None, :], sine[:, :, None, :]
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(rotated, dim=-1).to(x.dtype)


def dropout(
    x: Float[Tensor, "B T D"], rate: float, stream: DropoutStream | None, *, site: int
) -> Float[Tensor, "B T D"]:
    """Zero values with probability `rate` (0 <= rate < 1) and scale the rest by 1 / (1 - rate).

    The mask is the Philox stream (key, step, site), row = batch row, element = index within the row. stream: None = no
    dropout.
    """
    if stream is None or rate == 0.0:
        return x
    count = x.shape[1] * x.shape[2]
    rows = torch.arange(x.shape[0], device=x.device)
    words = prng.words(stream.key, step=stream.step, site=site, rows=rows, num_elements=count)
    keep = prng.keep_mask(words, rate).reshape(x.shape)
    return torch.where(keep, x / (1.0 - rate), torch.zeros((), dtype=x.dtype, device=x.device))


def times(x: Float[Tensor, "..."], factor: float) -> Float[Tensor, "..."]:
    """Multiply by a number that the type of x need not hold: PyTorch does not round it to that type."""
    return x * factor


def linear(x: Float[Tensor, "*rows I"], kernel: Float[Tensor, "I O"], bias: Float[Tensor, " O"] | None) -> Tensor:
    """Affine map of the last axis: x @ kernel (+ bias) [*rows O]."""
    return add_bias(matmul(x, kernel), bias)


def add_bias(x: Float[Tensor, "*rows O"], bias: Float[Tensor, " O"] | None) -> Float[Tensor, "*rows O"]:
    """Add a bias, if there is one, to every row."""
    return x if bias is None else x + bias


def fused_linear(
    x: Float[Tensor, "*rows I"],
    kernels: Sequence[Float[Tensor, "I O"]],
    biases: Sequence[Float[Tensor, " O"] | None],
    *,
    groups: int,
) -> tuple[Float[Tensor, "*rows O"], ...]:
    """Affine maps of the same rows in one product, the kernels concatenated in `groups` interleaved parts.

    Raises:
      ValueError: a kernel's width is not a multiple of groups.
    """
    widths = [kernel.shape[1] for kernel in kernels]
    if any(width % groups for width in widths):
        raise ValueError(f"project: widths {widths} are not multiples of groups={groups}")
    parts = [kernel.reshape(x.shape[-1], groups, -1) for kernel in kernels]
    product = matmul(x, torch.cat(parts, dim=2).reshape(x.shape[-1], -1)).reshape(*x.shape[:-1], groups, -1)
    ends = list(itertools.accumulate(width // groups for width in widths))
    split = [product[..., start:end] for start, end in zip([0, *ends], ends)]  # split() is a sequence in ONNX, as above
    return tuple(add_bias(part.reshape(*x.shape[:-1], -1), bias) for part, bias in zip(split, biases))


def take_rows(table: Float[Tensor, "V D"], index: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
    """Rows of an embedding table by index."""
    return table[index]


def with_vectors(
    embed: Callable[[Tensor], Tensor], tokens: Int[Tensor, "B T"], vectors: Float[Tensor, "M D"] | None, *, size: int
) -> Float[Tensor, "B T D"]:
    """Embeddings of tokens; token id size + m, past the vocabulary, has vectors[m]. vectors=None: no such tokens."""
    if vectors is None:
        return embed(tokens)
    is_vector = tokens >= size
    rows = embed(torch.where(is_vector, 0, tokens))
    if vectors.shape[1] != rows.shape[2]:
        raise ValueError(f"vectors: {vectors.shape[1]} wide, wanted the model's {rows.shape[2]}")
    chosen = take_rows(vectors, torch.where(is_vector, tokens - size, 0))
    return torch.where(is_vector[..., None], chosen.to(rows.dtype), rows)


def rms_norm(x: Float[Tensor, "*rows D"], scale: Float[Tensor, " D"], *, eps: float) -> Float[Tensor, "*rows D"]:
    """Divide by the root mean square of the last axis (Zhang and Sennrich 2019, arXiv:1910.07467), times scale.

    Narrow types are rounded before the scale, as in Llama's published code and the JAX twin, unlike PyTorch's own.
    """
    if x.dtype.itemsize >= 4:
        return F.rms_norm(x, scale.shape, scale, eps)
    wide = x.to(_wide(x.dtype))
    mean_square = torch.mean(torch.square(wide), dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps)).to(x.dtype) * scale


def activated(x: Float[Tensor, "*rows F"], activation: str) -> Float[Tensor, "*rows F"]:
    """SiLU for swiglu, else GELU in its tanh form; PyTorch's kernels compute wide and round once."""
    return F.silu(x) if activation == "swiglu" else F.gelu(x, approximate="tanh")


def softcap(x: Float[Tensor, "..."], *, cap: float) -> Float[Tensor, "..."]:
    """Bound values smoothly: cap * tanh(x / cap) (Gemma Team 2024, arXiv:2408.00118, section 2)."""
    return torch.tanh(x / cap) * cap


def layer_norm(
    x: Float[Tensor, "*rows D"], scale: Float[Tensor, " D"], bias: Float[Tensor, " D"], *, eps: float
) -> Float[Tensor, "*rows D"]:
    """Standardise the last axis (Ba et al. 2016, arXiv:1607.06450), times scale, plus bias.

    Differs from the twin: narrow types are rounded once, as PyTorch does, and not also before scale and bias.
    """
    return F.layer_norm(x, scale.shape, scale, bias, eps)
