"""Costs of one layer, in PyTorch: bytes and FLOPs counted on the meta device, measured time.

Twin: jaxbench/memory/study/cost_layer.py. Attention sees the whole sequence in one call; the memories read
segment by segment, like a stream.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from jaxbench.measure import worker
from jaxbench.memory.study.cost import ATTENTION, LayerShape, Measured
from torch_ref import devices, nn
from torch_ref.attention import Spans, attention
from torch_ref.memory import blocks


class Attention(torch.nn.Module):
    """Causal attention to the whole sequence, with its projections."""

    def __init__(self, shape: LayerShape, *, implementation: str):
        super().__init__()
        width = shape.num_heads * shape.head_dim
        sizes = (shape.d_model, width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(*sizes, use_bias=False, dtype="float32") for _ in range(3))
        self.o_proj = nn.Linear(width, shape.d_model, use_bias=False, dtype="float32")
        self.num_heads, self.implementation, self.key_block = shape.num_heads, implementation, shape.key_block

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Attention output at each token."""
        heads = (*x.shape[:2], self.num_heads, -1)
        query, key, value = (project(x).reshape(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        attention_out = attention(
            query, key.permute(0, 2, 3, 1), value.transpose(1, 2), Spans(positions, positions),
            implementation=self.implementation, block_size=self.key_block,
        )  # fmt: skip
        return self.o_proj(attention_out.reshape(*x.shape[:2], -1))


class _LiveBytes(TorchDispatchMode):
    """Count the live bytes of tensors made inside it, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak, self._known = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation and count the bytes of its outputs."""
        output = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return output

    def _freed(self, size: int) -> None:
        self.now -= size


def build(layer: str, shape: LayerShape) -> Attention | blocks.Block:
    """Build the module of a layer: naive, blocked, bank or neural."""
    params = shape.initial_params(layer)
    if layer in ATTENTION:
        return nn.load_params(Attention(shape, implementation=ATTENTION[layer]), params)
    return blocks.build(shape.block(layer), params)


def measure(layer: str, shape: LayerShape, length: int, segment: int) -> Measured:
    """Peak of live bytes, bytes of a sequence's state, and FLOPs, counted on the meta device."""
    model = build(layer, shape).requires_grad_(False).to("meta")
    counter, live = FlopCounterMode(display=False), _LiveBytes()
    is_attention = layer in ATTENTION
    size = length if is_attention else min(segment, length)
    # Every segment is like the first: the state has a fixed size.
    with torch.no_grad(), torch.device("meta"):
        x = torch.empty((1, size, shape.d_model))
        state = None if is_attention else model.init_state(1)
        with counter, live:
            output = model(x) if is_attention else model(x, state)
    flops = counter.get_total_flops() * length // size
    if is_attention:
        return Measured(live.peak, 2 * length * shape.num_heads * shape.head_dim * x.element_size(), flops)
    return Measured(live.peak, sum(leaf.nbytes for leaf in tree_leaves(output[1]) if leaf is not None), flops)


def seconds(layer: str, shape: LayerShape, length: int, segment: int, repeats: int, device: str = "cpu") -> list[float]:
    """Measure the times in seconds of forward passes over a sequence, after one warm-up pass that is not counted.

    The sequence and the initial state are on the device before the clock starts.

    Raises:
      ValueError: PyTorch does not see the device.
    """
    devices.check_device(device)
    place = "cuda" if device == "gpu" else device
    model = build(layer, shape).to(place)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((1, length, shape.d_model)).astype(np.float32))
    x = x.to(place)
    with torch.no_grad():
        start = None if layer in ATTENTION else model.init_state(1)

    @torch.no_grad()
    def forward() -> None:
        if layer in ATTENTION:
            model(x)
        else:
            state = start
            for begin in range(0, length, segment):
                _, state, _ = model(x[:, begin : begin + segment], state)
        if place == "cuda":
            torch.cuda.synchronize()

    return worker.timed(forward, repeats)["seconds"]
