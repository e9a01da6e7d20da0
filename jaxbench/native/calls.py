"""The native kernels as JAX functions: XLA custom calls on packed weights, on CPUs.

Twin: torch_ref/native/calls.py. The handlers are in src/xla.c; XLA's own thread pool runs them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, UInt8, UInt32

from jaxbench import philox
from jaxbench.config import TransformerConfig
from jaxbench.native import formats, library
from jaxbench.native.checkpoint import Settings
from jaxbench.prompts import SamplingParams


def _static() -> Any:
    """Static field of a pytree: programs are compiled for its value."""
    return dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedWeights:
    """A packed matrix on the device."""

    data: UInt8[Array, " bytes"]
    format: str = _static()  # of formats.FORMATS
    inputs: int = _static()
    outputs: int = _static()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockWeights:
    """A layer's arrays as the block call takes them; an array of size 0 means there is none."""

    norms: tuple[Float[Array, " size"], ...]  # scale and bias of attention, mlp and both post-norms; q_norm, k_norm
    matrices: tuple[UInt8[Array, " bytes"], ...]  # in the order of MATRICES
    biases: tuple[Float[Array, " outputs"], ...]
    formats: tuple[str, ...] = _static()


@functools.cache
def register() -> None:
    """Register the library's handlers with XLA.

    Raises:
      NotAvailable: the library is not available here.
    """
    handlers = library.load()
    for name in ("block", "linear", "embed", "norm", "largest", "external", "draw", "product"):
        capsule = jax.ffi.pycapsule(getattr(handlers, f"jaxbench_xla_{name}"))
        jax.ffi.register_ffi_target(f"jaxbench_{name}", capsule, platform="cpu")


def _empty() -> Array:
    return jnp.zeros((0,), jnp.float32)


def linear(
    x: Float[Array, "*rows I"], weights: PackedWeights, bias: Float[Array, " O"] | None, settings: Settings
) -> Float[Array, "*rows O"]:
    """Affine map of the last axis by a packed matrix; x is cast to float32, and the result is float32."""
    register()
    rows = x.reshape(-1, weights.inputs).astype(jnp.float32)
    out = jax.ShapeDtypeStruct((rows.shape[0], weights.outputs), jnp.float32)
    ints = (weights.inputs, weights.outputs, formats.FORMATS.index(weights.format), settings.planes, settings.threads)
    call = jax.ffi.ffi_call("jaxbench_linear", out)
    product = call(
        rows, weights.data, _empty() if bias is None else bias.astype(jnp.float32), ints=np.array(ints, np.int64)
    )
    return product.reshape(*x.shape[:-1], weights.outputs)


def embed(tokens: Int[Array, "..."], weights: PackedWeights) -> Float[Array, "... D"]:
    """Look up rows of a packed embedding, dequantised."""
    register()
    flat = tokens.reshape(-1).astype(jnp.int32)
    ints = np.array((weights.inputs, weights.outputs, formats.FORMATS.index(weights.format)), np.int64)
    out = jax.ShapeDtypeStruct((flat.shape[0], weights.inputs), jnp.float32)
    return jax.ffi.ffi_call("jaxbench_embed", out)(flat, weights.data, ints=ints).reshape(*tokens.shape, weights.inputs)


def norm(
    x: Float[Array, "*rows D"], scale: Float[Array, " D"], bias: Float[Array, " D"] | None, *, eps: float
) -> Float[Array, "*rows D"]:
    """RMSNorm of each row, or LayerNorm if there is a bias: normalised, times scale, plus bias; bit-identical in any
    batch.
    """
    register()
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    call = jax.ffi.ffi_call("jaxbench_norm", jax.ShapeDtypeStruct(rows.shape, jnp.float32))
    return call(rows, scale, _empty() if bias is None else bias, floats=np.array([eps])).reshape(x.shape)


