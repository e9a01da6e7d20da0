"""Titans' neural memory as docs/memory.md has it, in numpy: a row, a head and a token after the other.

The inner gradient is backpropagation by hand. Of jaxbench nothing is used but the fields of a configuration and the
names of its parameters; a residual norm is left out. `worst` compares any two trees of arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import scipy.special

QK_EPS = 1e-6  # added to the squared length that a query or a key is divided by the root of


def sigmoid(z: np.ndarray) -> np.ndarray:
    """Return the logistic function."""
    return 1.0 / (1.0 + np.exp(-z))


def activate(kind: str, z: np.ndarray) -> np.ndarray:
    """Return SiLU, GELU (gelu_erf), or GELU in its tanh form."""
    if kind == "silu":
        return z * sigmoid(z)
    if kind == "gelu_erf":
        return 0.5 * z * (1.0 + scipy.special.erf(z / np.sqrt(2.0)))
    return 0.5 * z * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (z + 0.044715 * z**3)))


def slope(kind: str, z: np.ndarray) -> np.ndarray:
    """Return the derivative of `activate`, by a complex step, which loses no digit."""
    return activate(kind, z + 1e-30j).imag / 1e-30


def layer(config: Any, params: Mapping[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, list, list]:
    """Read rows [B T D] from the start: return answers [B T D], and by layer the last kernels and momenta [B N I O]."""
    answers, memories = zip(*(_row(config, params, row) for row in x))
    kernels, momenta = (
        [np.stack([[head[part][i] for head in row] for row in memories]) for i in range(config.depth)]
        for part in range(2)
    )
    return np.stack(answers), kernels, momenta


def _row(c: Any, params: Mapping[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, list[tuple[list, list]]]:
    if c.num_persistent:
        x = np.concatenate([params["persistent"], x])
    if not c.depth:  # no memory: the queries are the answers
        query = _stream(c, params, x, "q")
        query = query / np.sqrt(np.sum(query**2, axis=2, keepdims=True) + QK_EPS) if c.qk_norm else query
        return _told(c, params, x, query), [([], [])] * c.num_heads
    query, key, value = (_stream(c, params, x, name) for name in "qkv")
    if c.qk_norm:
        query, key = (each / np.sqrt(np.sum(each**2, axis=2, keepdims=True) + QK_EPS) for each in (query, key))
    eta, theta, alpha = (_gate(c, params, x, name) for name in ("eta", "theta", "alpha"))
    answers, memories = [], []
    for n in range(c.num_heads):
        first = [params[f"memory.layers.{i}.kernel"][n] for i in range(c.depth)]
        told, *memory = _head(c, first, *(each[:, n] for each in (query, key, value, eta, theta, alpha)))
        answers.append(told)
        memories.append(tuple(memory))
    return _told(c, params, x, np.stack(answers, axis=1))[c.num_persistent :], memories


def _told(c: Any, params: Mapping[str, np.ndarray], x: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """Return the heads' answers [T N H] as the stream's [T D]."""
    if c.output == "gated":
        root = np.sqrt(np.mean(answer**2, axis=2, keepdims=True) + c.norm_eps)
        gate = activate("silu", x @ params["g_proj.kernel"])
        answer = answer / root * params["out_norm.scale"] * gate.reshape(answer.shape)
    return answer.reshape(len(x), -1) @ params["o_proj.kernel"]


def _stream(c: Any, params: Mapping[str, np.ndarray], x: np.ndarray, name: str) -> np.ndarray:
    """Return queries, keys or values [T N H], before they are brought to length 1."""
    projected = x @ params[f"{name}_proj.kernel"]
    if c.conv_size > 1:
        taps, wide = params[f"{name}_conv.kernel"], np.pad(projected, ((c.conv_size - 1, 0), (0, 0)))
        projected = np.stack([np.sum(taps * wide[t : t + c.conv_size], axis=0) for t in range(len(x))])
    projected = projected if c.qkv_activation == "none" else activate("silu", projected)
    return projected.reshape(len(x), c.num_heads, c.head_dim)


def _gate(c: Any, params: Mapping[str, np.ndarray], x: np.ndarray, name: str) -> np.ndarray:
    """Return a gate of every token and head [T N]."""
    if not {"eta": c.momentum, "theta": True, "alpha": c.forgetting}[name]:
        return np.zeros((len(x), c.num_heads))
    limit = c.max_theta if name == "theta" else 1.0
    return limit * sigmoid(x @ params[f"{name}.kernel"] + params[f"{name}.bias"])


def _head(c: Any, weights: list, query: Any, key: Any, value: Any, eta: Any, theta: Any, alpha: Any) -> tuple:
    """Return one head's answers [T H] and its last weights and momentum: equations 12 to 16."""
    momentum, answers = [np.zeros_like(each) for each in weights], []
    for t in range(len(query)):
        if t % c.chunk_size == 0:
            anchor = weights
        update = gradient(c, anchor, key[t], value[t])
        momentum = [eta[t] * s - theta[t] * u for s, u in zip(momentum, update, strict=True)]
        before, weights = weights, [(1.0 - alpha[t]) * w + s for w, s in zip(weights, momentum, strict=True)]
        answering = {"token": weights, "before": before, "chunk": anchor}[c.read]
        answers.append(forward(c, answering, query[t])[1][-1])
    return np.stack(answers), weights, momentum if c.momentum else [np.zeros_like(each) for each in weights]


def forward(c: Any, weights: list, x: np.ndarray) -> tuple[list, list]:
    """Return what goes into each layer of a memory network, and what comes out."""
    inputs, outputs = [], []
    for i, kernel in enumerate(weights):
        inputs.append(activate(c.activation, outputs[-1]) if i else x)
        outputs.append(inputs[-1] @ kernel)
    return inputs, outputs


def gradient(c: Any, weights: list, key: np.ndarray, value: np.ndarray) -> list:
    """Return the gradient of ||M(key) - value||^2 by every kernel, shortened to max_update_norm."""
    inputs, outputs = forward(c, weights, key)
    delta = 2.0 * (outputs[-1] - value) / (1.0 if c.loss_reduction == "sum" else c.head_dim)
    found = []
    for i in reversed(range(len(weights))):
        found.insert(0, np.outer(inputs[i], delta))
        if i:
            delta = (weights[i] @ delta) * slope(c.activation, outputs[i - 1])
    length = np.sqrt(sum(np.sum(each**2) for each in found))
    share = 1.0 if c.max_update_norm is None else min(1.0, c.max_update_norm / length)
    return [share * each for each in found]


def worst(one, other):
    """Return the largest difference of two trees, relative to the largest value of each leaf."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)) for a, b in map(_arrays, pairs))


def _arrays(pair):
    return [np.asarray(x, np.float64) for x in pair]
