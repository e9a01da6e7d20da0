"""Figures of a model on windows of text versus those of its float model: Flax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxbench.quantization.study.windows import Windows

ROWS = 4  # windows per call: their logits are held for both models


def figures(
    model: Any, reference: Any, texts: dict[str, Windows], *, progress: Callable[[int], None] = lambda count: None
) -> dict[str, dict[str, list[float]]]:
    """Compute the figures of every window by text.

    nll: mean negative log-likelihood, nats per token; kl: mean Kullback-Leibler divergence from the reference's
    distribution, nats per token; agreement: share of positions whose most probable token is the reference's; recall: in
    a window that repeats itself, share of the second half's tokens that are the most probable one.

    Args:
      progress: called with the number of windows done.
    """
    graphs, states = zip(*(nnx.split(each) for each in (model, reference)), strict=True)
    found, done = {}, 0
    for name, windows in texts.items():
        parts: dict[str, list[np.ndarray]] = {"nll": [], "kl": [], "agreement": [], "recall": []}
        for start in range(0, len(windows.tokens), ROWS):
            rows = slice(start, start + ROWS)
            seen = _compared(graphs, states, _padded(windows.tokens[rows]))
            seen["recall"] = _recalled(graphs[0], states[0], _padded(windows.repeats[rows]))
            count = len(windows.tokens[rows])
            for figure, value in seen.items():
                parts[figure].append(np.asarray(value, np.float64)[:count])
            progress(done := done + count)
        found[name] = {figure: np.concatenate(values).tolist() for figure, values in parts.items()}
        found[name] |= {"tokens": [windows.tokens.shape[1] - 1] * len(windows.tokens), "bytes": windows.bytes}
    return found


def _padded(tokens: np.ndarray) -> Array:
    """Pad rows to ROWS with copies of the first one."""
    return jnp.asarray(np.concatenate([tokens, np.repeat(tokens[:1], ROWS - len(tokens), axis=0)]))


def _logits(graph: Any, state: Any, tokens: Array) -> Array:
    model = nnx.merge(graph, state)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _ = model.features(tokens, positions)
    return model.logits(hidden[:, :-1]).astype(jnp.float32)


# No argmax below: over a vocabulary it takes XLA:CPU longer than all the rest (docs/xla_cpu.md); a maximum does not.


@functools.partial(jax.jit, static_argnums=0)
def _compared(graphs: tuple, states: tuple, tokens: Array) -> dict[str, Array]:
    own, other = (_logits(graph, state, tokens) for graph, state in zip(graphs, states, strict=True))
    total, other_total = (jax.nn.logsumexp(each, axis=2) for each in (own, other))
    nll = total - jnp.take_along_axis(own, tokens[:, 1:, None], axis=2)[:, :, 0]
    probability = jnp.exp(other - other_total[:, :, None])
    kl = jnp.sum(probability * (other - own), axis=2) - other_total + total
    chosen = jnp.max(jnp.where(other >= jnp.max(other, axis=2, keepdims=True), own, -jnp.inf), axis=2)
    agreement = chosen >= jnp.max(own, axis=2)
    return {"nll": nll.mean(axis=1), "kl": kl.mean(axis=1), "agreement": agreement.mean(axis=1)}


@functools.partial(jax.jit, static_argnums=0)
def _recalled(graph: Any, state: Any, tokens: Array) -> Array:
    half = tokens.shape[1] // 2
    logits, wanted = _logits(graph, state, tokens)[:, half:], tokens[:, half + 1 :, None]
    return (jnp.take_along_axis(logits, wanted, axis=2)[:, :, 0] >= jnp.max(logits, axis=2)).mean(axis=1)
