"""Layers of the decoder in Flax NNX. Twins: torch_ref/nn.py, jaxbench/eqx/nn.py.

Parameters have the dtype of the layer, and the layer computes in it; statistics of norms and rotary angles use float32
where the dtype is narrower. Kernels are (in, out). Axis letters: WORKSPACE.md; I and O are a projection's in and out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int, UInt32

from jaxbench import float8, initial, prng

MIN_ROWS = 4  # XLA:CPU materialises a wider copy of a narrow kernel for one-row products (docs/xla_cpu.md, rule 1)


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _contract(x: Array, kernel: Array, axis: int) -> Array:
    """Contract the last axis of x with one axis of kernel; accumulate wide, return x's dtype."""
    dimensions = (((x.ndim - 1,), (axis,)), ((), ()))
    return lax.dot_general(x, kernel, dimensions, preferred_element_type=_wide(x.dtype)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _narrow_matmul(x: Float[Array, "R I"], kernel: Float[Array, "..."], axis: int) -> Float[Array, "R O"]:
    return _contract(x, kernel, axis)


def _narrow_forward(x: Array, kernel: Array, axis: int) -> tuple[Array, tuple[Array, Array]]:
    return _contract(x, kernel, axis), (x, kernel)


def _narrow_backward(axis: int, residuals: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    # The default rule would multiply the wide cotangent with the narrow kernel, and XLA:CPU copies the kernel for that.
    x, kernel = residuals
    kernel_grad = _contract(x.T, grad, 0) if axis == 0 else _contract(grad.T, x, 0)
    return _contract(grad, kernel, 1 - axis), kernel_grad


_narrow_matmul.defvjp(_narrow_forward, _narrow_backward)


def matmul(
    x: Float[Array, "*rows I"], kernel: Float[Array, "..."], *, transposed: bool = False
) -> Float[Array, "*rows O"]:
    """Multiply rows by a kernel (in, out), or (out, in) where transposed: the one matrix product of the models.

    Operands have equal types, products accumulate in at least float32, and products narrower than float32 get at least
    four rows: XLA:CPU's fast paths need all three. Native kernels plug in here.
    """
    rows = x.reshape(-1, x.shape[-1])
    if jnp.finfo(x.dtype).bits >= 32:
        product = _contract(rows, kernel, int(transposed))
    else:
        padding = max(0, MIN_ROWS - rows.shape[0])
        padded = jnp.pad(rows, ((0, padding), (0, 0))) if padding else rows
        product = _narrow_matmul(padded, kernel, int(transposed))[: rows.shape[0]]
    return product.reshape(*x.shape[:-1], product.shape[-1])


def rotary_angles(
    positions: Int[Array, "B T"], frequencies: tuple[float, ...], *, dtype: str
) -> tuple[Float[Array, "B T h"], Float[Array, "B T h"]]:
    """Return cosine and sine of position times frequency, in at least float32; h is half of the head width."""
    wide = _wide(jnp.dtype(dtype))

    def table(positions: Array) -> tuple[Array, Array]:
        angles = positions.astype(wide)[:, :, None] * jnp.asarray(frequencies, wide)[None, None, :]
        return jnp.cos(angles), jnp.sin(angles)

    def table_once(positions: Array) -> tuple[Array, Array]:
        # XLA:CPU fuses cosine and sine into every layer and head that uses them; the result of a branch is computed
        # once (docs/xla_cpu.md, rule 11). The condition always holds.
        zeros = jnp.zeros((*positions.shape, len(frequencies)), wide)
        return lax.cond(positions[0, 0] >= -1, table, lambda _: (zeros, zeros), positions)

    return lax.platform_dependent(positions, cpu=table_once, default=table)


def rotate(
    x: Float[Array, "B T N H"], cosine: Float[Array, "B T h"], sine: Float[Array, "B T h"]
) -> Float[Array, "B T N H"]:
    """Rotate pairs (i, i + H/2) of each head by the angles of their position (Su et al. 2021, arXiv:2104.09864)."""
    first, second = jnp.split(x.astype(cosine.dtype), 2, axis=-1)
    cosine, sine = cosine[:, :, None, :], sine[:, :, None, :]
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def dropout(
    x: Float[Array, "B T D"], rate: float, *, key: Array, step: Int[Array, ""] | int, site: UInt32[Array, ""] | int
) -> Float[Array, "B T D"]:
    """Zero values with probability `rate` (0 <= rate < 1) and scale the rest by 1 / (1 - rate).

    The mask is the Philox stream (key, step, site), row = batch row, element = index within the row.
    """
    count = x.shape[1] * x.shape[2]
    words = prng.words(key, step=step, site=site, rows=jnp.arange(x.shape[0]), num_elements=count)
    keep = prng.keep_mask(words, rate).reshape(x.shape)
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))


