"""Several processes as one JAX program: how they start, and arrays of which each process holds a part.

Every process runs the same command. `start` joins them through jax.distributed (CPUs communicate through gloo); from
then on jax.devices() are the devices of all processes, and a mesh spans them. Arrays over such a mesh are made from a
whole value that every process has (`place`) or from the rows that each has read (`place_rows`).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Shaped

from jaxbench.parallel.processes import ALONE, Processes

SHUTDOWN_SECONDS = 60  # how long a process that ends waits for the others


def start(coordinator: str | None = None, count: int | None = None, index: int | None = None) -> Processes:
    """Join the processes of a run through jax.distributed; call it before anything asks for a device.

    Args:
      coordinator: host:port of the first process; None = from the cluster (SLURM, Open MPI, Kubernetes, TPU pod).
      count: number of processes; None as above.
      index: index of this process, from 0; None as above.

    Raises:
      ValueError: no cluster is found although one is asked for, or the others do not join in time.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's preemption service intercepts SIGTERM for checkpoints on notice, unused here: a run would survive it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=count,
            process_id=index,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"distributed: cannot join the processes of coordinator={coordinator}, num_processes={count}, "
            f"process_id={index} ({reason}); outside a cluster give all three"
        ) from error
    if jax.process_count() == 1:
        return ALONE
    from jax.experimental import multihost_utils

    return Processes(jax.process_index(), jax.process_count(), multihost_utils.process_allgather)


def place(value: Any, sharding: NamedSharding) -> Shaped[Array, "*shape"]:
    """Make an array over the mesh from its whole value, which every process has; the value is copied."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding, may_alias=False)
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: np.array(whole[index]))


def place_rows(
    value: Shaped[np.ndarray, "own ..."], sharding: NamedSharding, *, first: int, rows: int
) -> Shaped[Array, "rows ..."]:
    """Make an array of `rows` rows over the mesh; `value` holds this process's rows, from row `first` on."""
    if sharding.is_fully_addressable and len(value) == rows:
        return jax.device_put(value, sharding)

    def part(index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[0].indices(rows)
        return value[(slice(start - first, stop - first), *index[1:])]

    return jax.make_array_from_callback((rows, *value.shape[1:]), sharding, part)


def rows_of(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows of an array of this shape of which this process's devices hold a part: the first, and their number."""
    bounds = [index[0].indices(shape[0])[:2] for index in sharding.addressable_devices_indices_map(shape).values()]
    first = min(start for start, _ in bounds)
    return first, max(stop for _, stop in bounds) - first


def whole(value: Shaped[Array, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
    """All-gather an array into numpy; if other processes hold parts of it, every process must call."""
    if not value.is_fully_addressable and not value.is_fully_replicated:
        everywhere = NamedSharding(value.sharding.mesh, P())
        value = jax.jit(lambda x: x, out_shardings=everywhere)(value)
    return np.asarray(value)