def largest(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Index of each row's largest value, the lowest index of equal ones; the first NaN if there is one."""
    register()
    out = jax.ShapeDtypeStruct(logits.shape[:1], jnp.int32)
    return jax.ffi.ffi_call("jaxbench_largest", out)(logits.astype(jnp.float32))


def draw(
    logits: Float[Array, "B V"],
    sampling: SamplingParams,
    *,
    key: UInt32[Array, "2"],
    step: Int[Array, ""],
    row_ids: Int[Array, " B"],
) -> Int[Array, " B"]:
    """Sample a token per row like jaxbench.sample.draw, with noise only for tokens that can still be the largest."""
    if sampling.temperature == 0.0:
        return largest(logits)
    register()
    out = jax.ShapeDtypeStruct(logits.shape[:1], jnp.int32)
    floats = np.array((sampling.temperature, sampling.top_p, sampling.min_p), np.float64)
    ints = np.array((sampling.top_k, philox.site_id("sample"), 0), np.int64)
    arguments = (logits.astype(jnp.float32), key, jnp.asarray(step, jnp.int32), row_ids.astype(jnp.int32))
    return jax.ffi.ffi_call("jaxbench_draw", out)(*arguments, ints=ints, floats=floats)


def blocks(
    x: Float[Array, "R D"],
    positions: Int[Array, " R"],
    angles: tuple[Array, Array] | None,
    local_angles: tuple[Array, Array] | None,
    layers: Sequence[BlockWeights],
    cache: tuple[tuple[Array, ...], ...],
    table: Int[Array, "R P"],
    configs: Sequence[TransformerConfig],
    settings: Settings,
) -> tuple[Float[Array, "R D"], tuple[tuple[Array, ...], ...]]:
    """Run all layers on tokens, one per row: the residual stream after them, and the pages with the tokens written.

    Args:
      positions: of the tokens; a row at -1 is left unchanged.
      angles: rotary cosine and sine [R, head_dim / 2] of the positions; None with learned positions.
      local_angles: the same for layers whose configuration says is_local.
      cache: keys [pages, K, width, page_size] and values [pages, K, page_size, width] of every layer and, of an 8-bit
        cache, their scales [pages, K, page_size]; the calls write into them where XLA lets them.
      table: page of each row's positions, in order. Rows that are tokens of one text have equal tables.
      configs: of each layer (TransformerConfig.at_layer).

    Raises:
      ValueError: more than library.MAX_ROWS rows, not one position and one line of the table per row, or pages of a
        type that no cache has.
    """
    library.check_rows(x.shape[0], positions.shape[0], table.shape[0], cache[0][0].dtype.name)
    x, positions, table = x.astype(jnp.float32), positions.astype(jnp.int32), table.astype(jnp.int32)
    arrays: tuple[list, ...] = ([], [], [], [])
    for weights, config, *cached in zip(layers, configs, *cache, strict=True):
        used = local_angles if config.is_local else angles
        x, cached = _block(x, positions, used, weights, tuple(cached), table, config, settings)
        for kind, array in zip(arrays, cached, strict=True):
            kind.append(array)
    return x, tuple(map(tuple, arrays))


def _block(
    x: Float[Array, "B D"],
    positions: Int[Array, " B"],
    angles: tuple[Array, Array] | None,
    weights: BlockWeights,
    cached: tuple[Array, Array, Array, Array],
    table: Int[Array, "B P"],
    config: TransformerConfig,
    settings: Settings,
) -> tuple[Float[Array, "B D"], tuple[Array, ...]]:
    """Run one layer: a custom call that writes its tokens into the pages, which are also its results."""
    register()
    ints = (
        config.d_ff, config.num_heads, config.num_kv_heads, config.head_dim, config.sliding_window or 0,
        library.ACTIVATIONS.index(config.activation), settings.planes, settings.threads,
        *(formats.FORMATS.index(format) for format in weights.formats),
    )  # fmt: skip
    floats = (config.norm_eps, config.query_scale / np.sqrt(config.head_dim), config.attention_softcap or 0.0)
    cosine, sine = angles or (_empty(), _empty())
    arguments = (x, positions, table, cosine, sine, *cached, *weights.norms, *weights.matrices, *weights.biases)
    results = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (x, *cached)]
    call = jax.ffi.ffi_call("jaxbench_block", results, input_output_aliases={5 + i: 1 + i for i in range(4)})
    out, *cached = call(*arguments, ints=np.array(ints, np.int64), floats=np.array(floats, np.float64))
    return out, tuple(cached)
