"""Matrix products in 8-bit floating point with delayed scaling (Micikevicius et al. 2022, arXiv:2209.05433).

The layers' kernels and their inputs are rounded to e4m3, gradients of their outputs to e5m2; sums are float32. Each
tensor is multiplied by a scale before rounding, which maps the largest magnitude of the last steps to the type's
largest value (the delayed scaling of NVIDIA's Transformer Engine). A linear layer takes its three scales as one more
parameter, `scales`, whose "gradient" is the largest magnitudes of this step: `jax.grad` then carries them out of any
loop or rematerialised block. Differs from Transformer Engine: until a step has been seen, the scale comes from the
tensor's own magnitude; and non-finite values become NaN, for the guard that checks gradients (step.nonfinite: stop or
skip).

Scales that are known beforehand are a row [3]: the operation that computes a tensor also rounds it (docs/gpu.md). Those
that come from the tensor itself are a column [3 1]: it must be read as a whole before it can be rounded. `with_scales`
chooses between the two.

Axis letters: WORKSPACE.md; R rows, I and O a layer's in and out, M steps remembered, 3 = input, kernel, gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, UInt8

from jaxbench import narrow_products

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
TYPES = (FORWARD, FORWARD, BACKWARD)  # input, kernel, output's gradient
KERNEL, SCALES = ".kernel", ".scales"
LARGEST = float(jnp.finfo(jnp.float32).max)  # scale: of magnitudes below 1e-34 it would be infinite, and 0 times it NaN


def names(params: Mapping[str, Any]) -> list[str]:
    """Names of the scales, one for every kernel inside a block; embedding and head are not computed in 8 bits."""
    parts = ((name, name.split(".")) for name in params)
    return [name.removesuffix(KERNEL) + SCALES for name, path in parts if path[-1] == KERNEL[1:] and is_inside(path)]


def is_inside(path: Sequence[Any]) -> bool:
    """True if a path lies inside a block's attention or feed-forward layer."""
    return len(path) > 3 and path[0] == "layers" and path[2] in ("attention", "mlp")


def apply(model: Any) -> Any:
    """Make the linear layers of a decoder's blocks compute in 8 bits, and return it.

    Raises:
      ValueError: projections are fused: their layers would have to share one scale.
    """
    from flax import nnx  # here, because Equinox's step imports this file and has no use for it

    for path, module in nnx.iter_modules(model):
        if getattr(module, "projection_groups", 0):
            raise ValueError(
                f"float8: fused_projections={module.projection_groups} is not supported: every kernel has its own "
                "scale; use fused_projections=false"
            )
        if is_inside((*path, SCALES)) and hasattr(module, "scales"):
            module.scales = nnx.data(nnx.Param(jnp.zeros(len(TYPES), jnp.float32)))
    return model


def init_history(params: Mapping[str, Any], length: int) -> dict[str, Float[Array, "3 M"]]:
    """History of largest magnitudes (amax) before the first step: zeros, nothing seen; M = length in steps."""
    return {name: jnp.zeros((len(TYPES), length), jnp.float32) for name in names(params)}


def scales(history: Mapping[str, Float[Array, "3 M"]], margin: int) -> dict[str, Float[Array, "3"]]:
    """Scales of every tensor: the type's limit / largest magnitude seen / 2 ** margin; 0 where nothing was seen."""
    limits = jnp.array([float(jnp.finfo(dtype).max) for dtype in TYPES], jnp.float32) / 2.0**margin
    peaks = {name: jnp.max(peaks_of_steps, axis=1) for name, peaks_of_steps in history.items()}
    found = {name: limits / jnp.where(peak > 0, peak, 1.0) for name, peak in peaks.items()}
    return {name: jnp.where(peak > 0, jnp.minimum(found[name], LARGEST), 0.0) for name, peak in peaks.items()}


def unscaled(params: Mapping[str, Any]) -> dict[str, Float[Array, "3 1"]]:
    """Scales of 0, so that each tensor's own magnitude sets its scale: for evaluation, which keeps no history."""
    return {name: jnp.zeros((len(TYPES), 1), jnp.float32) for name in names(params)}


def with_scales(gradients: Callable[[dict[str, Array]], Any], scales: Mapping[str, Float[Array, "3"]]) -> Any:
    """Result of gradients(scales), a NamedTuple with a field amax, with a row of scales per layer if all are known.

    Else with a column per layer, in another branch of the program, which the first step takes.
    """

    def own(scales: dict[str, Array]) -> Any:
        found = gradients({name: scale[:, None] for name, scale in scales.items()})
        return found._replace(amax={name: peaks[:, 0] for name, peaks in found.amax.items()})

    is_seen = jnp.all(jnp.stack(list(scales.values())) > 0)
    return lax.cond(is_seen, gradients, own, dict(scales))


