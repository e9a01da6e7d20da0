"""The decoder of the Llama, Qwen, Gemma and GPT-2 families in Equinox.

Twins: jaxbench/transformer.py, torch_ref/transformer.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from jaxbench import extension, functional, libtpu, philox, rotary
from jaxbench.attention import Context, KVCache, Spans, attention
from jaxbench.config import Compute, TransformerConfig
from jaxbench.eqx import nn


class Attention(eqx.Module):
    """Self-attention with grouped heads, normalised queries and keys (Qwen3) and rotary positions.

    Sources: Henry et al. 2020, arXiv:2010.04245 (normalised queries and keys); Yang et al. 2025, arXiv:2505.09388.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    q_norm: nn.RMSNorm | None
    k_norm: nn.RMSNorm | None
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    sliding_window: int | None = eqx.field(static=True)
    implementation: str = eqx.field(static=True)
    block_size: int = eqx.field(static=True)
    projection_groups: int = eqx.field(static=True)
    query_scale: float = eqx.field(static=True)
    softcap: float | None = eqx.field(static=True)
    is_local: bool = eqx.field(static=True)
    is_causal: bool = eqx.field(static=True)

    def __init__(self, config: TransformerConfig, compute: Compute):
        query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        linear = functools.partial(nn.Linear, use_bias=config.use_bias or config.qkv_bias, dtype=compute.dtype)
        self.q_proj = linear(config.d_model, query_width)
        self.k_proj = linear(config.d_model, kv_width)
        self.v_proj = linear(config.d_model, kv_width)
        self.o_proj = linear(query_width, config.d_model, use_bias=config.use_bias)
        norm = functools.partial(nn.RMSNorm, config.head_dim, eps=config.norm_eps, dtype=compute.dtype)
        self.q_norm = norm() if config.qk_norm else None
        self.k_norm = norm() if config.qk_norm else None
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.sliding_window, self.implementation = config.sliding_window, compute.implementation
        self.block_size, self.projection_groups = compute.block_size, compute.projection_groups
        self.query_scale, self.softcap = config.query_scale, config.attention_softcap
        self.is_local, self.is_causal = config.is_local, config.is_causal

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cached: tuple[Array, Array] | None = None
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "E H S"], Float[Array, "E S H"]]]:
        """Attention output, and the keys and values attended to: the cached ones with this call's written in."""
        batch, length, _ = x.shape
        projected = nn.project(x, (self.q_proj, self.k_proj, self.v_proj), groups=self.projection_groups)
        query, key, value = (part.reshape(batch, length, -1, self.head_dim) for part in projected)
        query = self._placed(query, self.q_norm, context, scale=self.query_scale)
        key = self._placed(key, self.k_norm, context)
        key = key.transpose(0, 2, 3, 1).reshape(batch * self.num_kv_heads, self.head_dim, length)
        value = value.transpose(0, 2, 1, 3).reshape(batch * self.num_kv_heads, length, self.head_dim)
        if cached is not None:
            key = lax.dynamic_update_slice_in_dim(cached[0], key.astype(cached[0].dtype), context.slot, axis=2)
            value = lax.dynamic_update_slice_in_dim(cached[1], value.astype(cached[1].dtype), context.slot, axis=1)
        mixed = attention(
            query,
            key.reshape(batch, self.num_kv_heads, self.head_dim, -1),
            value.reshape(batch, self.num_kv_heads, -1, self.head_dim),
            context.spans,
            sliding_window=self.sliding_window,
            is_causal=self.is_causal,
            is_ordered=self.is_causal and cached is None,
            implementation=self.implementation,
            block_size=self.block_size,
            softcap=self.softcap,
        )
        return self.o_proj(mixed.reshape(batch, length, -1)), (key, value)

    def queries(self, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T N H"]:
        """Queries of the given tokens, computed as in a full call of the layer."""
        query = self.q_proj(x).reshape(*x.shape[:2], -1, self.head_dim)
        return self._placed(query, self.q_norm, context, scale=self.query_scale)

    def keys_values(
        self, x: Float[Array, "B T D"], context: Context
    ) -> tuple[Float[Array, "B K H T"], Float[Array, "B K T H"]]:
        """Keys and values of the given tokens, computed as in a full call of the layer."""
        key, value = (layer(x).reshape(*x.shape[:2], -1, self.head_dim) for layer in (self.k_proj, self.v_proj))
        return self._placed(key, self.k_norm, context).transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)

    def _placed(self, part: Array, norm: nn.RMSNorm | None, context: Context, scale: float = 1.0) -> Array:
        """Normalise queries or keys, rotate them by their positions and scale them."""
        part = part if norm is None else norm(part)
        angles = context.local_angles if self.is_local else context.angles
        part = part if angles is None else functional.rotate(part, *angles)
        return part if scale == 1.0 else functional.times(part, scale)


