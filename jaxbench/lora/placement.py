"""Where adapters live on a mesh: a rule beside those of the decoder (sharding.py)."""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec as P

from jaxbench.lora.config import PARAMETERS, LoraTransformerConfig
from jaxbench.sharding import Rule


def with_adapters(rules: tuple[Rule, ...], config: LoraTransformerConfig, **axes: Any) -> tuple[Rule, ...]:
    """Decoder's sharding rules, and one for its adapters: whole on every device, small as they are."""
    return (*rules, (PARAMETERS, P()))
