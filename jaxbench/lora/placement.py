"""Where adapters live on a mesh: a rule in addition to those of the decoder (sharding.py)."""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec as P

from jaxbench.lora.config import PARAMETERS, LoraTransformerConfig
from jaxbench.sharding import Rule


def with_adapters(rules: tuple[Rule, ...], config: LoraTransformerConfig, **axes: Any) -> tuple[Rule, ...]:
    """Decoder's sharding rules, and one that replicates its adapters, which are small, on every device."""
    return (*rules, (PARAMETERS, P()))
