"""Find the largest batch that fits, from the memory needs of the compiled step and evaluation; nothing is run.

Steps are compiled from shapes alone: `abstract_state` also serves TPU slices that are not attached (tpu_train.py).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import psutil

from jaxbench import initial, prng, train, transformer
from jaxbench.config import Compute, TransformerConfig
from jaxbench.extension import Extension
from jaxbench.native import products
from jaxbench.parallel import offload
from jaxbench.training import optimizer_step, precision
from jaxbench.training.step_config import OffloadConfig, StepConfig
from jaxbench.training.train_config import TrainConfig


class LargestBatch(NamedTuple):
    """Outcome of a search for the largest batch that fits."""

    batch_size: int  # rows, a multiple of the micro-batches
    run_bytes: int  # what a run with it needs: state, batch, temporaries of a step or an evaluation
    limit_bytes: int
    tried: dict[int, int]  # batch size -> bytes


def find_optimal_batch_size(bytes_of: Callable[[int], int], *, limit_bytes: int, multiple: int = 1) -> LargestBatch:
    """Return the largest batch size, a multiple of `multiple`, whose run needs at most limit_bytes.

    Bytes grow almost linearly with the rows, so four sizes settle it: two, the one at which the line through them meets
    the limit, and the next. Where growth is not linear, every second attempt halves the gap.

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
    low, high, previous = 1, None, None  # the largest that fits, the smallest that does not, the one tried before low
    for attempt in itertools.count():
        if high is not None and high - low <= 1:
            break
        at = _expected(low, high, previous, tried, limit_bytes, multiple)
        middle = (low + high) // 2 if high is not None and attempt % 2 else at
        if fits(middle):
            low, previous = middle, low
        else:
            high = middle
    return LargestBatch(low * multiple, tried[low * multiple], limit_bytes, tried)


def _expected(
    low: int, high: int | None, previous: int | None, tried: dict[int, int], limit_bytes: int, multiple: int
) -> int:
    """Where the line through the two nearest sizes meets the limit, above `low` and below `high`."""
    other = high if high is not None else previous
    if other is None:
        return 2 * low
    rise = tried[other * multiple] - tried[low * multiple]
    slope = rise / (other - low)
    at = low + int((limit_bytes - tried[low * multiple]) / slope) if slope > 0 else 2 * low
    # A line through neighbouring sizes may overshoot: allow at most sixteen times the rows.
    return max(low + 1, min(at, 16 * low if high is None else high - 1))


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
    state = placed(abstract_state(config, compute, step_config, host=place, extension=extension))
    shape = (settings.batch_size, settings.data.seq_len)
    ids, mask = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, bool))
    key = jax.eval_shape(lambda: prng.key_from_seed(0)) if settings.has_dropout else None
    packed = ids if settings.data.document_mask else None
    batch, rate, key = placed((train.Batch(ids, ids, packed, mask, packed), jax.ShapeDtypeStruct((), "float32"), key))
    evaluate = functools.partial(optimizer_step.eval_step, graph=state.graph, step_config=step_config)
    step = jax.jit(functools.partial(optimizer_step.train_step, step_config=step_config), donate_argnums=0)
    return step.lower(state, batch, rate, key).compile(), jax.jit(evaluate).lower(state.params, batch).compile()


def abstract_state(
    config: TransformerConfig, compute: Compute, step_config: StepConfig, *, host: jax.sharding.Sharding,
    extension: Extension,
) -> optimizer_step.TrainState:  # fmt: skip
    """Shapes of a training state; no array is made. Offloaded moments carry the sharding `host` in pinned memory."""
    shapes = initial.parameter_shapes(config).items()
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes}
    state = jax.eval_shape(initialiser(config, compute, step_config, extension=extension), params)
    if not step_config.offload.optimizer:
        return state
    pinned = functools.partial(jax.ShapeDtypeStruct, sharding=offload.host_sharding(host))
    moments = jax.tree.map(lambda leaf: pinned(leaf.shape, leaf.dtype) if leaf.ndim else leaf, state.moments)
    return dataclasses.replace(state, moments=moments)


def initialiser(
    config: TransformerConfig, compute: Compute, step_config: StepConfig, *, extension: Extension
) -> Callable[[Mapping[str, jax.Array]], optimizer_step.TrainState]:
    """Make the function from initial values to the state before the first step, to be traced; it offloads nothing."""
    on_device = step_config.model_copy(update={"offload": OffloadConfig()})
    decoder = functools.partial(transformer.Transformer, config, compute, extension.make_layer)
    return lambda params: optimizer_step.init_state(decoder(), params, on_device)


def device_bytes() -> int:
    """Return the memory of the first device in bytes, or the host's free memory if the device is the CPU."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit") or psutil.virtual_memory().available)
