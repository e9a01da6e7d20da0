"""Place a reader's weights on one of this process's devices; those of the last blocks in host memory if requested.

Twin: torch_ref/hallucination/placement.py. Nothing here affects features.

Weights in host memory are copied to the device inside the compiled programs, one branch of one block at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import SingleDeviceSharding
from jaxtyping import Float

from jaxbench.attention import Context
from jaxbench.parallel import offload
from jaxbench.parameters import dotted
from jaxbench.sharding import PINNED_HOST


class OnHost(nnx.Module):
    """A module whose parameters stay in host memory and are on the device only during its calls."""

    def __init__(self, module: Any):
        """module: a branch of a block, called with the branch's input first."""
        self.module = module

    def __call__(self, x: Float[Array, "B T D"], *args: Any) -> Any:
        """Call the module with its parameters on the device."""
        return self._near(lambda module: module(x, *args))

    def _near(self, call: Callable[[Any], Any]) -> Any:
        """Apply `call` to the module with its parameters on the device.

        The call is the only iteration of a loop whose trip count and index are opaque to the compiler: otherwise XLA
        starts the transfers of all blocks first, and holds all of them.
        """
        graph, state = nnx.split(self.module)

        def turn(index: Array, _: Any) -> Any:
            waiting = jax.tree.map(lambda value: lax.optimization_barrier((value, index))[0], state)
            return call(nnx.merge(graph, offload.to_device(waiting)))

        made = jax.eval_shape(turn, jax.ShapeDtypeStruct((), jnp.int32), None)
        empty = jax.tree.map(lambda value: jnp.zeros(value.shape, value.dtype), made)
        return lax.fori_loop(0, lax.optimization_barrier(jnp.int32(1)), turn, empty)


class AttentionOnHost(OnHost):
    """The same for attention, with its `queries`."""

    def __init__(self, module: Any):
        """module: a block's attention."""
        super().__init__(module)
        self.sliding_window, self.softcap = module.sliding_window, module.softcap

    def queries(self, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T N H"]:
        """Compute the queries of a call's tokens, as the call itself does."""
        return self._near(lambda module: module.queries(x, context))


def devices(kind: str, count: int | None = None) -> list[Any]:
    """This process's devices of a kind, "cpu", "gpu" or "tpu"; count: only the first `count`, None = all.

    Raises:
      ValueError: there are fewer.
    """
    found = jax.local_devices(backend={"gpu": "cuda"}.get(kind, kind))
    if count is not None and count > len(found):
        raise ValueError(f"--devices={count}: JAX sees {len(found)} of kind {kind}")
    return found[:count]


def in_host_memory() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which models are built in host memory, from where `placed` takes them."""
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def is_on_host(name: str) -> bool:
    """True if the parameter of this dotted name, in a model by `arranged`, belongs in host memory."""
    return ".module." in name


def arranged(model: Any, *, offload_layers: int) -> Any:
    """Return the decoder with the same parameters, its last blocks' branches wrapped so that `is_on_host` finds theirs.

    The blocks' norms, which are small, stay with the rest.

    Raises:
      ValueError: offload_layers is not from 0 to the number of the model's blocks.
    """
    if not 0 <= offload_layers <= len(model.layers):
        raise ValueError(f"offload_layers={offload_layers}: the model has {len(model.layers)} blocks")
    made = nnx.merge(*nnx.split(model))
    for layer in list(made.layers)[len(made.layers) - offload_layers :]:
        layer.attention, layer.mlp = AttentionOnHost(layer.attention), OnHost(layer.mlp)
    return made


def placed(model: Any, device: Any, *, offload_layers: int) -> Any:
    """Return the decoder on a device, with the weights of its last blocks in pinned host memory.

    Raises:
      ValueError: as `arranged`, or the device reads no pinned memory.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    if offload_layers and PINNED_HOST not in kinds:
        raise ValueError(
            f"offload_layers={offload_layers}: {device.device_kind} reads no {PINNED_HOST} memory, but "
            f"{', '.join(kinds)}; leave it out"
        )
    graph, state = nnx.split(arranged(model, offload_layers=offload_layers))
    near = SingleDeviceSharding(device)
    far = near.with_memory_kind(PINNED_HOST) if offload_layers else near

    def put(path: tuple, value: Array) -> Array:
        return jax.device_put(value, far if is_on_host(dotted(path)) else near)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(put, state))
