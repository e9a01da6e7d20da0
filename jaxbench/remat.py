"""Rematerialisation in the backward pass, applied to a decoder from outside, so that its layers need not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxbench import sharding

NAMES = ("input", "attention", "mlp")  # what a block names: its input, its branches' outputs before they are added
POLICIES = ("none", "block", "group", "names", "offload")


def apply(model: Any, *, policy: str, group: int = 1, names: Sequence[str] = ()) -> Any:
    """Make a decoder recompute its blocks in the backward pass, and return it.

    Args:
      policy: what the backward pass recomputes. none: nothing. block: each block keeps only its input. group: `group`
        consecutive blocks keep only the first one's input. names: as block, and the named values are kept too.
        offload: as block, and the named values are kept in pinned host memory; with "input", nothing of a block stays
        on the device.
      group: blocks recomputed together, >= 1 (policy group).
      names: of NAMES (policies names and offload).

    Raises:
      ValueError: an unknown policy, missing names or one that blocks do not have, group < 1, or groups together with
        scan_layers.
    """
    if policy not in POLICIES:
        raise ValueError(f"remat: policy={policy!r} is unknown, wanted one of {', '.join(POLICIES)}")
    if policy == "group" and group < 1:
        raise ValueError(f"remat: policy='group' with group={group}, wanted at least 1 block")
    unknown = [name for name in names if name not in NAMES]
    if policy in ("names", "offload") and (unknown or not names):
        raise ValueError(f"remat: names {unknown or 'of nothing'} are unknown, a block has {', '.join(NAMES)}")
    if policy == "group" and model.scan_layers:
        raise ValueError(f"remat: groups of {group} blocks need scan_layers=False; use policy block")
    model.remat_group = {"none": 0, "group": group}.get(policy, 1)
    model.remat_names = tuple(names) if policy in ("names", "offload") else ()
    model.remat_offloads = policy == "offload"
    return model


def checkpointed(function: Callable[..., Any], names: Sequence[str], *, offload: bool) -> Callable[..., Any]:
    """Wrap a function so that the backward pass recomputes its inner values, except the named ones (jax.checkpoint).

    offload: keep them in pinned host memory instead of on the device.
    """
    policies, policy = jax.checkpoint_policies, None
    if offload:
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(names),
            offload_src="device",
            offload_dst=sharding.PINNED_HOST,
        )
    elif names:
        policy = policies.save_only_these_names(*names)
    return jax.checkpoint(function, policy=policy)


def run_blocks(
    layers: list[Any],
    sites: list[Any],
    hidden: Float[Array, "B T D"],
    context: Any,
    *,
    group: int,
    names: Sequence[str],
    offload: bool,
) -> tuple[Float[Array, "B T D"], list[tuple[Float[Array, "B K H S"], Float[Array, "B K S H"]]]]:
    """Residual stream after blocks without a cache, `group` of them per checkpoint, and their keys and values."""
    keys_values: list[tuple[Array, Array]] = []
    for start in range(0, len(layers), group):
        part = slice(start, start + group)
        graphs, states = zip(*(nnx.split(layer) for layer in layers[part]))

        def run(states: tuple, hidden: Array, graphs: tuple = graphs, part: slice = part) -> tuple[Array, list]:
            cached = []
            for index, graph, state, site in zip(range(part.start, part.stop), graphs, states, sites[part]):
                block = nnx.merge(graph, sharding.layer_weights(state, index))
                hidden, key_value = block(hidden, context, site)
                cached.append(key_value)
            return hidden, cached

        hidden, cached = checkpointed(run, names, offload=offload)(states, hidden)
        keys_values += cached
    return hidden, keys_values
