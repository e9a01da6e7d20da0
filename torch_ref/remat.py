"""What the backward pass computes again: applied to a decoder from outside, as its layers know nothing of it.

Twin: jaxbench/remat.py.
Differs from the twin: PyTorch's checkpoints have no names for values and no place for them in the host's memory, so
that the policies names and offload are refused. A block's keys and values, which are of its cache, stay until the
decoder's forward pass is over; the backward pass does not keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jaxbench import philox

POLICIES = ("none", "block", "group")


def apply(model: Any, *, policy: str, group: int = 1, names: Sequence[str] = ()) -> Any:
    """Make a decoder compute its blocks again in the backward pass, and return it.

    Args:
      policy: what the backward pass computes again. none: nothing. block: each block keeps its input only. group:
        `group` blocks in a row keep the first one's input.
      group: blocks computed again together, >= 1 (policy group).
      names: of the twin's policies; none of this one's takes names.

    Raises:
      ValueError: a policy that PyTorch does not have.
    """
    if policy not in POLICIES:
        raise ValueError(
            f"remat: policy={policy!r} with names {list(names)} is not in torch_ref, which has {', '.join(POLICIES)}: "
            "PyTorch's checkpoints have no names for values; use --backend=flax"
        )
    layers, sites = list(model.layers), philox.dropout_sites(len(model.layers))
    for layer in layers:
        layer.__dict__.pop("forward", None)  # of an earlier policy: the class's own is found again
    size = {"none": 0, "group": group}.get(policy, 1)
    for start in range(0, len(layers) if size else 0, size or 1):
        part = slice(start, start + size)
        _Group(layers[part], sites[part])
    return model


def checkpointed(function: Callable[..., Any], names: str) -> Callable[..., Any]:
    """Function whose inner values are computed again in the backward pass (torch.utils.checkpoint); names: none.

    Its dropout masks are Philox's of key, step and site, so that no generator's state is kept for them.

    Raises:
      ValueError: names to keep.
    """
    if names:
        raise ValueError(f"remat: names {names!r}, wanted none: PyTorch's checkpoints have no names for values")

    def run(*args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)

    return run


def run_blocks(
    layers: list[Any], sites: list[Any], hidden: Float[Tensor, "B T D"], context: Any, *, group: int, names: str
) -> tuple[Float[Tensor, "B T D"], list[tuple[Float[Tensor, "B K H S"], Float[Tensor, "B K S H"]]]]:
    """Residual stream behind blocks without a cache, `group` of them in one checkpoint, and their keys and values."""
    keys_values: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(layers), group):
        part = slice(start, start + group)

        def run(hidden: Tensor, part: slice = part) -> tuple[Tensor, list]:
            cached = []
            for layer, site in zip(layers[part], sites[part]):
                hidden, key_value = type(layer).forward(layer, hidden, context, site)
                cached.append(key_value)
            return hidden, cached

        hidden, cached = checkpointed(run, names)(hidden)
        keys_values += cached
    return hidden, keys_values


class _Group:
    """Blocks in a row that are one checkpoint: called in turn, the first computes all, each hands on its own entry."""

    def __init__(self, layers: list[Any], sites: list[Any]):
        self.layers, self.sites, self.entries = layers, sites, []
        for index, layer in enumerate(layers):
            layer.forward = self._forward_of(index)

    def _forward_of(self, index: int) -> Callable[..., tuple[Tensor, Any]]:
        """Forward pass of one of the blocks; with a cache or without gradients it is the block's own."""
        layer = self.layers[index]

        def forward(hidden: Tensor, context: Any, sites: Any, cached: tuple | None = None) -> tuple[Tensor, Any]:
            if cached is not None or not torch.is_grad_enabled():
                return type(layer).forward(layer, hidden, context, sites, cached)
            if index == 0:
                size = len(self.layers)
                hidden, self.entries = run_blocks(self.layers, self.sites, hidden, context, group=size, names="")
            return hidden, self.entries.pop(0)

        return forward