class MLP(eqx.Module):
    """Feed-forward layer: SwiGLU or GEGLU (Shazeer 2020, arXiv:2002.05202), or GELU; GELU in its tanh form (GPT-2)."""

    gate_proj: nn.Linear | None
    up_proj: nn.Linear
    down_proj: nn.Linear
    activation: str = eqx.field(static=True)
    projection_groups: int = eqx.field(static=True)

    def __init__(self, config: TransformerConfig, compute: Compute):
        linear = functools.partial(nn.Linear, use_bias=config.use_bias, dtype=compute.dtype)
        self.gate_proj = linear(config.d_model, config.d_ff) if config.is_gated else None
        self.up_proj = linear(config.d_model, config.d_ff)
        self.down_proj = linear(config.d_ff, config.d_model)
        self.activation, self.projection_groups = config.activation, compute.projection_groups

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Feed-forward output of each token."""
        if self.gate_proj is None:
            return self.down_proj(functional.activated(self.up_proj(x), self.activation))
        gate, up = nn.project(x, (self.gate_proj, self.up_proj), groups=self.projection_groups)
        return self.down_proj(functional.activated(gate, self.activation) * up)


class Block(eqx.Module):
    """Pre-norm residual block; optional post-norms act on the output of each branch (Gemma 2)."""

    attention_norm: nn.RMSNorm | nn.LayerNorm
    attention: Attention
    mlp_norm: nn.RMSNorm | nn.LayerNorm
    mlp: MLP
    attention_post_norm: nn.RMSNorm | nn.LayerNorm | None
    mlp_post_norm: nn.RMSNorm | nn.LayerNorm | None
    dropout: float = eqx.field(static=True)

    def __init__(self, config: TransformerConfig, compute: Compute):
        self.attention_norm = nn.norm(config.norm, config.d_model, eps=config.norm_eps, dtype=compute.dtype)
        self.attention = Attention(config, compute)
        self.mlp_norm = nn.norm(config.norm, config.d_model, eps=config.norm_eps, dtype=compute.dtype)
        self.mlp = MLP(config, compute)
        norm = functools.partial(nn.norm, config.norm, config.d_model, eps=config.norm_eps, dtype=compute.dtype)
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_post_norm = norm() if config.post_norms else None
        self.dropout = config.dropout

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        sites: tuple[int | Array, int | Array],
        cached: tuple | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[Array, Array]]:
        """Residual stream after the block, and its keys and values; sites: the dropout sites of its two branches."""
        x, cached = self.attend(x, context, sites[0], cached)
        return self.feed(x, context, sites[1]), cached

    def attend(
        self, x: Float[Array, "B T D"], context: Context, site: int | Array, cached: tuple | None = None
    ) -> tuple[Float[Array, "B T D"], tuple]:
        """Residual stream between the block's two branches, and the layer's cache entry."""
        mixed, cached = self.attention(self.attention_norm(x), context, cached)
        mixed = mixed if self.attention_post_norm is None else self.attention_post_norm(mixed)
        return x + functional.dropout(mixed, self.dropout, context.dropout_stream, site=site), cached

    def feed(self, x: Float[Array, "B T D"], context: Context, site: int | Array) -> Float[Array, "B T D"]:
        """Residual stream after the block, given the one between its branches."""
        fed = self.mlp(self.mlp_norm(x))
        fed = fed if self.mlp_post_norm is None else self.mlp_post_norm(fed)
        return x + functional.dropout(fed, self.dropout, context.dropout_stream, site=site)


class Transformer(eqx.Module):
    """Decoder-only language model; its parameters have shapes but no values until `build` loads them.

    Differs from GPT-2: dropout acts on the two residual branches only, so that fused attention kernels stay usable.
    """

    embed: nn.Embed
    position: nn.Embed | None
    layers: list[Block]
    final_norm: nn.RMSNorm | nn.LayerNorm
    head: nn.Linear | None
    frequencies: tuple[float, ...] | None = eqx.field(static=True)
    local_frequencies: tuple[float, ...] | None = eqx.field(static=True)
    logit_softcap: float | None = eqx.field(static=True)
    dtype: str = eqx.field(static=True)
    scan_layers: bool = eqx.field(static=True)
    max_seq_len: int = eqx.field(static=True)
    vocab_size: int = eqx.field(static=True)
    is_causal: bool = eqx.field(static=True)
    is_fused: bool = eqx.field(static=True)
    auxiliary_weight: float = eqx.field(static=True)

    def __init__(self, config: TransformerConfig, compute: Compute, make_layer: Callable[..., Block] | None = None):
        if config.layer_kind is not None:
            raise ValueError(f"transformer: the Equinox twin has no layers of kind {config.layer_kind!r}")
        d_model, dtype = config.d_model, compute.dtype
        if config.global_every is not None and compute.scan_layers:
            raise ValueError(
                f"transformer: scan_layers=True needs layers that are alike, got global_every={config.global_every}"
            )
        self.embed = nn.Embed(config.vocab_size, d_model, dtype=dtype, scale=config.embedding_scale)
        self.position = nn.Embed(config.max_seq_len, d_model, dtype=dtype) if config.position == "learned" else None
        self.layers = [
            Block(config.at_layer(i), compute) if make_layer is None else make_layer(config.at_layer(i), i, compute)
            for i in range(config.num_layers)
        ]
        self.final_norm = nn.norm(config.norm, d_model, eps=config.norm_eps, dtype=dtype)
        head = functools.partial(nn.Linear, d_model, config.vocab_size, use_bias=False, dtype=dtype)
        self.head = None if config.tie_embeddings else head()
        self.frequencies = self.local_frequencies = None
        if config.position == "rotary":
            self.frequencies = rotary.frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        if config.local_rope_theta is not None:
            self.local_frequencies = rotary.frequencies(config.head_dim, config.local_rope_theta, None)
        self.logit_softcap = config.logit_softcap
        self.dtype, self.scan_layers, self.max_seq_len = str(dtype), compute.scan_layers, config.max_seq_len
        self.vocab_size, self.is_causal = config.vocab_size, config.is_causal
        # If True, sample.py passes prompts without positions, so that the kernel reads no mask.
        self.is_fused = compute.implementation not in ("dense", "blocked")
        self.auxiliary_weight = 0.0  # read by train.loss_fn: no layer here has an auxiliary loss

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None,
        *,
        segments: Int[Array, "B T"] | None = None,
        dropout: functional.DropoutStream | None = None,
    ) -> Float[Array, "B T V"]:
        """Next-token logits of every position.

        Position -1 is padding; positions increase along a row within each segment. None = 0, 1, ... in every row (see
        `features`).
        """
        hidden, _ = self.features(tokens, positions, segments=segments, dropout=dropout)
        return self.logits(hidden)

    def features(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None,
        *,
        cache: KVCache | None = None,
        slot: Int[Array, ""] | int | None = None,
        segments: Int[Array, "B T"] | None = None,
        dropout: functional.DropoutStream | None = None,
        vectors: Float[Array, "M D"] | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Hidden states after the final norm, and the cache: the keys and values attended to.

        With a cache, the call's tokens are written into its slots from `slot` on and attend to all of it. Token id
        vocab_size + m stands for a vector: its embedding is vectors[m].

        Without positions, each row is one document without padding: a fused kernel then reads no mask.

        Raises:
          ValueError: a cache or segments are given without positions; segments are given with a cache; or the tokens
            do not fit from a `slot` that is a Python number. XLA clamps a traced one that is too large.
        """
        if is_plain := positions is None:
            if cache is not None or segments is not None:
                given = f"cache={cache is not None}, segments={segments is not None}"
                raise ValueError(f"features: no positions with {given}; wanted neither")
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        key_positions = positions
        if cache is not None:
            cache.check_room(slot, tokens.shape[1], segments)
            key_positions = lax.dynamic_update_slice_in_dim(cache.positions, positions, slot, axis=1)
        spans = Spans(positions, None if is_plain else key_positions, segments, segments)
        hidden, context = self.begin(tokens, spans, slot=slot, dropout=dropout, vectors=vectors)
        run = self._scan if self.scan_layers else self._unroll
        hidden, keys, values = run(hidden, context, cache)
        return self.final_norm(hidden), KVCache(keys, values, key_positions)

    def begin(
        self,
        tokens: Int[Array, "B T"],
        spans: Spans,
        *,
        slot: Int[Array, ""] | int | None = None,
        dropout: functional.DropoutStream | None = None,
        vectors: Float[Array, "M D"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Context]:
        """Residual stream before the first block, and the context that all blocks share; vectors: see `features`."""
        positions, angles, local_angles = spans.query_positions, None, None
        hidden = functional.with_vectors(self.embed, tokens, vectors, size=self.vocab_size)
        if self.position is None:
            angles = functional.rotary_angles(positions, self.frequencies, dtype=self.dtype)
        if self.local_frequencies is not None:
            local_angles = functional.rotary_angles(positions, self.local_frequencies, dtype=self.dtype)
        if self.position is not None:
            hidden = hidden + self.position(jnp.maximum(positions, 0))
        return hidden, Context(spans, angles, slot, dropout, local_angles)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of hidden states, by the head or the tied embedding."""
        logits = self.embed.attend(hidden) if self.head is None else self.head(hidden)
        return logits if self.logit_softcap is None else functional.softcap(logits, cap=self.logit_softcap)

    def _unroll(self, hidden: Array, context: Context, cache: KVCache | None) -> tuple[Array, tuple, tuple]:
        cached = [None] * len(self.layers) if cache is None else extension.by_layer(cache)
        for i, (layer, sites) in enumerate(zip(self.layers, philox.dropout_sites(len(self.layers)))):
            hidden, cached[i] = layer(hidden, context, sites, cached[i])
        return hidden, *extension.by_kind(cached)

    def _scan(self, hidden: Array, context: Context, cache: KVCache | None) -> tuple[Array, tuple, tuple]:
        """Run one compiled body over the stacked layers: compile time no longer grows with depth."""
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *self.layers)
        sites = jnp.array(philox.dropout_sites(len(self.layers)), jnp.uint32)
        cached = None if cache is None else (jnp.stack(cache.keys), jnp.stack(cache.values))

        def body(hidden, xs):
            layer, sites, cached = xs
            return layer(hidden, context, (sites[0], sites[1]), cached)

        hidden, (keys, values) = lax.scan(body, hidden, (stacked, sites, cached))
        return hidden, tuple(keys), tuple(values)


def build(
    config: TransformerConfig,
    params: Mapping[str, np.ndarray],
    *,
    make_layer: Callable[..., Block] | None = None,
    **compute: Any,
) -> Transformer:
    """Build the decoder of a configuration and load `params`; see jaxbench.transformer.build.

    Layers cache only keys and values.

    Raises:
      ValueError: as there; or the configuration has layers that this twin lacks.
    """
    libtpu.leave_out_if_absent()
    model = eqx.filter_eval_shape(lambda: Transformer(config, Compute(**compute), make_layer))
    return nn.load_params(model, params)
