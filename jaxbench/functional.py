"""The decoder's arithmetic as pure functions on arrays: products, norms, rotary positions, dropout.

Layers of Flax (nn.py) and of Equinox (eqx/nn.py) hold the parameters and call these. Twin: torch_ref/functional.py.
Statistics of norms and rotary angles use float32 where the dtype is narrower. Kernels are (in, out). Axis letters:
WORKSPACE.md; I and O are a projection's in and out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, UInt32

from jaxbench import narrow_products, prng

MIN_ROWS = 4  # XLA:CPU materialises a wider copy of a narrow kernel for one-row products (docs/xla_cpu.md, rule 1)


class DropoutStream(NamedTuple):
    """Random stream of one step's dropout masks."""

    key: Array  # of Philox
    step: Int[Array, ""] | int


def matmul(
    x: Float[Array, "*rows I"], kernel: Float[Array, "..."], *, transposed: bool = False
) -> Float[Array, "*rows O"]:
    """Multiply rows by a kernel (in, out), or (out, in) where transposed: the one matrix product of the models.

    Operands have equal types and products accumulate in at least float32; on a CPU, products narrower than float32 get
    at least four rows: XLA:CPU's fast paths need all three. Native kernels plug in here.
    """
    rows, axis = x.reshape(-1, x.shape[-1]), int(transposed)
    if jnp.finfo(x.dtype).bits >= 32:
        product = narrow_products.contract(rows, kernel, axis)
    elif (padding := MIN_ROWS - rows.shape[0]) <= 0:
        product = narrow_products.multiply(rows, kernel, axis)
    else:
        # On a GPU the padding would be a separate kernel before every product of a decode step (docs/gpu.md).
        product = lax.platform_dependent(
            rows, kernel,
            cpu=lambda rows, kernel: narrow_products.multiply(
                jnp.pad(rows, ((0, padding), (0, 0))), kernel, axis
            )[:-padding],
            default=lambda rows, kernel: narrow_products.multiply(rows, kernel, axis),
        )  # fmt: skip
    return product.reshape(*x.shape[:-1], product.shape[-1])


def rotary_angles(
    positions: Int[Array, "B T"], frequencies: tuple[float, ...], *, dtype: str
) -> tuple[Float[Array, "B T h"], Float[Array, "B T h"]]:
    """Rotary cosine and sine of position times frequency, in at least float32; h is half of the head width."""
    wide = narrow_products.wide_type(jnp.dtype(dtype))

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
    x: Float[Array, "B T D"],
    rate: float,
    stream: DropoutStream | None,
    *,
    site: UInt32[Array, ""] | int,
) -> Float[Array, "B T D"]:
    """Zero values with probability `rate` (0 <= rate < 1) and scale the rest by 1 / (1 - rate).

    The mask is the Philox stream (key, step, site), row = batch row, element = index within the row. stream: None = no
    dropout.
    """
    if stream is None or rate == 0.0:
        return x
    count = x.shape[1] * x.shape[2]
    words = prng.words(stream.key, step=stream.step, site=site, rows=jnp.arange(x.shape[0]), num_elements=count)
    keep = prng.keep_mask(words, rate).reshape(x.shape)
    # 1 - 0.1 is 0.8984 in bfloat16: divided by that, what is kept would be 0.18 % too large.
    kept = (x.astype(narrow_products.wide_type(x.dtype)) / (1.0 - rate)).astype(x.dtype)
    return jnp.where(keep, kept, jnp.zeros((), x.dtype))


