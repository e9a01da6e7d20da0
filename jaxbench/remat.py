"""What the backward pass computes again: applied to a decoder from outside, so that its layers know nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array

from jaxbench.step_config import RematConfig

NAMES = ("attention", "mlp")  # what a block names: the outputs of its two branches, before they are added


def apply(model: Any, config: RematConfig) -> Any:
    """Make a decoder compute its blocks again in the backward pass, and return it.

    block: each block keeps its input only. group: `config.group` blocks in a row keep the first one's input. names: as
    block, and the named outputs are kept too.

    Raises:
      ValueError: a name that blocks do not have, or groups together with scan_layers.
    """
    unknown = [name for name in config.names if name not in NAMES]
    if config.policy == "names" and unknown:
        raise ValueError(f"remat: names {unknown} are unknown, a block has {', '.join(NAMES)}")
    if config.policy == "group" and model.scan_layers:
        raise ValueError(f"remat: groups of {config.group} blocks need scan_layers=False; use policy block")
    model.remat = {"none": 0, "group": config.group}.get(config.policy, 1)
    model.remat_names = ",".join(config.names) if config.policy == "names" else ""
    return model


def checkpointed(function: Callable[..., Any], names: str) -> Callable[..., Any]:
    """Return a function whose inner values are computed again in the backward pass, but for the named ones."""
    policy = jax.checkpoint_policies.save_only_these_names(*names.split(",")) if names else None
    return jax.checkpoint(function, policy=policy)


def run_blocks(
    layers: list[Any], sites: list[Any], hidden: Array, context: Any, *, group: int, names: str
) -> tuple[Array, list[tuple[Array, Array]]]:
    """Run blocks without a cache, `group` at a time under one checkpoint; returns hidden states, keys and values."""
    found: list[tuple[Array, Array]] = []
    for start in range(0, len(layers), group):
        part = slice(start, start + group)
        graphs, states = zip(*(nnx.split(layer) for layer in layers[part]))

        def run(states: tuple, hidden: Array, graphs: tuple = graphs, part: slice = part) -> tuple[Array, list]:
            made = []
            for graph, state, site in zip(graphs, states, sites[part]):
                hidden, cached = nnx.merge(graph, state)(hidden, context, site)
                made.append(cached)
            return hidden, made

        hidden, made = checkpointed(run, names)(states, hidden)
        found += made
    return hidden, found
