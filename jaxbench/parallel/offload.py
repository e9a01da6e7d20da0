"""Optimiser state and gradients in the host's pinned memory, copied to the device where the step uses them.

The transfers are part of the compiled step, so that its scheduler overlaps them with computation. Activations are
offloaded by rematerialisation (remat.py, policy offload).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxbench.sharding import PINNED_HOST


def check(wanted: Sequence[str], device: jax.Device) -> None:
    """Check that the device can reach pinned host memory if a step keeps something there.

    Args:
      wanted: names of what is kept there: StepConfig.on_host; may be empty.

    Raises:
      ValueError: it cannot; the message names its memories.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    if wanted and PINNED_HOST not in kinds:
        raise ValueError(
            f"offload: {', '.join(wanted)} need memory of kind {PINNED_HOST}, but {device.device_kind} has "
            f"{', '.join(kinds)}; switch them off in step.offload and step.remat.policy"
        )


def to_host(tree: Any) -> Any:
    """Move a tree's arrays to pinned host memory; scalars stay where they are."""
    return _moved(tree, jax.memory.Space.Host)


def to_device(tree: Any) -> Any:
    """Move a tree's arrays to device memory."""
    return _moved(tree, jax.memory.Space.Device)


def _moved(tree: Any, space: jax.memory.Space) -> Any:
    return jax.tree.map(lambda value: jax.device_put(value, space) if value.ndim else value, tree)


def host_sharding(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Return the same sharding in pinned host memory."""
    return sharding.with_memory_kind(PINNED_HOST)
