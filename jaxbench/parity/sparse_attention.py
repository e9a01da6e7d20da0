"""Parity of block-sparse attention: outputs and gradients of JAX, PyTorch and a dense mask in numpy, in float64.

The dense computation is written from the definition and shares only the pattern itself with the two.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

import torch_ref.attention
import torch_ref.sparse_attention
from jaxbench import attention, sparse_attention
from jaxbench.block_pattern import BlockPattern
from jaxbench.parity import cases, distance, gates

TOLERANCE = 1e-12  # relative 2-norm; measured 5e-16
BATCH, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 8


class Inputs(NamedTuple):
    """Arrays of one call, and the weights of its outputs in the loss."""

    query: np.ndarray  # [B T N H]
    key: np.ndarray  # [B K H T]
    value: np.ndarray  # [B K T H]
    spans: tuple[np.ndarray, ...]  # the fields of Spans
    weight: np.ndarray  # [B T N H]


def inputs(seed: int, *, length: int) -> Inputs:
    """Random arrays; row 0 has two documents, row 1 begins and ends with padding."""
    random = np.random.default_rng(seed)
    shapes = ((BATCH, length, HEADS, WIDTH), (BATCH, KV_HEADS, WIDTH, length), (BATCH, KV_HEADS, length, WIDTH))
    positions, segments = np.tile(np.arange(length, dtype=np.int32), (BATCH, 1)), np.ones((BATCH, length), np.int32)
    cut, begin, end = random.integers(1, length), random.integers(1, length // 2), random.integers(1, length // 4)
    positions[0, cut:] -= cut
    segments[0, cut:] = 2
    positions[1] -= begin
    positions[1, :begin] = positions[1, length - end :] = -1
    segments[1, positions[1] < 0] = 0
    spans = (positions, positions, segments, segments)
    return Inputs(*map(random.standard_normal, shapes), spans, random.standard_normal(shapes[0]))


def dense(pattern: BlockPattern, case: Inputs) -> np.ndarray:
    """Compute the attention output [B T N H] with a mask over all slots, row by row and head by head."""
    return _each_head(pattern, case, lambda mixed, *_: {"output": mixed})["output"]


def dense_gradients(pattern: BlockPattern, case: Inputs) -> tuple[np.ndarray, ...]:
    """Gradients of sum(output * weight) with respect to query, key and value, derived by hand."""

    def backward(mixed, weights, query, key, value, given):
        inner = given @ value.T
        scores = weights * (inner - np.sum(inner * weights, axis=1, keepdims=True)) / math.sqrt(WIDTH)
        return {"query": scores @ key, "key": scores.T @ query, "value": weights.T @ given}

    found = _each_head(pattern, case, backward)
    grouped = {
        name: found[name].reshape(*found[name].shape[:2], KV_HEADS, -1, WIDTH).sum(3) for name in ("key", "value")
    }
    return found["query"], grouped["key"].transpose(0, 2, 3, 1), grouped["value"].transpose(0, 2, 1, 3)


def _each_head(pattern: BlockPattern, case: Inputs, work) -> dict[str, np.ndarray]:
    """Apply `work` to each head of each row, which returns arrays [T H] by name; stack them as [B T N H]."""
    batch, length, heads, _ = case.query.shape
    found: dict[str, np.ndarray] = {}
    for row, head in np.ndindex(batch, heads):
        group = head // (heads // KV_HEADS)
        query, key, value = case.query[row, :, head], case.key[row, group].T, case.value[row, group]
        positions, _, segments, _ = (x[row] for x in case.spans)
        mask = (positions[None] >= 0) & (positions[None] <= positions[:, None]) & pattern.mask(length)
        mask &= segments[None] == segments[:, None]
        weights = np.where(mask, np.exp(query @ key.T / math.sqrt(WIDTH)), 0.0)
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total > 0, total, 1.0)
        for name, part in work(weights @ value, weights, query, key, value, case.weight[row, :, head]).items():
            found.setdefault(name, np.zeros((batch, length, heads, part.shape[1])))[row, :, head] = part
    return found


def in_jax(pattern: BlockPattern, case: Inputs) -> dict[str, np.ndarray]:
    """Output and gradients in JAX."""

    @jax.jit
    def run(arrays, spans, weight):
        call = functools.partial(sparse_attention.block_sparse_attention, spans=spans, pattern=pattern)
        output, pull = jax.vjp(call, *arrays)
        return output, *pull(weight)

    spans = attention.Spans(*map(jnp.asarray, case.spans))
    return _named(run((case.query, case.key, case.value), spans, case.weight))


def in_torch(pattern: BlockPattern, case: Inputs) -> dict[str, np.ndarray]:
    """Output and gradients in PyTorch."""
    arrays = [torch.tensor(x, requires_grad=True) for x in (case.query, case.key, case.value)]
    spans = torch_ref.attention.Spans(*map(torch.tensor, case.spans))
    output = torch_ref.sparse_attention.block_sparse_attention(*arrays, spans, pattern=pattern)
    output.backward(torch.tensor(case.weight))
    return _named([output.detach(), *(x.grad for x in arrays)])


def _named(values) -> dict[str, np.ndarray]:
    return dict(zip(("output", "query", "key", "value"), map(np.asarray, values), strict=True))


def gates_of(case: cases.Case) -> list[gates.Gate]:
    """Gates of a case, whose configuration is the pattern: each backend versus the dense mask."""
    given = inputs(case.seed, length=case.length)
    wanted = _named([dense(case.config, given), *dense_gradients(case.config, given)])
    found = []
    for name, run in (("flax", in_jax), ("torch", in_torch)):
        values = run(case.config, given)
        compared = distance.compare(values, wanted, kind="block-sparse attention")
        worst = max(compared.entries, key=lambda entry: entry.error)
        what = f"{name}: output and gradients against a dense mask, float64"
        found.append(gates.Gate("P1", what, worst.error <= TOLERANCE, worst.error, TOLERANCE, worst.name))
    return found
