"""Shapes of a training state, from which a step is compiled before any array is made.

They also serve TPU slices that are not attached (tpu_train.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax

from jaxbench import initial, transformer
from jaxbench.config import Compute, TransformerConfig
from jaxbench.extension import Extension
from jaxbench.parallel import offload
from jaxbench.training import optimizer_step
from jaxbench.training.step_config import OffloadConfig, StepConfig


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
