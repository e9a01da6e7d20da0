"""Layers of the decoder in PyTorch. Twins: jaxbench/nn.py, jaxbench/eqx/nn.py.

Parameters have the dtype of the layer, and the layer computes in it; statistics of norms and rotary angles use float32
where the dtype is narrower. Kernels are (in, out). Axis letters: WORKSPACE.md; I and O are a projection's in and out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from jaxbench import initial
from torch_ref import prng


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def matmul(
    x: Float[Tensor, "*rows I"], kernel: Float[Tensor, "..."], *, transposed: bool = False
) -> Float[Tensor, "*rows O"]:
    """Multiply rows by a kernel (in, out), or (out, in) where transposed: the one matrix product of the models."""
    return torch.matmul(x, kernel.T if transposed else kernel)


def rotary_angles(
    positions: Int[Tensor, "B T"], frequencies: tuple[float, ...], *, dtype: str
) -> tuple[Float[Tensor, "B T h"], Float[Tensor, "B T h"]]:
    """Return cosine and sine of position times frequency, in at least float32; h is half of the head width."""
    wide = _wide(getattr(torch, dtype))
    table = torch.tensor(frequencies, dtype=torch.float64, device=positions.device).to(wide)
    angles = positions.to(wide)[:, :, None] * table[None, None, :]
    return torch.cos(angles), torch.sin(angles)


def rotate(
    x: Float[Tensor, "B T N H"], cosine: Float[Tensor, "B T h"], sine: Float[Tensor, "B T h"]
) -> Float[Tensor, "B T N H"]:
    """Rotate pairs (i, i + H/2) of each head by the angles of their position (Su et al. 2021, arXiv:2104.09864)."""
    first, second = x.to(cosine.dtype).chunk(2, dim=-1)
    cosine, sine = cosine[:, :, None, :], sine[:, :, None, :]
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(rotated, dim=-1).to(x.dtype)


def dropout(
    x: Float[Tensor, "B T D"], rate: float, *, key: Tensor, step: Tensor | int, site: int
) -> Float[Tensor, "B T D"]:
    """Zero values with probability `rate` (0 <= rate < 1) and scale the rest by 1 / (1 - rate).

    The mask is the Philox stream (key, step, site), row = batch row, element = index within the row.
    """
    count = x.shape[1] * x.shape[2]
    rows = torch.arange(x.shape[0], device=x.device)
    words = prng.words(key, step=step, site=site, rows=rows, num_elements=count)
    keep = prng.keep_mask(words, rate).reshape(x.shape)
    return torch.where(keep, x / (1.0 - rate), torch.zeros((), dtype=x.dtype, device=x.device))


class Linear(torch.nn.Module):
    """Affine map of the last axis."""

    def __init__(self, in_features: int, out_features: int, *, use_bias: bool, dtype: str):
        super().__init__()
        self.kernel = torch.nn.Parameter(torch.zeros(in_features, out_features, dtype=getattr(torch, dtype)))
        self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=getattr(torch, dtype))) if use_bias else None

    def forward(self, x: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        """Return x @ kernel (+ bias)."""
        product = matmul(x, self.kernel)
        return product if self.bias is None else product + self.bias


def project(
    x: Float[Tensor, "*rows I"], layers: Sequence[Linear], *, groups: int
) -> tuple[Float[Tensor, "*rows O"], ...]:
    """Return every layer's output; with groups > 0 from one product, its kernels side by side in interleaved parts.

    Part g of the wide kernel holds part g of every layer's: split over `groups` devices, each still has whole columns
    of all layers, so nothing moves. The wide kernel is made where it is used; parameters stay as they are.

    Raises:
      ValueError: a layer's width is not a multiple of groups.
    """
    if not groups:
        return tuple(layer(x) for layer in layers)
    widths = [layer.kernel.shape[1] // groups for layer in layers]
    if any(layer.kernel.shape[1] % groups for layer in layers):
        raise ValueError(
            f"project: widths {[layer.kernel.shape[1] for layer in layers]} are not multiples of groups={groups}"
        )
    parts = [layer.kernel.reshape(x.shape[-1], groups, width) for layer, width in zip(layers, widths)]
    product = matmul(x, torch.cat(parts, dim=2).reshape(x.shape[-1], -1)).reshape(*x.shape[:-1], groups, -1)
    found = [part.reshape(*x.shape[:-1], -1) for part in torch.split(product, widths, dim=-1)]
    return tuple(y if layer.bias is None else y + layer.bias for layer, y in zip(layers, found))


class Embed(torch.nn.Module):
    """A table of vectors by index; transposed, the output head of a tied model."""

    def __init__(self, num_embeddings: int, features: int, *, dtype: str):
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.zeros(num_embeddings, features, dtype=getattr(torch, dtype)))

    def forward(self, index: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Return the vector of each index."""
        return self.embedding[index]

    def attend(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """Return the dot product of x with every vector."""
        return matmul(x, self.embedding, transposed=True)


class RMSNorm(torch.nn.Module):
    """Divide by the root mean square (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, features: int, *, eps: float, dtype: str):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(features, dtype=getattr(torch, dtype)))
        self.eps = eps

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Return x / rms(x) * scale."""
        wide = x.to(_wide(x.dtype))
        mean_square = torch.mean(torch.square(wide), dim=-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype) * self.scale


class LayerNorm(torch.nn.Module):
    """Standardise each vector (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, features: int, *, eps: float, dtype: str):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(features, dtype=getattr(torch, dtype)))
        self.bias = torch.nn.Parameter(torch.zeros(features, dtype=getattr(torch, dtype)))
        self.eps = eps

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Return (x - mean) / standard deviation * scale + bias."""
        wide = x.to(_wide(x.dtype))
        centred = wide - torch.mean(wide, dim=-1, keepdim=True)
        variance = torch.mean(torch.square(centred), dim=-1, keepdim=True)
        normal = (centred * torch.rsqrt(variance + self.eps)).to(x.dtype)
        return normal * self.scale + self.bias


def norm(kind: str, features: int, *, eps: float, dtype: str) -> RMSNorm | LayerNorm:
    """Return the normalisation layer called `kind`, "rmsnorm" or "layernorm"."""
    return {"rmsnorm": RMSNorm, "layernorm": LayerNorm}[kind](features, eps=eps, dtype=dtype)


def load_params(model: torch.nn.Module, params: Mapping[str, np.ndarray], *, device: str = "cpu") -> torch.nn.Module:
    """Copy arrays into a model by dotted name, cast to each parameter's dtype, and return the model.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; all names are listed.
    """
    expected = dict(model.named_parameters())
    initial.check_params({name: tuple(p.shape) for name, p in expected.items()}, params)
    # torch.tensor copies: an alias of the caller's array would let a training step write into it.
    loaded = {name: torch.tensor(params[name], dtype=p.dtype, device=device) for name, p in expected.items()}
    model.load_state_dict(loaded, strict=True, assign=True)
    return model


def get_params(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return every parameter by dotted name; types narrower than float32 are widened to it, which is exact."""
    params = {name: p.detach().to("cpu", _wide(p.dtype)) for name, p in model.named_parameters()}
    return {name: p.numpy().copy() for name, p in params.items()}
