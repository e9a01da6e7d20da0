"""The largest batch that fits, by the compiled step's and evaluation's memory: nothing runs out of it to find out.

Works wherever the step compiles, TPU topologies without a TPU included.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import psutil

from jaxbench import initial, prng, train, transformer
from jaxbench.config import Compute, TransformerConfig
from jaxbench.extension import Extension
from jaxbench.parallel import offload
from jaxbench.training import optimizer_step, precision
from jaxbench.training.step_config import StepConfig


class LargestBatch(NamedTuple):
    """Outcome of a search for the largest batch that fits."""

    batch_size: int  # rows, a multiple of the micro-batches
    run_bytes: int  # what a run with it needs: state, batch, temporaries of a step or an evaluation
    limit_bytes: int
    tried: dict[int, int]  # batch size -> bytes


def find_optimal_batch_size(bytes_of: Callable[[int], int], *, limit_bytes: int, multiple: int = 1) -> LargestBatch:
    """Largest batch size, a multiple of `multiple`, whose run needs at most limit_bytes.

    Doubles until a batch is too large, then halves the gap.

    Args:
      bytes_of: batch size -> bytes that a run needs; must not fall as the batch grows.
      limit_bytes: of device memory.
      multiple: micro-batches of a step.

    Raises:
      ValueError: limit_bytes does not hold even the smallest batch.
    """
    tried: dict[int, int] = {}

    def fits(count: int) -> bool:
        tried[count * multiple] = bytes_of(count * multiple)
        return tried[count * multiple] <= limit_bytes

    if not fits(1):
        raise ValueError(
            f"batch size: a step of {multiple} rows needs {tried[multiple]} bytes, the limit is {limit_bytes}; shorten "
            "data.seq_len, or set step.remat.policy=block"
        )
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return LargestBatch(low * multiple, tried[low * multiple], limit_bytes, tried)


def run_bytes(config: TransformerConfig, step_config: StepConfig, batch_size: int, **sizes: Any) -> int:
    """Bytes of device memory that a run needs at once: its step, or an evaluation while the state stays.

    Arguments as for `compiled`; sizes may hold all but `is_evaluation`.
    """
    step, evaluation = (
        compiled(config, step_config, batch_size, is_evaluation=is_evaluation, **sizes).memory_analysis()
        for is_evaluation in (False, True)
    )
    kept = step.output_size_in_bytes - step.alias_size_in_bytes
    needed = step.temp_size_in_bytes + kept, evaluation.temp_size_in_bytes + evaluation.output_size_in_bytes
    return int(step.argument_size_in_bytes + max(needed))


def compiled(
    config: TransformerConfig,
    step_config: StepConfig,
    batch_size: int,
    *,
    seq_len: int,
    implementation: str = "dense",
    block_size: int = 128,
    scan_layers: bool = False,
    fused_projections: bool = False,
    device: jax.Device | None = None,
    is_evaluation: bool = False,
    extension: Extension = Extension(),
) -> Any:
    """Compiled step, or evaluation, of one device (the first where None); from shapes, no array is made.

    The device may be one of a topology that is not attached (jax.experimental.topologies). extension: what a workload
    adds to the decoder of `config`.
    """
    dtype = precision.policy(step_config.precision).compute
    compute = Compute(dtype, implementation, block_size, scan_layers, projection_groups=int(fused_projections))
    place = jax.sharding.SingleDeviceSharding(device or jax.devices()[0])
    shapes = initial.parameter_shapes(config)
    shapes = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    on_device = step_config.model_copy(update={"offload": type(step_config.offload)()})

    def state_of(params: dict) -> optimizer_step.TrainState:
        model = transformer.Transformer(config, compute, extension.make_layer)
        return optimizer_step.init_state(model, params, on_device)

    def placed(tree: Any, *, is_host: bool = False) -> Any:
        def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
            sharding = offload.host_sharding(place) if is_host and leaf.ndim else place
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(abstract, tree)

    state = jax.eval_shape(state_of, shapes)
    moments = placed(state.moments, is_host=step_config.offload.optimizer)
    state = dataclasses.replace(placed(state), moments=moments)
    ids, mask = (jax.ShapeDtypeStruct((batch_size, seq_len), dtype) for dtype in (jnp.int32, bool))
    batch = train.Batch(ids, ids, ids, mask, ids)
    if is_evaluation:
        evaluate = functools.partial(optimizer_step.eval_step, graph=state.graph, step_config=step_config)
        return jax.jit(evaluate).lower(state.params, placed(batch)).compile()
    key = jax.eval_shape(lambda: prng.key_from_seed(0)) if config.dropout else None
    arguments = placed((batch, jax.ShapeDtypeStruct((), "float32"), key))
    step = jax.jit(functools.partial(optimizer_step.train_step, step_config=step_config), donate_argnums=0)
    return step.lower(state, *arguments).compile()


def device_bytes() -> int:
    """Memory of the first device in bytes, or what the host has free where the device is the CPU."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit") or psutil.virtual_memory().available)
