"""The decoder of the Llama, Qwen3 and GPT-2 families in PyTorch.

Twins: jaxbench/transformer.py, jaxbench/eqx/transformer.py.

Data's way through one call: tokens [B T] -> embed -> blocks (norm, attention, norm, MLP; residual) -> norm -> logits.
Keys and values of the call come back as a KVCache; padded and handed in again, the next tokens continue from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from jaxbench import philox, rotary
from jaxbench.config import RotaryScaling, TransformerConfig
from torch_ref import functional, nn
from torch_ref.attention import attention


class KVCache(NamedTuple):
    """Keys and values by layer. A slot holds the token at `positions` of its row; -1 marks an empty slot.

    E = B * K, rows' heads side by side: the products of decoding then read the cache where it lies
    (docs/xla_cpu.md, rule 4).
    """

    keys: tuple[Float[Tensor, "E H S"] | None, ...]  # None = the layer keeps none
    values: tuple[Float[Tensor, "E S H"] | None, ...]
    positions: Int[Tensor, "B S"]
    memory: tuple[Any, ...] = ()  # what each layer keeps besides, with its auxiliary `loss`; None: nothing

    def padded(self, length: int, *, dtype: str) -> KVCache:
        """Return the cache with empty slots appended, `length` slots in all, its keys and values kept as dtype."""
        extra = length - self.positions.shape[1]

        def pad(x: Tensor | None, *widths: int) -> Tensor | None:
            return None if x is None else F.pad(x.to(getattr(torch, dtype)), widths)

        keys = tuple(pad(key, 0, extra) for key in self.keys)
        values = tuple(pad(value, 0, 0, 0, extra) for value in self.values)
        return KVCache(keys, values, F.pad(self.positions, (0, extra), value=-1), self.memory)


class Context(NamedTuple):
    """What all layers of one call share."""

    query_positions: Int[Tensor, "B T"]
    key_positions: Int[Tensor, "B S"]
    query_segments: Int[Tensor, "B T"] | None
    key_segments: Int[Tensor, "B S"] | None
    angles: tuple[Float[Tensor, "B T h"], Float[Tensor, "B T h"]] | None  # cosine, sine; None with learned positions
    slot: Tensor | int | None  # where the call's first key goes in the cache; None without a cache
    dropout: tuple[Tensor, Tensor | int] | None  # Philox key, step; None = no dropout


class Attention(torch.nn.Module):
    """Causal self-attention with grouped heads, normalised queries and keys (Qwen3) and rotary positions.

    Sources: Henry et al. 2020, arXiv:2010.04245 (normalised queries and keys); Yang et al. 2025, arXiv:2505.09388.
    """

    def __init__(self, d_model: int, num_heads: int, num_kv_heads: int, *, head_dim: int, qk_norm: bool,
                 norm_eps: float, use_bias: bool, dtype: str, sliding_window: int | None, implementation: str,
                 block_size: int, projection_groups: int):  # fmt: skip
        super().__init__()
        query_width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = nn.Linear(d_model, query_width, use_bias=use_bias, dtype=dtype)
        self.k_proj = nn.Linear(d_model, kv_width, use_bias=use_bias, dtype=dtype)
        self.v_proj = nn.Linear(d_model, kv_width, use_bias=use_bias, dtype=dtype)
        self.o_proj = nn.Linear(query_width, d_model, use_bias=use_bias, dtype=dtype)
        self.q_norm = nn.RMSNorm(head_dim, eps=norm_eps, dtype=dtype) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, eps=norm_eps, dtype=dtype) if qk_norm else None
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.sliding_window, self.implementation, self.block_size = sliding_window, implementation, block_size
        self.projection_groups = projection_groups

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, cached: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Float[Tensor, "B T D"], tuple[Float[Tensor, "E H S"], Float[Tensor, "E S H"]]]:
        """Return the mixed values and the keys and values attended to, cached ones with this call's written in."""
        batch, length, _ = x.shape
        projected = nn.project(x, (self.q_proj, self.k_proj, self.v_proj), groups=self.projection_groups)
        query, key, value = (part.reshape(batch, length, -1, self.head_dim) for part in projected)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if context.angles is not None:
            query, key = functional.rotate(query, *context.angles), functional.rotate(key, *context.angles)
        key = key.permute(0, 2, 3, 1).reshape(batch * self.num_kv_heads, self.head_dim, length)
        value = value.permute(0, 2, 1, 3).reshape(batch * self.num_kv_heads, length, self.head_dim)
        if cached is not None:
            key = _write(cached[0], key, context.slot, dim=2)
            value = _write(cached[1], value, context.slot, dim=1)
        mixed = attention(
            query,
            key.reshape(batch, self.num_kv_heads, self.head_dim, -1),
            value.reshape(batch, self.num_kv_heads, -1, self.head_dim),
            query_positions=context.query_positions,
            key_positions=context.key_positions,
            query_segments=context.query_segments,
            key_segments=context.key_segments,
            sliding_window=self.sliding_window,
            is_ordered=cached is None,
            implementation=self.implementation,
            block_size=self.block_size,
        )
        return self.o_proj(mixed.reshape(batch, length, -1)), (key, value)