def remember(
    history: Mapping[str, Float[Array, "3 M"]], seen: Mapping[str, Float[Array, "3"]]
) -> dict[str, Float[Array, "3 M"]]:
    """History with this step's largest magnitudes prepended and the oldest ones dropped."""
    return {name: jnp.concatenate([seen[name][:, None], old[:, :-1]], axis=1) for name, old in history.items()}


def matmul(
    x: Float[Array, "*rows I"], kernel: Float[Array, "I O"], scales: Float[Array, "3 ..."]
) -> Float[Array, "*rows O"]:
    """Matrix product x @ kernel in 8 bits, as x's dtype; the "gradient" of `scales` is the largest magnitudes seen.

    scales: a row [3], all above 0; or a column [3 1], where 0 = from the tensor's own magnitude.
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return _product(rows, kernel, scales).reshape(*x.shape[:-1], kernel.shape[1])


def quantise(
    x: Float[Array, "*shape"], scale: Float[Array, "..."], dtype: Any
) -> tuple[Float[Array, "*shape"], Float[Array, ""], Float[Array, ""]]:
    """Quantised x * scale, the scale used, and x's largest magnitude.

    Values too large for the type become its largest value, non-finite ones NaN: a step with such gradients ends the
    run, or is skipped without remembering x's magnitude (step.nonfinite).

    scale of shape [1]: 0 = the type's limit / x's largest magnitude.
    """
    limit = float(jnp.finfo(dtype).max)
    wide = narrow_products.as_rounded(x)
    peak = jnp.max(jnp.abs(wide))
    if scale.ndim:
        own = jnp.where(peak > 0, jnp.minimum(limit / jnp.where(peak > 0, peak, 1.0), LARGEST), 1.0)
        scale = jnp.where(scale[0] > 0, scale[0], own)
    inside = jnp.where(jnp.isfinite(wide), jnp.clip(wide * scale, -limit, limit), jnp.nan)
    return inside.astype(dtype), scale, peak


@jax.custom_vjp
def _product(x: Float[Array, "R I"], kernel: Float[Array, "I O"], scales: Float[Array, "3 ..."]) -> Float[Array, "R O"]:
    return _forward(x, kernel, scales)[0]


def _forward(x: Array, kernel: Array, scales: Array) -> tuple[Array, tuple]:
    left, left_scale, left_peak = quantise(x, scales[0], FORWARD)
    right, right_scale, right_peak = quantise(kernel, scales[1], FORWARD)
    product = _dot(left, right, (1, 0)) / (left_scale * right_scale)
    types = (jnp.zeros((), x.dtype), jnp.zeros((), kernel.dtype))
    kept = _bits(left), _bits(right)
    return product.astype(x.dtype), (*kept, (left_scale, right_scale), (left_peak, right_peak), scales[2], types)


def _bits(x: Array) -> UInt8[Array, "..."]:
    """Quantised values as bits, in which the backward pass gets them.

    jax.checkpoint rounds each floating-point value that a policy keeps (reduce_precision), by IEEE 754's rules, for
    which e4m3's exponents from 256 on stand for infinity and NaN: values above 240 would become NaN.
    """
    return lax.bitcast_convert_type(x, jnp.uint8)


def _backward(residuals: tuple, grad: Array) -> tuple[Array, Array, Array]:
    left, right, (left_scale, right_scale), peaks, scale, types = residuals
    left, right = (lax.bitcast_convert_type(x, FORWARD) for x in (left, right))
    grad, grad_scale, grad_peak = quantise(grad, scale, BACKWARD)
    x_grad = _dot(grad, right, (1, 1)) / (grad_scale * right_scale)
    kernel_grad = _dot(left, grad, (0, 0)) / (left_scale * grad_scale)
    return (
        x_grad.astype(types[0].dtype),
        kernel_grad.astype(types[1].dtype),
        jnp.stack([*peaks, grad_peak]).reshape(len(TYPES), *scale.shape),
    )


def _dot(a: Array, b: Array, axes: tuple[int, int]) -> Float[Array, "..."]:
    """Product of two matrices in float32, contracted over one axis of each."""
    return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.float32)


_product.defvjp(_forward, _backward)
