"""Optimisers by name, from optax, over parameters in a flat {dotted name: array}."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import optax
from jax import Array

from jaxbench.training.step_config import OptimizerConfig, is_matrix


def transform(
    config: OptimizerConfig, learning_rate: Array | float, params: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Optimiser of trained parameters at one learning rate; its state does not depend on the rate.

    With a traced rate, one compiled step serves a whole schedule. An update of AdamW or SGD, weight decay included, is
    proportional to the rate, so ratios of rates in the configuration multiply the updates.
    """
    inner = _transform(config, learning_rate, params)
    ratios = {name: config.rate_ratio(name) for name in params}
    if set(ratios.values()) <= {1.0}:
        return inner

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        moved, state = inner.update(updates, state, params)
        return {name: step * ratios[name] for name, step in moved.items()}, state

    return optax.GradientTransformation(inner.init, update)


def trained(config: OptimizerConfig, params: Mapping[str, Array]) -> dict[str, Array]:
    """Parameters that are trained."""
    return {name: x for name, x in params.items() if config.is_trained(name)}


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
    """Return True for matrices inside layers: Muon is not meant for embeddings, heads, norms and biases.

    A memory's initial weights are one matrix per head; optax would give them to an Adam without weight decay.
    """
    return name.startswith("layers.") and is_matrix(name) and len(value.shape) == 2
