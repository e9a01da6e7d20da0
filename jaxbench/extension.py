"""What a workload adds to the decoder; its own commands pass it to the core's programs (S file)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Extension(NamedTuple):
    """Layers of a workload's own kind in one framework, and what training and compiling need to know about them.

    The configuration says which layers these are and which parameters they have (TransformerConfig.layer_kind and the
    methods next to it); what needs a framework is here.
    """

    make_layer: Callable[..., Any] | None = None  # (config, index, compute) -> layer
    add_rules: Callable[..., Any] | None = None  # (rules, config, stored=, heads=, width=) -> rules; JAX: sharding.py
    watch: Callable[..., Any] | None = None  # (params, batch, graph=, step_config=) -> the layers' states
    scalars: Callable[..., dict[str, float]] | None = None  # of what `watch` returned, in numpy -> name: number


def by_layer(cache: Any) -> list[tuple]:
    """Each layer's entry of a KVCache: its keys, values and, if layers keep more, its memory."""
    return list(zip(cache.keys, cache.values, *([cache.memory] if cache.memory else [])))


def by_kind(cached: Sequence[tuple]) -> list[tuple]:
    """Keys, values and, if a layer has one, memory of all layers, as a KVCache's fields: the inverse of `by_layer`."""
    kinds = [tuple(each[i] for each in cached) for i in range(2)]
    if all(len(each) == 2 for each in cached):
        return kinds
    return [*kinds, tuple(each[2] if len(each) > 2 else None for each in cached)]
