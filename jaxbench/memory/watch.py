"""What the banks of a decoder in training hold, for its statistics, in JAX. Twin: torch_ref/memory/watch.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxbench import parameters
from jaxbench.memory.bank import BankState
from jaxbench.training import optimizer_step, precision
from jaxbench.training.step_config import StepConfig


def bank_states(
    params: Mapping[str, Array], batch: Any, *, graph: Any, step_config: StepConfig
) -> dict[int, BankState]:
    """States of a decoder's banks behind a batch's rows, by layer; each row is read as one document."""
    model = parameters.merge(graph, optimizer_step._narrow(params, precision.policy(step_config.precision)))
    is_token = batch.positions >= 0
    positions = jnp.where(is_token, jnp.cumsum(is_token, axis=1) - 1, -1).astype(jnp.int32)
    _, cache = model.features(batch.tokens, positions)
    states = {i: layer.state.memory for i, layer in enumerate(cache.memory) if layer is not None}
    return {i: state for i, state in states.items() if isinstance(state, BankState)}
