"""Layers of the decoder in PyTorch: parameters, and calls of functional.py.

Twins: jaxbench/nn.py, jaxbench/eqx/nn.py. Parameters have the dtype of the layer, and the layer computes in it.
Kernels are (in, out). Axis letters: WORKSPACE.md; I and O are a projection's in and out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from jaxbench import initial
from torch_ref import functional


class Linear(torch.nn.Module):
    """Affine map of the last axis."""

    def __init__(self, in_features: int, out_features: int, *, use_bias: bool, dtype: str):
        super().__init__()
        self.kernel = torch.nn.Parameter(torch.zeros(in_features, out_features, dtype=getattr(torch, dtype)))
        self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=getattr(torch, dtype))) if use_bias else None

    def forward(self, x: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        """Affine map x @ kernel (+ bias)."""
        return functional.linear(x, self.kernel, self.bias)


def project(
    x: Float[Tensor, "*rows I"], layers: Sequence[Linear], *, groups: int
) -> tuple[Float[Tensor, "*rows O"], ...]:
    """Outputs of several linear layers on one input; with groups > 0 from one product (functional.fused_linear)."""
    if not groups:
        return tuple(layer(x) for layer in layers)
    kernels = [layer.kernel for layer in layers]
    biases = [layer.bias for layer in layers]
    return functional.fused_linear(x, kernels, biases, groups=groups)


class Embed(torch.nn.Module):
    """Embedding table; transposed, the output head of a tied model.

    scale multiplies what is looked up, in the table's type and rounded to it, as Gemma's published code does.
    """

    def __init__(self, num_embeddings: int, features: int, *, dtype: str, scale: float = 1.0):
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.zeros(num_embeddings, features, dtype=getattr(torch, dtype)))
        # Rounded here, since PyTorch does not round a number that it multiplies by; its device may be meta otherwise.
        self.scale = float(torch.tensor(scale, dtype=getattr(torch, dtype), device="cpu"))

    def forward(self, index: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Embedding of each index."""
        rows = functional.take_rows(self.embedding, index)
        return rows if self.scale == 1.0 else rows * self.scale

    def attend(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """Logits of a tied head: dot product of x with every embedding."""
        return functional.matmul(x, self.embedding, transposed=True)


class RMSNorm(torch.nn.Module):
    """Divide by the root mean square (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, features: int, *, eps: float, dtype: str):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(features, dtype=getattr(torch, dtype)))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """RMS norm x / rms(x) * scale, over the last axis."""
        return functional.rms_norm(x, self.scale, eps=self.eps)


class LayerNorm(torch.nn.Module):
    """Standardise each vector (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, features: int, *, eps: float, dtype: str):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(features, dtype=getattr(torch, dtype)))
        self.bias = torch.nn.Parameter(torch.zeros(features, dtype=getattr(torch, dtype)))
        self.eps = eps

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Layer norm (x - mean) / standard deviation * scale + bias, over the last axis."""
        return functional.layer_norm(x, self.scale, self.bias, eps=self.eps)


def norm(kind: str, features: int, *, eps: float, dtype: str) -> RMSNorm | LayerNorm:
    """Normalisation layer of a kind, "rmsnorm" or "layernorm"."""
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
    """Parameters by dotted name; types narrower than float32 are widened to it, which is exact."""
    wide = ((name, p, torch.promote_types(p.dtype, torch.float32)) for name, p in model.named_parameters())
    return {name: p.detach().to("cpu", dtype).numpy().copy() for name, p, dtype in wide}
