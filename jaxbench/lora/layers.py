"""Blocks whose projections have low-rank adapters.

Twin: torch_ref/lora/layers.py.
Source: Hu et al. 2021, arXiv:2106.09685; dropout acts on the adapters' inputs, as in PEFT.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
from jax import Array
from jaxtyping import Float

from jaxbench import functional, nn, philox, transformer
from jaxbench.attention import Context
from jaxbench.config import Compute
from jaxbench.extension import Extension
from jaxbench.lora import placement
from jaxbench.lora.config import ATTENTION, LoraConfig, LoraTransformerConfig

_stream: ContextVar[functional.DropoutStream | None] = ContextVar("dropout of adapters", default=None)


class LoraLinear(nn.Linear):
    """Affine map with a low-rank adapter."""

    def __init__(self, base: nn.Linear, lora: LoraConfig, name: str, *, dtype: str):
        self.kernel, self.bias, self.scales = base.kernel, base.bias, base.scales
        width_in, width_out = base.kernel.shape
        self.lora_a = nn.Linear(width_in, lora.rank, use_bias=False, dtype=dtype)
        self.lora_b = nn.Linear(lora.rank, width_out, use_bias=False, dtype=dtype)
        self.lora_scale, self.lora_dropout, self.site = lora.scale, lora.dropout, philox.site_id(f"{name}.lora")

    def __call__(self, x: Float[Array, "B T I"]) -> Float[Array, "B T O"]:
        """Affine map of x, and scale * dropout(x) A B."""
        dropped = functional.dropout(x, self.lora_dropout, _stream.get(), site=self.site)
        return super().__call__(x) + functional.times(self.lora_b(self.lora_a(dropped)), self.lora_scale)


class LoraBlock(transformer.Block):
    """Residual block with adapters."""

    def __init__(self, config: LoraTransformerConfig, index: int, compute: Compute):
        super().__init__(config, compute)
        for target in config.lora.targets:
            room = "attention" if target in ATTENTION else "mlp"
            parent, name = getattr(self, room), f"layers.{index}.{room}.{target}"
            setattr(parent, target, LoraLinear(getattr(parent, target), config.lora, name, dtype=compute.dtype))

    def attend(
        self, x: Float[Array, "B T D"], context: Context, site: int | Array, cached: tuple | None = None
    ) -> tuple[Float[Array, "B T D"], tuple]:
        """Residual stream between the block's two branches, and the layer's cache entry."""
        with _dropping(context):
            return super().attend(x, context, site, cached)

    def feed(self, x: Float[Array, "B T D"], context: Context, site: int | Array) -> Float[Array, "B T D"]:
        """Residual stream after the block, given the one between its branches."""
        with _dropping(context):
            return super().feed(x, context, site)


@contextlib.contextmanager
def _dropping(context: Context) -> Iterator[None]:
    """Make adapters called inside draw their dropout masks from the call's stream."""
    token = _stream.set(context.dropout_stream)
    try:
        yield
    finally:
        _stream.reset(token)


def make_layer(config: LoraTransformerConfig, index: int, compute: Compute) -> transformer.Block:
    """Layer of a decoder with adapters.

    Raises:
      ValueError: projections are fused, which adapters do not support.
    """
    if compute.projection_groups:
        raise ValueError(f"lora: adapters need projection_groups=0, got {compute.projection_groups}")
    return LoraBlock(config, index, compute) if config.has_adapter(index) else transformer.Block(config, compute)


def build(config: Any, params: Mapping[str, np.ndarray], **compute: Any) -> transformer.Transformer:
    """Build the decoder of a configuration, with adapters if it has any."""
    chosen = make_layer if config.layer_kind == "lora" else None
    return transformer.build(config, params, make_layer=chosen, **compute)


def extension(lora: LoraConfig | None) -> Extension:
    """What adapters add to the decoder in training; nothing if lora is None."""
    return Extension() if lora is None else Extension(make_layer=make_layer, add_rules=placement.with_adapters)
