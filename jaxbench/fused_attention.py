"""The platform's fused attention kernel: cuDNN on NVIDIA GPUs, splash attention on TPUs.

Only jaxbench.attention calls this, for implementations "fused", "cudnn" and "splash".
PyTorch's twin path is scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

LANES = 128  # splash attention's tiles: head width and sequence are padded to multiples of this


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K H S"],
    value: Float[Array, "B K S H"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None,
    *,
    sliding_window: int | None,
    mask: Callable[[], Bool[Array, "B T S"]] | None,
    is_causal: bool = True,
    kernel: str,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Attention output of the kernel "cudnn" or "splash"; "fused" selects the one of JAX's default backend.

    positions and segments are the queries'; mask builds the attention mask for the kernel that takes one. None = the
    causal mask (and its window) over rows without padding: cuDNN then reads no mask.
    interpret=True runs splash attention's program on any platform, slowly, for tests.

    Raises:
      ValueError: the platform has no fused kernel; splash attention is requested for a cached call (T != S); or cuDNN
        for types other than bfloat16 and float16, or on a device that is not an NVIDIA GPU.
    """
    platform = jax.default_backend()
    if kernel == "fused":
        kernel = {"gpu": "cudnn", "tpu": "splash"}.get(platform, "none")
    if kernel == "cudnn" and query.dtype.itemsize != 2:
        raise ValueError(
            f"attention: cuDNN's kernel takes bfloat16 and float16, got {query.dtype}: use dense or blocked"
        )
    if kernel == "cudnn":
        key, value = key.transpose(0, 3, 1, 2), value.transpose(0, 2, 1, 3)
        if mask is None:
            window = None if sliding_window is None else (sliding_window - 1, 0)
            how = {"is_causal": True, "local_window_size": window, "implementation": "cudnn"}
            return jax.nn.dot_product_attention(query, key, value, **how)
        return _masked_cudnn(query, key, value, mask())
    if kernel == "splash":
        how = {"is_causal": is_causal, "interpret": interpret}
        return _splash(query, key, value, positions, segments, sliding_window, **how)
    raise ValueError(f"attention: no fused kernel {kernel!r} on platform {platform!r}: use dense or blocked")


def _masked_cudnn(query: Array, key: Array, value: Array, mask: Bool[Array, "B T S"]) -> Array:
    mixed = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None], implementation="cudnn")
    # cuDNN spreads a fully masked row over all keys; here such a row is zero.
    return jnp.where(jnp.any(mask, axis=-1)[:, :, None, None], mixed, jnp.zeros((), mixed.dtype))


def _splash(
    query: Array, key: Array, value: Array, positions: Array, segments: Array | None, sliding_window: int | None, *,
    is_causal: bool, interpret: bool,
) -> Array:  # fmt: skip
    """Run splash attention on whole sequences, in which slots are in order of position."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    batch, length, num_heads, head_dim = query.shape
    if key.shape[3] != length:
        raise ValueError(f"attention: splash attention needs T = S, got T={length} and S={key.shape[3]}: use blocked")
    padded = -(-length // LANES) * LANES
    size = (padded, padded)
    if sliding_window is not None:
        full = splash.LocalMask(size, (sliding_window - 1, 0 if is_causal else None), 0)
    else:
        full = splash.CausalMask(size) if is_causal else splash.FullMask(size)
    kernel = splash.make_splash_mqa_single_device(
        splash.MultiHeadMask([full] * (num_heads // key.shape[1])), interpret=interpret
    )
    segments = jnp.zeros_like(positions) if segments is None else segments
    segments = jnp.where(positions >= 0, segments, -1)
    segments = jnp.pad(segments, ((0, 0), (0, padded - length)), constant_values=-1)
    widths = ((0, 0), (0, 0), (0, padded - length), (0, -head_dim % LANES))
    query = jnp.pad(query.transpose(0, 2, 1, 3) / jnp.sqrt(jnp.asarray(head_dim, query.dtype)), widths)
    grouped = query.reshape(batch, key.shape[1], -1, padded, query.shape[-1])
    key, value = jnp.pad(key.swapaxes(2, 3), widths), jnp.pad(value, widths)

    def one_row(query: Array, key: Array, value: Array, segments: Array) -> Array:
        ids = splash.SegmentIds(q=segments, kv=segments)
        return jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=ids))(query, key, value)

    mixed = jax.vmap(one_row)(grouped, key, value, segments).reshape(query.shape)
    mixed = mixed[:, :, :length, :head_dim].transpose(0, 2, 1, 3)
    return jnp.where(positions[:, :, None, None] >= 0, mixed, jnp.zeros((), mixed.dtype))
