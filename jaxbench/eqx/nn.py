"""Layers of the decoder in Equinox: parameters, and calls of functional.py.

Twins: jaxbench/nn.py, torch_ref/nn.py. Parameters have the dtype of the layer, and the layer computes in it.
Kernels are (in, out). Axis letters: WORKSPACE.md; I and O are a projection's in and out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jaxbench import functional, initial, parameters


class Linear(eqx.Module):
    """Affine map of the last axis."""

    kernel: Array
    bias: Array | None

    def __init__(self, in_features: int, out_features: int, *, use_bias: bool, dtype: str):
        self.kernel = jnp.zeros((in_features, out_features), dtype)
        self.bias = jnp.zeros((out_features,), dtype) if use_bias else None

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        """Affine map x @ kernel (+ bias)."""
        return functional.linear(x, self.kernel, self.bias)


def project(
    x: Float[Array, "*rows I"], layers: Sequence[Linear], *, groups: int
) -> tuple[Float[Array, "*rows O"], ...]:
    """Outputs of several linear layers on one input; with groups > 0 from one product (functional.fused_linear)."""
    if not groups:
        return tuple(layer(x) for layer in layers)
    kernels = [layer.kernel for layer in layers]
    biases = [layer.bias for layer in layers]
    return functional.fused_linear(x, kernels, biases, groups=groups)


class Embed(eqx.Module):
    """Embedding table; transposed, the output head of a tied model.

    scale multiplies what is looked up, in the table's type and rounded to it, as Gemma's published code does.
    """

    embedding: Array
    scale: float = eqx.field(static=True)

    def __init__(self, num_embeddings: int, features: int, *, dtype: str, scale: float = 1.0):
        self.embedding = jnp.zeros((num_embeddings, features), dtype)
        self.scale = scale

    def __call__(self, index: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Embedding of each index."""
        rows = functional.take_rows(self.embedding, index)
        return rows if self.scale == 1.0 else rows * self.scale

    def attend(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Logits of a tied head: dot product of x with every embedding."""
        return functional.matmul(x, self.embedding, transposed=True)


class RMSNorm(eqx.Module):
    """Divide by the root mean square (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    scale: Array
    eps: float = eqx.field(static=True)

    def __init__(self, features: int, *, eps: float, dtype: str):
        self.scale = jnp.ones((features,), dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """RMS norm x / rms(x) * scale, over the last axis."""
        return functional.rms_norm(x, self.scale, eps=self.eps)


class LayerNorm(eqx.Module):
    """Standardise each vector (Ba et al. 2016, arXiv:1607.06450)."""

    scale: Array
    bias: Array
    eps: float = eqx.field(static=True)

    def __init__(self, features: int, *, eps: float, dtype: str):
        self.scale = jnp.ones((features,), dtype)
        self.bias = jnp.zeros((features,), dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Layer norm (x - mean) / standard deviation * scale + bias, over the last axis."""
        return functional.layer_norm(x, self.scale, self.bias, eps=self.eps)


def norm(kind: str, features: int, *, eps: float, dtype: str) -> RMSNorm | LayerNorm:
    """Normalisation layer of a kind, "rmsnorm" or "layernorm"."""
    return {"rmsnorm": RMSNorm, "layernorm": LayerNorm}[kind](features, eps=eps, dtype=dtype)


def load_params(model: eqx.Module, params: Mapping[str, np.ndarray]) -> eqx.Module:
    """Load arrays into a model by dotted name, cast to each parameter's dtype.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; all names are listed.
    """
    graph, leaves = parameters.split(model)
    initial.check_params({name: leaf.shape for name, leaf in leaves.items()}, params)
    return parameters.merge(graph, {name: jnp.asarray(params[name], leaf.dtype) for name, leaf in leaves.items()})


def get_params(model: eqx.Module) -> dict[str, np.ndarray]:
    """Parameters by dotted name; types narrower than float32 are widened to it, which is exact."""
    values = parameters.split(model)[1]
    return {name: np.asarray(x, dtype=jnp.promote_types(x.dtype, jnp.float32)) for name, x in values.items()}
