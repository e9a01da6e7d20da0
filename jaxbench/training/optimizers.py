"""Optimisers by name, from optax, over parameters in a flat {dotted name: array}."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxbench.training.step_config import OptimizerConfig, is_matrix


def transform(
    config: OptimizerConfig, learning_rate: Array | float, params: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Optimiser of a configuration at one learning rate; its state does not depend on the rate.

    A rate that is traced makes one compiled step serve a whole schedule. Parameters that are not trained stay as they
    are and have no state.
    """
    if all(map(config.is_trained, params)):
        return _transform(config, learning_rate, params)

    def chosen(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in tree.items() if config.is_trained(name)}

    inner = _transform(config, learning_rate, chosen(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        moved, state = inner.update(chosen(updates), state, chosen(params))
        return {name: moved[name] if name in moved else jnp.zeros_like(x) for name, x in updates.items()}, state

    return optax.GradientTransformation(lambda params: inner.init(chosen(params)), update)


def with_fixed(config: OptimizerConfig, params: Mapping[str, Array]) -> dict[str, Array]:
    """Parameters with a stop_gradient on those that are not trained."""
    return {name: x if config.is_trained(name) else jax.lax.stop_gradient(x) for name, x in params.items()}


def _transform(
    config: OptimizerConfig, learning_rate: Array | float, params: Mapping[str, Any]
) -> optax.GradientTransformation:
    c = config
    decays = {name: c.decays(name) for name in params}
    adamw = functools.partial(optax.adamw, learning_rate, c.b1, c.b2, c.eps, weight_decay=c.weight_decay)
    if c.kind == "adamw":
        return adamw(mask=decays)
    if c.kind == "lion":
        return optax.lion(learning_rate, c.b1, c.b2, weight_decay=c.weight_decay, mask=decays)
    if c.kind == "sgd":
        decay = optax.add_decayed_weights(c.weight_decay, decays)
        return optax.chain(decay, optax.sgd(learning_rate, c.momentum or None))
    if c.kind == "adafactor":
        # Factored second moments, updates relative to the parameter's scale, clipped at root mean square 1.
        return optax.chain(
            optax.adafactor(learning_rate, multiply_by_parameter_scale=True, clipping_threshold=1.0),
            optax.add_decayed_weights(-(learning_rate * c.weight_decay), decays),  # decoupled: after the scaling
        )
    return optax.partition(
        {
            "muon": optax.contrib.muon(learning_rate * c.muon_ratio, beta=c.momentum, weight_decay=c.weight_decay),
            "adamw": adamw(mask=lambda tree: {name: decays[name] for name in tree}),
        },
        {name: "muon" if _is_hidden_kernel(name, value) else "adamw" for name, value in params.items()},
    )  # fmt: skip


def _is_hidden_kernel(name: str, value: Any) -> bool:
    """True for the matrices inside layers: Muon is not meant for embeddings, heads, norms and biases.

    A memory's first weights are a matrix for each head; optax would hand them to an Adam without weight decay.
    """
    return name.startswith("layers.") and is_matrix(name) and len(value.shape) == 2