def _write(cached: Tensor, new: Tensor, slot: Tensor | int, *, dim: int) -> Tensor:
    """Write `new` into the slots from `slot` on: in place, as the JAX program does with its donated cache."""
    index = torch.arange(new.shape[dim], device=new.device) + slot
    return cached.index_copy_(dim, index, new.to(cached.dtype))


class MLP(torch.nn.Module):
    """Feed-forward layer: SwiGLU (Shazeer 2020, arXiv:2002.05202) or GELU's tanh form (GPT-2)."""

    def __init__(self, d_model: int, d_ff: int, *, activation: str, use_bias: bool, dtype: str,
                 projection_groups: int):  # fmt: skip
        super().__init__()
        is_gated = activation == "swiglu"
        self.gate_proj = nn.Linear(d_model, d_ff, use_bias=use_bias, dtype=dtype) if is_gated else None
        self.up_proj = nn.Linear(d_model, d_ff, use_bias=use_bias, dtype=dtype)
        self.down_proj = nn.Linear(d_ff, d_model, use_bias=use_bias, dtype=dtype)
        self.projection_groups = projection_groups

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Return the transformed rows."""
        if self.gate_proj is None:
            return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))
        gate, up = nn.project(x, (self.gate_proj, self.up_proj), groups=self.projection_groups)
        return self.down_proj(F.silu(gate) * up)


class Block(torch.nn.Module):
    """Pre-norm residual block."""

    auxiliary_weight = 0.0  # in training, of the loss that the layer's cache entry carries (KVCache.memory)

    def __init__(self, d_model: int, *, d_ff: int, norm: str, norm_eps: float, activation: str, qk_norm: bool,
                 use_bias: bool, dropout: float, dtype: str, num_heads: int, num_kv_heads: int, head_dim: int,
                 sliding_window: int | None, implementation: str, block_size: int, projection_groups: int):  # fmt: skip
        super().__init__()
        self.attention_norm = nn.norm(norm, d_model, eps=norm_eps, dtype=dtype)
        self.attention = Attention(
            d_model, num_heads, num_kv_heads, head_dim=head_dim, qk_norm=qk_norm, norm_eps=norm_eps, use_bias=use_bias,
            dtype=dtype, sliding_window=sliding_window, implementation=implementation, block_size=block_size,
            projection_groups=projection_groups,
        )  # fmt: skip
        self.mlp_norm = nn.norm(norm, d_model, eps=norm_eps, dtype=dtype)
        self.mlp = MLP(d_model, d_ff, activation=activation, use_bias=use_bias, dtype=dtype,
                       projection_groups=projection_groups)  # fmt: skip
        self.dropout = dropout

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, sites: tuple[int, int], cached: tuple | None = None
    ) -> tuple[Float[Tensor, "B T D"], tuple[Tensor, Tensor]]:
        """Return the block's output and its keys and values; sites are the dropout sites of its two branches."""
        mixed, cached = self._mix(self.attention_norm(x), context, cached)
        x = x + self._drop(mixed, context, sites[0])
        x = x + self._drop(self.mlp(self.mlp_norm(x)), context, sites[1])
        return x, cached

    def _mix(self, x: Float[Tensor, "B T D"], context: Context, cached: tuple | None) -> tuple[Tensor, tuple]:
        """Return what tokens get from each other, and what the layer caches."""
        return self.attention(x, context, cached)

    def _drop(self, x: Tensor, context: Context, site: int) -> Tensor:
        if context.dropout is None or self.dropout == 0.0:
            return x
        key, step = context.dropout
        return functional.dropout(x, self.dropout, key=key, step=step, site=site)


