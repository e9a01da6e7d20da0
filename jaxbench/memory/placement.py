"""Sharding rules for the parameters of memory layers, added to those of the decoder (sharding.py)."""

from __future__ import annotations

import re

from jax.sharding import PartitionSpec as P

from jaxbench import initial, sharding
from jaxbench.memory.decoder_config import MemoryTransformerConfig
from jaxbench.sharding import Axes, Rule


def with_memory(
    rules: tuple[Rule, ...], config: MemoryTransformerConfig, *, stored: Axes, heads: Axes, width: Axes
) -> tuple[Rule, ...]:
    """Add rules for the memory layers to a decoder's table.

    Heads of a memory are sharded like those of attention. Rules that match no parameter are left out: those of other
    kinds of memory, and those of attention if every layer's is replaced. Axes: `sharding.decoder_table`.
    """
    layer, rows = r"layers\.\d+\.", sharding.joined(width, stored)
    block = layer + r"block\."
    own = (
        (layer + "gate", P(width)),
        (block + r"(attention|memory|bank)\.(q|k|v|g)_proj\.kernel", P(rows, heads)),
        (block + r"(attention|memory|bank)\.o_proj\.kernel", P(heads, rows)),
        (block + r"(attention|memory)\.persistent", P(None, rows)),
        (block + r"(input|answer|memory)_norm\.scale", P(width)),
        (block + r"memory\.(q|k|v)_conv\.kernel", P(None, heads)),
        (block + r"memory\.(eta|theta|alpha)\.kernel", P(rows, heads)),
        (block + r"memory\.(eta|theta|alpha)\.bias", P(heads)),
        (block + r"memory\.memory\.layers\.\d+\.kernel", P(heads, stored)),
        (block + r"memory\.memory\.gain", P(heads)),
        (block + r"memory\.out_norm\.scale", P()),
        (block + r"bank\.compress\.kernel", P(rows)),
        (block + r"bank\.gate", P(heads)),
    )
    names = initial.parameter_shapes(config)
    return tuple(rule for rule in (*rules, *own) if any(re.fullmatch(rule[0], name) for name in names))
