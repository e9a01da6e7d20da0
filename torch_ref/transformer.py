"""The decoder of the Llama, Qwen, Gemma and GPT-2 families in PyTorch.

Twins: jaxbench/transformer.py, jaxbench/eqx/transformer.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from jaxbench import extension, philox, rotary
from jaxbench.config import Compute, TransformerConfig
from torch_ref import functional, nn, remat
from torch_ref.attention import Context, KVCache, Spans, attention


class Attention(torch.nn.Module):
    """Self-attention with grouped heads, normalised queries and keys (Qwen3) and rotary positions.

    Sources: Henry et al. 2020, arXiv:2010.04245 (normalised queries and keys); Yang et al. 2025, arXiv:2505.09388.
    """

    def __init__(self, config: TransformerConfig, compute: Compute):
        super().__init__()
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

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, cached: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Float[Tensor, "B T D"], tuple[Float[Tensor, "E H S"], Float[Tensor, "E S H"]]]:
        """Attention output, and the keys and values attended to: the cached ones with this call's written in."""
        batch, length, _ = x.shape
        projected = nn.project(x, (self.q_proj, self.k_proj, self.v_proj), groups=self.projection_groups)
        query, key, value = (part.reshape(batch, length, -1, self.head_dim) for part in projected)
        query = self._placed(query, self.q_norm, context, scale=self.query_scale)
        key = self._placed(key, self.k_norm, context)
        key = key.transpose(1, 2).reshape(batch * self.num_kv_heads, length, self.head_dim).transpose(1, 2)
        value = value.transpose(1, 2).reshape(batch * self.num_kv_heads, length, self.head_dim)
        filled = None  # slots to attend to, None = all
        if cached is not None:
            key = _write(cached[0], key, context.slot, dim=2)
            value = _write(cached[1], value, context.slot, dim=1)
            filled = None if context.spans.key_positions is not None else context.slot + length
        mixed = attention(
            query,
            key.reshape(batch, self.num_kv_heads, self.head_dim, -1)[..., :filled],
            value.reshape(batch, self.num_kv_heads, -1, self.head_dim)[:, :, :filled],
            context.spans,
            sliding_window=self.sliding_window,
            is_causal=self.is_causal,
            is_ordered=self.is_causal and cached is None,
            implementation=self.implementation,
            block_size=self.block_size,
            softcap=self.softcap,
        )
        return self.o_proj(mixed.reshape(batch, length, -1)), (key, value)

    def queries(self, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T N H"]:
        """Queries of the given tokens, computed as in a full call of the layer."""
        query = self.q_proj(x).reshape(*x.shape[:2], -1, self.head_dim)
        return self._placed(query, self.q_norm, context, scale=self.query_scale)

    def keys_values(
        self, x: Float[Tensor, "B T D"], context: Context
    ) -> tuple[Float[Tensor, "B K H T"], Float[Tensor, "B K T H"]]:
        """Keys and values of the given tokens, computed as in a full call of the layer."""
        key, value = (layer(x).reshape(*x.shape[:2], -1, self.head_dim) for layer in (self.k_proj, self.v_proj))
        return self._placed(key, self.k_norm, context).permute(0, 2, 3, 1), value.transpose(1, 2)

    def _placed(self, part: Tensor, norm: nn.RMSNorm | None, context: Context, scale: float = 1.0) -> Tensor:
        """Normalise queries or keys, rotate them by their positions and scale them."""
        part = part if norm is None else norm(part)
        angles = context.local_angles if self.is_local else context.angles
        part = part if angles is None else functional.rotate(part, *angles)
        return part if scale == 1.0 else functional.times(part, scale)


def _write(cached: Tensor, new: Tensor, slot: Tensor | int, *, dim: int) -> Tensor:
    """Write `new` into the slots from `slot` on: in place, as the JAX program does with its donated cache."""
    if isinstance(slot, int):
        cached.narrow(dim, slot, new.shape[dim]).copy_(new)
        return cached
    index = torch.arange(new.shape[dim], device=new.device) + slot
    return cached.index_copy_(dim, index, new.to(cached.dtype))


class MLP(torch.nn.Module):
    """Feed-forward layer: SwiGLU or GEGLU (Shazeer 2020, arXiv:2002.05202), or GELU; GELU in its tanh form (GPT-2)."""

    def __init__(self, config: TransformerConfig, compute: Compute):
        super().__init__()
        linear = functools.partial(nn.Linear, use_bias=config.use_bias, dtype=compute.dtype)
        self.gate_proj = linear(config.d_model, config.d_ff) if config.is_gated else None
        self.up_proj = linear(config.d_model, config.d_ff)
        self.down_proj = linear(config.d_ff, config.d_model)
        self.activation, self.projection_groups = config.activation, compute.projection_groups

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Feed-forward output of each token."""
        if self.gate_proj is None:
            return self.down_proj(functional.activated(self.up_proj(x), self.activation))
        gate, up = nn.project(x, (self.gate_proj, self.up_proj), groups=self.projection_groups)
        return self.down_proj(functional.activated(gate, self.activation) * up)


class Block(torch.nn.Module):
    """Pre-norm residual block; optional post-norms act on the output of each branch (Gemma 2)."""

    auxiliary_weight = 0.0  # weight, in training, of the loss in the layer's cache entry (KVCache.memory)

    def __init__(self, config: TransformerConfig, compute: Compute):
        super().__init__()
        self.attention_norm = nn.norm(config.norm, config.d_model, eps=config.norm_eps, dtype=compute.dtype)
        self.attention = Attention(config, compute)
        self.mlp_norm = nn.norm(config.norm, config.d_model, eps=config.norm_eps, dtype=compute.dtype)
        self.mlp = MLP(config, compute)
        norm = functools.partial(nn.norm, config.norm, config.d_model, eps=config.norm_eps, dtype=compute.dtype)
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_post_norm = norm() if config.post_norms else None
        self.dropout = config.dropout

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, sites: tuple[int, int], cached: tuple | None = None
    ) -> tuple[Float[Tensor, "B T D"], tuple[Tensor, Tensor]]:
        """Residual stream after the block, and its keys and values; sites: the dropout sites of its two branches."""
        x, cached = self.attend(x, context, sites[0], cached)
        return self.feed(x, context, sites[1]), cached

    def attend(
        self, x: Float[Tensor, "B T D"], context: Context, site: int, cached: tuple | None = None
    ) -> tuple[Float[Tensor, "B T D"], tuple]:
        """Residual stream between the block's two branches, and the layer's cache entry."""
        mixed, cached = self._mix(self.attention_norm(x), context, cached)
        mixed = mixed if self.attention_post_norm is None else self.attention_post_norm(mixed)
        return x + functional.dropout(mixed, self.dropout, context.dropout_stream, site=site), cached

    def feed(self, x: Float[Tensor, "B T D"], context: Context, site: int) -> Float[Tensor, "B T D"]:
        """Residual stream after the block, given the one between its branches."""
        fed = self.mlp(self.mlp_norm(x))
        fed = fed if self.mlp_post_norm is None else self.mlp_post_norm(fed)
        return x + functional.dropout(fed, self.dropout, context.dropout_stream, site=site)

    def _mix(self, x: Float[Tensor, "B T D"], context: Context, cached: tuple | None) -> tuple[Tensor, tuple]:
        """Attention output, and the layer's cache entry."""
        return self.attention(x, context, cached)


class Transformer(torch.nn.Module):
    """Decoder-only language model; its parameters have shapes but no values until `build` loads them.

    scan_layers exists only for the JAX twins: eager PyTorch runs the same loop either way.
    Differs from GPT-2: dropout acts on the two residual branches only, so that fused attention kernels stay usable.
    """

    def __init__(self, config: TransformerConfig, compute: Compute, make_layer: Callable[..., Block] | None = None):
        super().__init__()
        kind, d_model, dtype = config.layer_kind, config.d_model, compute.dtype
        if kind is not None and make_layer is None:
            raise ValueError(f"transformer: layers of kind {kind!r} need a make_layer, got {make_layer}")
        if kind is not None and compute.scan_layers:
            raise ValueError(f"transformer: scan_layers=True needs layers that are alike, got some of kind {kind!r}")
        if compute.torch_compile not in ("", "layers", "step") or (kind is not None and compute.torch_compile):
            wanted = "'', 'layers' or 'step', and layers that are alike"
            raise ValueError(
                f"transformer: torch_compile={compute.torch_compile!r} and layers of kind {kind!r}, wanted {wanted}"
            )
        if config.global_every is not None and compute.scan_layers:
            raise ValueError(
                f"transformer: scan_layers=True needs layers that are alike, got global_every={config.global_every}"
            )
        self.embed = nn.Embed(config.vocab_size, d_model, dtype=dtype, scale=config.embedding_scale)
        self.position = nn.Embed(config.max_seq_len, d_model, dtype=dtype) if config.position == "learned" else None
        layers = [
            Block(config.at_layer(i), compute) if make_layer is None else make_layer(config.at_layer(i), i, compute)
            for i in range(config.num_layers)
        ]
        self.layers = torch.nn.ModuleList(layers)
        for layer in self.layers if compute.torch_compile else ():
            layer.compile(dynamic=False)
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
        self.torch_compile = compute.torch_compile
        self.auxiliary_weight = max(layer.auxiliary_weight for layer in layers)  # layers with a loss share one weight
        self.remat_group = 0  # blocks recomputed together in the backward pass, 0 = none; see remat.py
        self.remat_names, self.remat_offloads = (), False

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"] | None,
        *,
        segments: Int[Tensor, "B T"] | None = None,
        dropout: functional.DropoutStream | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Next-token logits of every position.

        Position -1 is padding; positions increase along a row within each segment. None = 0, 1, ... in every row (see
        `features`).
        """
        hidden, _ = self.features(tokens, positions, segments=segments, dropout=dropout)
        return self.logits(hidden)

    def features(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"] | None,
        *,
        cache: KVCache | None = None,
        slot: Tensor | int | None = None,
        segments: Int[Tensor, "B T"] | None = None,
        dropout: functional.DropoutStream | None = None,
        vectors: Float[Tensor, "M D"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], KVCache]:
        """Hidden states after the final norm, and the cache: the keys and values attended to.

        With a cache, the call's tokens are written into its slots from `slot` on (in place) and attend to all of it.
        Token id vocab_size + m stands for a vector: its embedding is vectors[m].

        Without positions, each row is one document without padding. A cache of such rows continues from `slot`, a
        Python number, and all slots before it are filled. Attention kernels then need no mask and read no empty slot.
        Differs from the twin, whose cache always has positions: XLA builds the mask inside its programs.

        Raises:
          ValueError: only one of the call and the cache has positions; a cache without positions gets a `slot` that is
            not a Python number; segments are given without positions or with a cache; or the tokens do not fit from a
            `slot` that is a Python number.
        """
        if positions is None:
            positions, key_positions = self._plain_positions(tokens, cache, slot, segments), None
        elif cache is None:
            key_positions = positions
        elif cache.positions is None:
            raise ValueError(f"features: positions {tuple(positions.shape)} for a cache of rows without positions")
        else:
            cache.check_room(slot, tokens.shape[1], segments)
            key_positions = _write(cache.positions, positions, slot, dim=1)
        spans = Spans(positions, key_positions, segments, segments)
        hidden, context = self.begin(tokens, spans, slot=slot, dropout=dropout, vectors=vectors)
        cached = [None] * len(self.layers) if cache is None else extension.by_layer(cache)
        layers, sites = list(self.layers), philox.dropout_sites(len(self.layers))
        if self.remat_group and cache is None:
            how = {"group": self.remat_group, "names": self.remat_names, "offload": self.remat_offloads}
            hidden, cached = remat.run_blocks(layers, sites, hidden, context, **how)
        else:
            for i, (layer, site) in enumerate(zip(layers, sites)):
                hidden, cached[i] = layer(hidden, context, site, cached[i])
        keys, values, *memory = extension.by_kind(cached)
        return self.final_norm(hidden), KVCache(keys, values, key_positions, *memory)

    def begin(
        self,
        tokens: Int[Tensor, "B T"],
        spans: Spans,
        *,
        slot: Tensor | int | None = None,
        dropout: functional.DropoutStream | None = None,
        vectors: Float[Tensor, "M D"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Context]:
        """Residual stream before the first block, and the context that all blocks share; vectors: see `features`."""
        positions, angles, local_angles = spans.query_positions, None, None
        hidden = functional.with_vectors(self.embed, tokens, vectors, size=self.vocab_size)
        if self.position is None:
            angles = functional.rotary_angles(positions, self.frequencies, dtype=self.dtype)
        if self.local_frequencies is not None:
            local_angles = functional.rotary_angles(positions, self.local_frequencies, dtype=self.dtype)
        if self.position is not None:
            hidden = hidden + self.position(torch.clamp(positions, min=0))
        return hidden, Context(spans, angles, slot, dropout, local_angles)

    def _plain_positions(
        self, tokens: Int[Tensor, "B T"], cache: KVCache | None, slot: Tensor | int | None, segments: Tensor | None
    ) -> Int[Tensor, "B T"]:
        """Positions of a call without padding: from `slot` on."""
        if segments is not None or (cache is not None and (cache.positions is not None or not isinstance(slot, int))):
            raise ValueError(
                f"features: no positions with segments={segments is not None}, slot={slot!r} and a cache with "
                f"positions={cache is not None and cache.positions is not None}; wanted no segments, a cache without "
                "positions and a slot that is a number"
            )
        if cache is not None:
            cache.check_room(slot, tokens.shape[1], segments)
        first = 0 if cache is None else slot
        index = torch.arange(first, first + tokens.shape[1], dtype=torch.int32, device=tokens.device)
        return index[None].expand(tokens.shape[0], -1)

    def logits(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Logits of hidden states, by the head or the tied embedding."""
        logits = self.embed.attend(hidden) if self.head is None else self.head(hidden)
        return logits if self.logit_softcap is None else functional.softcap(logits, cap=self.logit_softcap)


def build(
    config: TransformerConfig,
    params: Mapping[str, np.ndarray],
    *,
    make_layer: Callable[..., Block] | None = None,
    device: str = "cpu",
    **compute: Any,
) -> Transformer:
    """Build the decoder of a configuration and load `params`, on a device; see jaxbench.transformer.build."""
    with torch.device("meta"):
        model = Transformer(config, Compute(**compute), make_layer)
    return nn.load_params(model, params, device=device)
