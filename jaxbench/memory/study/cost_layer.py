"""Costs of one layer, in JAX: bytes from the compiled program, measured time.

Twin: torch_ref/memory/study/cost_layer.py.

Attention sees the whole sequence in one call. The memories read segment by segment, like a stream, and the program is
that of one segment: its size does not depend on the number of segments.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxbench import devices, nn
from jaxbench.attention import Spans, attention
from jaxbench.measure import worker
from jaxbench.memory import blocks
from jaxbench.memory.study.cost import ATTENTION, LayerShape, Measured


class Attention(nnx.Module):
    """Causal attention to the whole sequence, with its projections."""

    def __init__(self, shape: LayerShape, *, implementation: str):
        width = shape.num_heads * shape.head_dim
        sizes = (shape.d_model, width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(*sizes, use_bias=False, dtype="float32") for _ in range(3))
        self.o_proj = nn.Linear(width, shape.d_model, use_bias=False, dtype="float32")
        self.num_heads, self.implementation, self.key_block = shape.num_heads, implementation, shape.key_block

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Attention output at each token."""
        heads = (*x.shape[:2], self.num_heads, -1)
        query, key, value = (project(x).reshape(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        positions = jnp.broadcast_to(jnp.arange(x.shape[1])[None], x.shape[:2])
        attention_out = attention(
            query, key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3), Spans(positions, positions),
            implementation=self.implementation, block_size=self.key_block,
        )  # fmt: skip
        return self.o_proj(attention_out.reshape(*x.shape[:2], -1))


def build(layer: str, shape: LayerShape) -> Attention | blocks.Block:
    """Build the module of a layer: naive, blocked, bank or neural."""
    params = shape.initial_params(layer)
    if layer in ATTENTION:
        return nn.load_params(Attention(shape, implementation=ATTENTION[layer]), params)
    return blocks.build(shape.block(layer), params)


def measure(layer: str, shape: LayerShape, length: int, segment: int) -> Measured:
    """Temporary bytes of the compiled program, and bytes of a sequence's state."""
    program, _, state_bytes = _program(layer, shape, length, segment)
    return Measured(program.memory_analysis().temp_size_in_bytes, state_bytes, None)


def seconds(layer: str, shape: LayerShape, length: int, segment: int, repeats: int, device: str = "cpu") -> list[float]:
    """Measure the times in seconds of forward passes over a sequence, after one warm-up pass that is not counted.

    The sequence and the initial state are on the device before the clock starts.

    Raises:
      ValueError: JAX's default platform is not the device.
    """
    devices.check_device(device)
    program, (params, *states), _ = _program(layer, shape, length, segment)
    x = np.random.default_rng(0).standard_normal((1, length, shape.d_model)).astype(np.float32)
    size = min(segment, length) if states else length
    parts = jax.block_until_ready([jax.device_put(x[:, begin : begin + size]) for begin in range(0, length, size)])

    def forward() -> None:
        own = states
        for part in parts:
            last, *own = program(params, part, *own) if own else (program(params, part),)
        jax.block_until_ready(last)

    return worker.timed(forward, repeats)["seconds"]


def _program(layer: str, shape: LayerShape, length: int, segment: int) -> tuple[jax.stages.Compiled, tuple, int]:
    """Compile the forward pass; also return its first arguments, and the bytes of the state after the sequence."""
    model = build(layer, shape)
    graph, params = nnx.split(model)
    if layer in ATTENTION:
        x = jax.ShapeDtypeStruct((1, length, shape.d_model), jnp.float32)
        program = jax.jit(lambda params, x: nnx.merge(graph, params)(x)).lower(params, x).compile()
        return program, (params,), 2 * length * shape.num_heads * shape.head_dim * x.dtype.itemsize
    x = jax.ShapeDtypeStruct((1, min(segment, length), shape.d_model), jnp.float32)
    state = model.init_state(1)
    lowered = jax.jit(lambda params, x, state: nnx.merge(graph, params)(x, state)[:2]).lower(params, x, state)
    behind = jax.tree.leaves(lowered.out_info[1])
    return lowered.compile(), (params, state), sum(leaf.size * leaf.dtype.itemsize for leaf in behind)
