"""Memory of a run with a batch, from the memory needs of the compiled step and evaluation; nothing is run.

Twin: torch_ref/training/batch_size.py. The search over it is largest_batch.py.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from jaxbench import prng, train
from jaxbench.config import TransformerConfig
from jaxbench.extension import Extension
from jaxbench.native import products
from jaxbench.training import optimizer_step, precision, state_shapes
from jaxbench.training.largest_batch import LargestBatch, find_optimal_batch_size
from jaxbench.training.train_config import TrainConfig

__all__ = ["LargestBatch", "device_bytes", "find_optimal_batch_size", "run_bytes"]


def run_bytes(settings: TrainConfig, config: TransformerConfig, *, extension: Extension = Extension()) -> int:
    """Return the peak bytes of one device's memory in a run: of its step, or of an evaluation while the state stays.

    extension: what a workload adds to the decoder `config`.
    """
    step, evaluation = (each.memory_analysis() for each in _compiled(settings, config, extension))
    kept = step.output_size_in_bytes - step.alias_size_in_bytes
    needed = step.temp_size_in_bytes + kept, evaluation.temp_size_in_bytes + evaluation.output_size_in_bytes
    return int(step.argument_size_in_bytes + max(needed))


def _compiled(settings: TrainConfig, config: TransformerConfig, extension: Extension) -> tuple[Any, Any]:
    """Compile the step and the evaluation for the first device, from shapes: no array is made."""
    step_config = products.resolved(settings.step, is_on_mesh=False, device=jax.default_backend())
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def placed(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or place), tree
        )

    compute = settings.compute(precision.POLICIES[step_config.precision].compute)
    state = placed(state_shapes.abstract_state(config, compute, step_config, host=place, extension=extension))
    shape = (settings.batch_size, settings.data.seq_len)
    ids, mask = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, bool))
    key = jax.eval_shape(lambda: prng.key_from_seed(0)) if settings.has_dropout else None
    packed = ids if settings.data.document_mask else None
    batch, rate, key = placed((train.Batch(ids, ids, packed, mask, packed), jax.ShapeDtypeStruct((), "float32"), key))
    evaluate = functools.partial(optimizer_step.eval_step, graph=state.graph, step_config=step_config)
    step = jax.jit(functools.partial(optimizer_step.train_step, step_config=step_config), donate_argnums=0)
    return step.lower(state, batch, rate, key).compile(), jax.jit(evaluate).lower(state.params, batch).compile()


def device_bytes() -> int:
    """Return the memory of the first device in bytes, or the host's free memory if the device is the CPU."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit") or psutil.virtual_memory().available)