class Linear(nnx.Module):
    """Affine map of the last axis."""

    def __init__(self, in_features: int, out_features: int, *, use_bias: bool, dtype: str):
        self.kernel = nnx.Param(jnp.zeros((in_features, out_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None
        self.scales = None  # of 8-bit products, see float8.py

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        """Return x @ kernel (+ bias)."""
        kernel = self.kernel[...]
        product = matmul(x, kernel) if self.scales is None else float8.matmul(x, kernel, self.scales[...])
        return product if self.bias is None else product + self.bias[...].reshape((1,) * (x.ndim - 1) + (-1,))


def project(
    x: Float[Array, "*rows I"], layers: Sequence[Linear], *, groups: int
) -> tuple[Float[Array, "*rows O"], ...]:
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
    parts = [layer.kernel[...].reshape(x.shape[-1], groups, width) for layer, width in zip(layers, widths)]
    product = matmul(x, jnp.concatenate(parts, axis=2).reshape(x.shape[-1], -1)).reshape(*x.shape[:-1], groups, -1)
    found = [part.reshape(*x.shape[:-1], -1) for part in jnp.split(product, np.cumsum(widths)[:-1], axis=-1)]
    return tuple(
        y if layer.bias is None else y + layer.bias[...].reshape((1,) * (x.ndim - 1) + (-1,))
        for layer, y in zip(layers, found)
    )


class Embed(nnx.Module):
    """A table of vectors by index; transposed, the output head of a tied model."""

    def __init__(self, num_embeddings: int, features: int, *, dtype: str):
        self.embedding = nnx.Param(jnp.zeros((num_embeddings, features), dtype))

    def __call__(self, index: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return the vector of each index."""
        table = self.embedding[...]
        if jnp.finfo(table.dtype).bits < 32:
            # Keeps XLA:CPU from widening the whole table ahead of a loop that takes rows (docs/xla_cpu.md, rule 10).
            table, index = lax.optimization_barrier((table, index))
        return table[index]

    def attend(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Return the dot product of x with every vector."""
        return matmul(x, self.embedding[...], transposed=True)


class RMSNorm(nnx.Module):
    """Divide by the root mean square (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, features: int, *, eps: float, dtype: str):
        self.scale = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return x / rms(x) * scale."""
        wide = x.astype(_wide(x.dtype))
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * lax.rsqrt(mean_square + self.eps)).astype(x.dtype) * self.scale[...][None, None, :]


class LayerNorm(nnx.Module):
    """Standardise each vector (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, features: int, *, eps: float, dtype: str):
        self.scale = nnx.Param(jnp.ones((features,), dtype))
        self.bias = nnx.Param(jnp.zeros((features,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return (x - mean) / standard deviation * scale + bias."""
        wide = x.astype(_wide(x.dtype))
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        normal = (centred * lax.rsqrt(variance + self.eps)).astype(x.dtype)
        return normal * self.scale[...][None, None, :] + self.bias[...][None, None, :]


def norm(kind: str, features: int, *, eps: float, dtype: str) -> RMSNorm | LayerNorm:
    """Return the normalisation layer called `kind`, "rmsnorm" or "layernorm"."""
    return {"rmsnorm": RMSNorm, "layernorm": LayerNorm}[kind](features, eps=eps, dtype=dtype)


def load_params(model: nnx.Module, params: Mapping[str, np.ndarray]) -> nnx.Module:
    """Copy arrays into a model by dotted name, cast to each parameter's dtype, and return the model.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; all names are listed.
    """
    flat = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    initial.check_params({name: leaf.shape for name, (_, leaf) in flat.items()}, params)
    loaded = [(path, leaf.replace(jnp.asarray(params[name], leaf.dtype))) for name, (path, leaf) in flat.items()]
    nnx.update(model, nnx.from_flat_state(loaded))
    return model


def get_params(model: nnx.Module) -> dict[str, np.ndarray]:
    """Return every parameter by dotted name; types narrower than float32 are widened to it, which is exact."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(leaf[...], dtype=_wide(leaf.dtype)) for path, leaf in flat}
