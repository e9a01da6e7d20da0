"""Optimiser state and gradients in the host's pinned memory, brought to the device where the step uses them.

The transfers are part of the compiled step, so that its scheduler overlaps them with computing. Activations are
offloaded by rematerialisation (remat.py, policy offload).
"""

from __future__ import annotations

from typing import Any

import jax

from jaxbench.step_config import StepConfig

HOST = "pinned_host"


def check(step_config: StepConfig, device: jax.Device) -> None:
    """Check that the device can reach pinned host memory where a step wants it.

    Raises:
      ValueError: it cannot; the message names the memories it has.
    """
    wanted = [name for name, is_on in step_config.offload.model_dump().items() if is_on]
    wanted += ["remat"] if step_config.remat.policy == "offload" else []
    kinds = [memory.kind for memory in device.addressable_memories()]
    if wanted and HOST not in kinds:
        raise ValueError(
            f"offload: {', '.join(wanted)} need memory of kind {HOST}, but {device.device_kind} has "
            f"{', '.join(kinds)}; switch them off in step.offload and step.remat.policy"
        )


def to_host(tree: Any) -> Any:
    """Tree with its arrays moved to pinned host memory; scalars stay where they are."""
    return _moved(tree, jax.memory.Space.Host)


def to_device(tree: Any) -> Any:
    """Tree with its arrays moved to device memory."""
    return _moved(tree, jax.memory.Space.Device)


def _moved(tree: Any, space: jax.memory.Space) -> Any:
    return jax.tree.map(lambda value: jax.device_put(value, space) if value.ndim else value, tree)


def host_sharding(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """The same sharding in pinned host memory."""
    return sharding.with_memory_kind(HOST)
