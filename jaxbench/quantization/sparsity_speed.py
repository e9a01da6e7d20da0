"""Time saved by sparsity: a feed-forward layer with pruned weights, and block-sparse attention, versus dense.

All arms of a row run in one process, one call each in turn, in an order that rotates and reverses from round to round.
A ratio is the mean over rounds with its t-interval, which does not cover variation between processes. Each arm reports
the FLOPs and bytes that XLA counts in its compiled program, where a real saving shows first.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

from jaxbench import attention, functional
from jaxbench.block_pattern import BlockPattern
from jaxbench.measure import verdicts
from jaxbench.quantization import pruning
from jaxbench.sparse_attention import block_sparse_attention

NAMES = ("gate_proj", "up_proj", "down_proj")


class Arm(NamedTuple):
    """One compiled program on its arguments."""

    name: str
    run: Callable[[], Any]  # returns when the result is there
    flops: float
    bytes: float  # read and written, as XLA counts them


class Row(NamedTuple):
    """One arm's figures versus those of the first arm."""

    work: str
    arm: str
    flops: float
    bytes: float
    seconds: float  # median over rounds
    ratio: float  # how many times faster than the first arm
    low: float  # ends of its 95 % interval over rounds
    high: float


def feed_forward_arms(num_tokens: int, d_model: int, d_ff: int, *, seed: int = 0) -> list[Arm]:
    """A SwiGLU layer in float32: dense; half of its weights zero, in three ways of storing them; half of its units."""
    random = np.random.default_rng(seed)
    shapes = ((d_model, d_ff), (d_model, d_ff), (d_ff, d_model))
    params = {
        f"layers.0.mlp.{name}.kernel": random.standard_normal(shape, dtype=np.float32) / math.sqrt(shape[0])
        for name, shape in zip(NAMES, shapes, strict=True)
    }
    x = jnp.asarray(random.standard_normal((num_tokens, d_model), dtype=np.float32))
    values = pruning.scores(params)
    half = pruning.apply(params, pruning.smallest_fraction(values, 0.5, scope="matrix"))
    groups = pruning.apply(params, pruning.largest_of_groups(values, 2, 4))
    narrow = [value[:, : d_ff // 2] for value in list(params.values())[:2]] + [list(params.values())[2][: d_ff // 2]]
    stored = [sparse.BCOO.fromdense(value.T) for value in half.values()]
    return [
        compiled("dense", _feed_forward, x, *params.values()),
        compiled("50 % unstructured, stored dense", _feed_forward, x, *half.values()),
        compiled("2:4, stored dense", _feed_forward, x, *groups.values()),
        compiled("50 % unstructured, stored sparse (BCOO)", _stored_sparse, x, *stored),
        compiled("structured, half of the units", _feed_forward, x, *narrow),
    ]


def attention_arms(
    length: int, pattern: BlockPattern, *, num_heads: int, num_kv_heads: int, head_dim: int, seed: int = 0
) -> list[Arm]:
    """Causal attention over one row in float32: dense, the same with an online softmax, and block-sparse."""
    random = np.random.default_rng(seed)
    shapes = (1, length, num_heads, head_dim), (1, num_kv_heads, head_dim, length), (1, num_kv_heads, length, head_dim)
    arrays = [jnp.asarray(random.standard_normal(shape, dtype=np.float32)) for shape in shapes]
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    spans = attention.Spans(positions, positions)
    dense = functools.partial(attention.attention, is_ordered=True)
    name = f"block-sparse, {pattern.density(length):.0%} of the blocks"
    return [
        compiled("dense", dense, *arrays, spans),
        compiled("all blocks, online softmax", functools.partial(dense, implementation="blocked"), *arrays, spans),
        compiled(name, functools.partial(block_sparse_attention, pattern=pattern), *arrays, spans),
    ]


def compiled(name: str, call: Callable[..., Any], *args: Any) -> Arm:
    """Arm of a function, compiled for its arguments."""
    program = jax.jit(call).lower(*args).compile()
    cost = program.cost_analysis()
    return Arm(name, lambda: jax.block_until_ready(program(*args)), cost["flops"], cost["bytes accessed"])


def measure(
    work: str, arms: Sequence[Arm], *, rounds: int, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[Row]:
    """Time the arms in turn, by the median of `repeats` calls per visit; the first arm is the baseline.

    Raises:
      ValueError: fewer than two rounds.
    """
    if rounds < 2:
        raise ValueError(f"speed: rounds={rounds} give no interval, wanted 2 or more")
    seconds: list[list[float]] = [[] for _ in arms]
    for arm in arms:
        arm.run()
    for visit in orders(len(arms), rounds):
        for index in visit:
            seconds[index].append(_visit(arms[index].run, repeats, clock))
    rows = []
    for arm, own in zip(arms, seconds, strict=True):
        ratios = [math.log(base / mine) for base, mine in zip(seconds[0], own, strict=True)]
        ratio, low, high = verdicts.t_interval(ratios).ratio()
        rows.append(Row(work, arm.name, arm.flops, arm.bytes, verdicts.median(own), ratio, low, high))
    return rows


def orders(count: int, rounds: int) -> list[list[int]]:
    """Order of the arms in each round: the first one rotates, and every second round runs backwards."""
    found = []
    for turn in range(rounds):
        order = [(turn // 2 + i) % count for i in range(count)]
        found.append(order[::-1] if turn % 2 else order)
    return found


def table(rows: Sequence[Row]) -> str:
    """Rows as text, one per line."""
    lines = [f"{'work':<32} {'arm':<42} {'GFLOP':>9} {'MB':>9} {'ms':>9}  times as fast [95 %]"]
    for r in rows:
        shown = f"{r.ratio:.2f} [{r.low:.2f}, {r.high:.2f}]" if r.arm != "dense" else "1"
        numbers = f"{r.flops / 1e9:>9.4f} {r.bytes / 1e6:>9.2f} {r.seconds * 1e3:>9.3f}"
        lines.append(f"{r.work:<32} {r.arm:<42} {numbers}  {shown}")
    return "\n".join(lines)


def _visit(run: Callable[[], Any], repeats: int, clock: Callable[[], float]) -> float:
    samples = []
    for _ in range(repeats):
        start = clock()
        run()
        samples.append(clock() - start)
    return verdicts.median(samples)


def _feed_forward(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    activated = jax.nn.silu(functional.matmul(x, gate)) * functional.matmul(x, up)
    return functional.matmul(activated, down)


def _stored_sparse(x: jax.Array, gate: Any, up: Any, down: Any) -> jax.Array:
    """Feed-forward layer whose kernels, (out, in) here, keep coordinates and values of their nonzero weights."""
    activated = jax.nn.silu(gate @ x.T) * (up @ x.T)
    return (down @ activated).T