class Transformer(torch.nn.Module):
    """Decoder-only language model; the arguments are TransformerConfig's fields plus how to compute.

    scan_layers exists for the JAX twins' sake: eager PyTorch runs the same loop either way.
    Differs from GPT-2: dropout acts on the two residual branches only, so that fused attention kernels stay usable.
    """

    def __init__(self, *, vocab_size: int, d_model: int, d_ff: int, num_layers: int, num_heads: int,
                 num_kv_heads: int, head_dim: int, max_seq_len: int, norm: str, norm_eps: float, activation: str,
                 position: str, rope_theta: float, rope_scaling: RotaryScaling | None, qk_norm: bool,
                 use_bias: bool, tie_embeddings: bool, sliding_window: int | None, dropout: float, dtype: str,
                 implementation: str = "dense", block_size: int = 128, scan_layers: bool = False,
                 projection_groups: int = 0, make_layer: Callable[..., Block] | None = None):  # fmt: skip
        super().__init__()
        self.embed = nn.Embed(vocab_size, d_model, dtype=dtype)
        self.position = nn.Embed(max_seq_len, d_model, dtype=dtype) if position == "learned" else None
        parts = dict(
            d_model=d_model, d_ff=d_ff, norm=norm, norm_eps=norm_eps, activation=activation, qk_norm=qk_norm,
            use_bias=use_bias, dropout=dropout, dtype=dtype, num_heads=num_heads, num_kv_heads=num_kv_heads,
            head_dim=head_dim, sliding_window=sliding_window, implementation=implementation, block_size=block_size,
            projection_groups=projection_groups,
        )  # fmt: skip
        layers = [Block(**parts) if make_layer is None else make_layer(i, **parts) for i in range(num_layers)]
        self.layers = torch.nn.ModuleList(layers)
        self.final_norm = nn.norm(norm, d_model, eps=norm_eps, dtype=dtype)
        self.head = None if tie_embeddings else nn.Linear(d_model, vocab_size, use_bias=False, dtype=dtype)
        is_rotary = position == "rotary"
        self.frequencies = rotary.frequencies(head_dim, rope_theta, rope_scaling) if is_rotary else None
        self.dtype, self.scan_layers, self.max_seq_len = str(dtype), scan_layers, max_seq_len
        self.auxiliary_weight = max(layer.auxiliary_weight for layer in layers)  # those with a loss share one weight

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
        *,
        segments: Int[Tensor, "B T"] | None = None,
        dropout: tuple[Tensor, Tensor | int] | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Return next-token logits of every position; dropout is (Philox key, step).

        Position -1 is padding; positions rise along a row, within each segment.
        """
        hidden, _ = self.features(tokens, positions, segments=segments, dropout=dropout)
        return self.logits(hidden)

    def features(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
        *,
        cache: KVCache | None = None,
        slot: Tensor | int | None = None,
        segments: Int[Tensor, "B T"] | None = None,
        dropout: tuple[Tensor, Tensor | int] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], KVCache]:
        """Return hidden states after the final norm, and the keys and values attended to.

        With a cache, the call's tokens are written into its slots from `slot` on (in place) and attend to all of it.
        """
        key_positions = positions
        if cache is not None:
            key_positions = _write(cache.positions, positions, slot, dim=1)
        angles = None
        hidden = self.embed(tokens)
        if self.position is None:
            angles = functional.rotary_angles(positions, self.frequencies, dtype=self.dtype)
        else:
            hidden = hidden + self.position(torch.clamp(positions, min=0))
        context = Context(positions, key_positions, segments, segments, angles, slot, dropout)
        cached = [None] * len(self.layers) if cache is None else _by_layer(cache)
        for i, (layer, sites) in enumerate(zip(self.layers, self._sites())):
            hidden, cached[i] = layer(hidden, context, sites, cached[i])
        keys, values, *memory = _by_kind(cached)
        return self.final_norm(hidden), KVCache(keys, values, key_positions, *memory)

    def logits(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Return the vocabulary scores of hidden states."""
        return self.embed.attend(hidden) if self.head is None else self.head(hidden)

    def _sites(self) -> list[tuple[int, int]]:
        branches = ("attention", "mlp")
        return [
            tuple(philox.site_id(f"layers.{i}.{branch}.dropout") for branch in branches)
            for i in range(len(self.layers))
        ]


