"""Optimisers by name, from optax, over parameters in a flat {dotted name: array}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax import Array

from jaxbench.step_config import OptimizerConfig


def transform(
    config: OptimizerConfig, learning_rate: Array | float, params: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Return an optimiser at one learning rate; its state does not depend on the rate.

    A rate that is traced makes one compiled step serve a whole schedule.
    """
    c = config
    decays = {name: c.decay == "all" or len(value.shape) >= 2 for name, value in params.items()}
    if c.kind == "adamw":
        return optax.adamw(learning_rate, c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=decays)
    if c.kind == "lion":
        return optax.lion(learning_rate, c.b1, c.b2, weight_decay=c.weight_decay, mask=decays)
    if c.kind == "sgd":
        decay = optax.add_decayed_weights(c.weight_decay, decays)
        return optax.chain(decay, optax.sgd(learning_rate, c.momentum or None))
    if c.kind == "adafactor":
        # Factored second moments, updates relative to the parameter's scale, clipped at root mean square 1.
        return optax.chain(
            optax.adafactor(learning_rate, multiply_by_parameter_scale=True, clipping_threshold=1.0),
            _decoupled_decay(learning_rate, c.weight_decay, decays),
        )
    return optax.partition(
        {
            "muon": optax.contrib.muon(learning_rate * c.muon_ratio, beta=c.momentum, weight_decay=c.weight_decay),
            "adamw": optax.adamw(
                learning_rate, c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=lambda tree: _decaying(tree, c)
            ),
        },
        {name: "muon" if _is_hidden_kernel(name) else "adamw" for name in params},
    )


def _is_hidden_kernel(name: str) -> bool:
    """Return True for the matrices inside layers: Muon is not meant for embeddings, heads, norms and biases."""
    return name.startswith("layers.") and name.endswith(".kernel")


def _decaying(tree: Any, config: OptimizerConfig) -> Any:
    return jax.tree.map(lambda value: config.decay == "all" or len(value.shape) >= 2, tree)


def _decoupled_decay(
    learning_rate: Array | float, weight_decay: float, decays: Mapping[str, bool]
) -> optax.GradientTransformation:
    """Subtract learning_rate * weight_decay * parameter, after the update's own scaling."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        decayed = {
            name: value - learning_rate * weight_decay * params[name] if decays[name] else value
            for name, value in updates.items()
        }
        return decayed, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
