"""What a workload adds to the decoder, handed to the core's programs by the workload's own commands (S file)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Extension(NamedTuple):
    """Layers of a workload's own kind in one framework, and what training and compiling need to know about them.

    The configuration says which layers these are and which parameters they have (TransformerConfig.layer_kind and the
    methods beside it); what needs a framework is here.
    """

    make_layer: Callable[..., Any] | None = None  # (config, index, compute) -> layer
    add_rules: Callable[..., Any] | None = None  # (rules, config, stored=, heads=, width=) -> rules; JAX: sharding.py
    watch: Callable[..., Any] | None = None  # (params, batch, graph=, step_config=) -> the layers' states
    scalars: Callable[..., dict[str, float]] | None = None  # of what `watch` returned, in numpy -> name: number