def times(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """Multiply by a number that the type of x need not hold: it is not rounded to that type, and the product once."""
    return (x.astype(narrow_products.wide_type(x.dtype)) * factor).astype(x.dtype)


def linear(x: Float[Array, "*rows I"], kernel: Float[Array, "I O"], bias: Float[Array, " O"] | None) -> Array:
    """Affine map of the last axis: x @ kernel (+ bias) [*rows O]."""
    return add_bias(matmul(x, kernel), bias)


def add_bias(x: Float[Array, "*rows O"], bias: Float[Array, " O"] | None) -> Float[Array, "*rows O"]:
    """Add a bias, if there is one, to every row; its gradient is summed over the rows in at least float32."""
    if bias is None:
        return x
    return _added(x, bias) if jnp.finfo(x.dtype).bits < 32 else x + bias.reshape((1,) * (x.ndim - 1) + (-1,))


@jax.custom_vjp
def _added(x: Float[Array, "*rows O"], bias: Float[Array, " O"]) -> Float[Array, "*rows O"]:
    return x + bias.reshape((1,) * (x.ndim - 1) + (-1,))


def _added_forward(x: Array, bias: Array) -> tuple[Array, None]:
    return _added(x, bias), None


def _added_backward(_: None, grad: Array) -> tuple[Array, Array]:
    return grad, jnp.sum(narrow_products.as_rounded(grad), axis=tuple(range(grad.ndim - 1))).astype(grad.dtype)


_added.defvjp(_added_forward, _added_backward)


def _scaled(normal: Float[Array, "*rows D"], scale: Float[Array, " D"]) -> Float[Array, "*rows D"]:
    """Every row times scale, whose gradient is summed over the rows in at least float32."""
    wide = narrow_products.wide_type(normal.dtype)
    return (normal.astype(wide) * scale.astype(wide).reshape((1,) * (normal.ndim - 1) + (-1,))).astype(normal.dtype)


def fused_linear(
    x: Float[Array, "*rows I"],
    kernels: Sequence[Float[Array, "I O"]],
    biases: Sequence[Float[Array, " O"] | None],
    *,
    groups: int,
) -> tuple[Float[Array, "*rows O"], ...]:
    """Affine maps of the same rows in one product, the kernels concatenated in `groups` interleaved parts.

    Part g of the wide kernel holds part g of every kernel: sharded over `groups` devices, each still has whole columns
    of all kernels, so no data moves. The wide kernel is built where it is used; parameters are unchanged.

    Raises:
      ValueError: a kernel's width is not a multiple of groups.
    """
    widths = [kernel.shape[1] for kernel in kernels]
    if any(width % groups for width in widths):
        raise ValueError(f"project: widths {widths} are not multiples of groups={groups}")
    parts = [kernel.reshape(x.shape[-1], groups, -1) for kernel in kernels]
    product = matmul(x, jnp.concatenate(parts, axis=2).reshape(x.shape[-1], -1)).reshape(*x.shape[:-1], groups, -1)
    split = jnp.split(product, np.cumsum([width // groups for width in widths])[:-1], axis=-1)
    return tuple(add_bias(part.reshape(*x.shape[:-1], -1), bias) for part, bias in zip(split, biases))


def take_rows(table: Float[Array, "V D"], index: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows of an embedding table by index."""
    if jnp.finfo(table.dtype).bits < 32:
        # Keeps XLA:CPU from widening the whole table ahead of a loop that takes rows (docs/xla_cpu.md, rule 10).
        table, index = lax.optimization_barrier((table, index))
    return table[index]


def with_vectors(
    embed: Callable[[Array], Array], tokens: Int[Array, "B T"], vectors: Float[Array, "M D"] | None, *, size: int
) -> Float[Array, "B T D"]:
    """Embeddings of tokens; token id size + m, past the vocabulary, has vectors[m]. vectors=None: no such tokens."""
    if vectors is None:
        return embed(tokens)
    is_vector = tokens >= size
    rows = embed(jnp.where(is_vector, 0, tokens))
    if vectors.shape[1] != rows.shape[2]:
        raise ValueError(f"vectors: {vectors.shape[1]} wide, wanted the model's {rows.shape[2]}")
    chosen = take_rows(vectors, jnp.where(is_vector, tokens - size, 0))
    return jnp.where(is_vector[..., None], chosen.astype(rows.dtype), rows)


def rms_norm(x: Float[Array, "*rows D"], scale: Float[Array, " D"], *, eps: float) -> Float[Array, "*rows D"]:
    """Divide by the root mean square of the last axis (Zhang and Sennrich 2019, arXiv:1910.07467), times scale."""
    return _normed(x, scale, None, eps) if jnp.finfo(x.dtype).bits < 32 else _norm(x, scale, None, eps)[0]


def activated(x: Float[Array, "*rows F"], activation: str) -> Float[Array, "*rows F"]:
    """SiLU for swiglu, else GELU in its tanh form; computed wide and rounded once, as PyTorch does.

    The backward pass recomputes it from x: intermediate values, if kept, would be wide (docs/gpu.md).
    """
    function = jax.nn.silu if activation == "swiglu" else functools.partial(jax.nn.gelu, approximate=True)
    return jax.checkpoint(lambda x: function(x.astype(narrow_products.wide_type(x.dtype))).astype(x.dtype))(x)


def softcap(x: Float[Array, "..."], *, cap: float) -> Float[Array, "..."]:
    """Bound values smoothly: cap * tanh(x / cap) (Gemma Team 2024, arXiv:2408.00118, section 2)."""
    return jnp.tanh(x / cap) * cap


def layer_norm(
    x: Float[Array, "*rows D"], scale: Float[Array, " D"], bias: Float[Array, " D"], *, eps: float
) -> Float[Array, "*rows D"]:
    """Standardise the last axis (Ba et al. 2016, arXiv:1607.06450), times scale, plus bias; not for forward mode."""
    return _normed(x, scale, bias, eps)


def _norm(
    x: Float[Array, "*rows D"], scale: Float[Array, " D"], bias: Float[Array, " D"] | None, eps: float
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows 1"], Float[Array, "*rows 1"] | None]:
    """Norm of the last axis, its inverse deviation, and its mean, which is subtracted only if there is a bias."""
    wide = x.astype(narrow_products.wide_type(x.dtype))
    mean = None if bias is None else jnp.mean(wide, axis=-1, keepdims=True)
    centred = wide if mean is None else wide - mean
    inverse = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    normal = _scaled((centred * inverse).astype(x.dtype), scale)
    return add_bias(normal, bias), inverse, mean


# The norm with a custom backward pass, for narrow types and wherever there is a mean. In that pass XLA would recompute
# narrow types' statistics, which on a GPU writes every product of the scale's gradient to memory, in float32, before
# summing it over the rows (docs/gpu.md). Behind a mean's own gradient XLA:CPU fuses the running sum of the residual
# stream's gradients into each reader: a block then reads what all later ones added (docs/xla_cpu.md rule 20).
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _normed(
    x: Float[Array, "*rows D"], scale: Float[Array, " D"], bias: Float[Array, " D"] | None, eps: float
) -> Float[Array, "*rows D"]:
    return _norm(x, scale, bias, eps)[0]


def _normed_forward(x: Array, scale: Array, bias: Array | None, eps: float) -> tuple[Array, tuple]:
    out, inverse, mean = _norm(x, scale, bias, eps)
    return out, (x, scale, bias, *lax.optimization_barrier((inverse, mean)))


def _normed_backward(eps: float, residuals: tuple, grad: Array) -> tuple[Array, Array, Array | None]:
    x, scale, bias, inverse, mean = residuals
    wide, by_row = grad.astype(inverse.dtype), tuple(range(grad.ndim - 1))
    normal = (x.astype(inverse.dtype) - (0.0 if mean is None else mean)) * inverse
    scaled = wide * scale.astype(inverse.dtype).reshape((1,) * (grad.ndim - 1) + (-1,))
    along = scaled - normal * jnp.mean(scaled * normal, axis=-1, keepdims=True)
    along = along if mean is None else along - jnp.mean(scaled, axis=-1, keepdims=True)
    scale_grad = jnp.sum(wide * normal, axis=by_row).astype(scale.dtype)
    bias_grad = None if bias is None else jnp.sum(wide, axis=by_row).astype(bias.dtype)
    return (along * inverse).astype(x.dtype), scale_grad, bias_grad


_normed.defvjp(_normed_forward, _normed_backward)