def _by_layer(cache: KVCache) -> list[tuple]:
    """Return what each layer cached."""
    return list(zip(cache.keys, cache.values, *([cache.memory] if cache.memory else [])))


def _by_kind(cached: Sequence[tuple]) -> list[tuple]:
    """Return keys, values and, where a layer has it, memory of all layers, from what each layer cached."""
    kinds = [tuple(each[i] for each in cached) for i in range(2)]
    if all(len(each) == 2 for each in cached):
        return kinds
    return [*kinds, tuple(each[2] if len(each) > 2 else None for each in cached)]


def blank(config: TransformerConfig, *, make_layer: Callable[..., Block] | None = None, **how: Any) -> Transformer:
    """Decoder of a configuration whose parameters have shapes but no values yet; call it on the meta device.

    Args:
      config: its shape.
      make_layer: make_layer(config, index, **parts) makes the layers where some are of a workload's own kind
        (extension.py); parts are the arguments of Block. None = every layer is a Block.
      how: further arguments of Transformer, such as dtype and implementation.

    Raises:
      ValueError: make_layer is missing, or layers that differ would run in a scan.
    """
    if config.layer_kind is not None and make_layer is None:
        raise ValueError(f"transformer: memory.kind={config.layer_kind} needs a make_layer, got {make_layer}")
    if config.layer_kind is not None and how.get("scan_layers"):
        raise ValueError(f"transformer: scan_layers=True needs layers that are alike, got memory={config.layer_kind}")
    fields = {name: getattr(config, name) for name in TransformerConfig.model_fields}
    return Transformer(**fields, **how, make_layer=make_layer and functools.partial(make_layer, config))


def build(
    config: TransformerConfig,
    params: Mapping[str, np.ndarray],
    *,
    dtype: str = "float32",
    implementation: str = "dense",
    block_size: int = 128,
    scan_layers: bool = False,
    projection_groups: int = 0,
    make_layer: Callable[..., Block] | None = None,
    device: str = "cpu",
) -> Transformer:
    """Return the model of a configuration holding `params`, cast to dtype.

    projection_groups: 0 = a product for every projection; n = one for query, key and value and one for gate and up,
    their kernels side by side in n interleaved parts (nn.project). Parameters and their names are the same.
    make_layer: as for `blank`.

    Raises:
      ValueError: a parameter is missing, unused or misshapen, all names are listed; or as `blank`.
    """
    how = {"dtype": dtype, "implementation": implementation, "block_size": block_size, "scan_layers": scan_layers}
    how |= {"projection_groups": projection_groups, "make_layer": make_layer}
    with torch.device("meta"):
        model = blank(config, **how)
    return nn.load_params(model, params, device=device)
