"""Rematerialisation in the backward pass, applied to a decoder from outside, so that its layers need not know.

Twin: jaxbench/remat.py.
Differs from the twin: PyTorch's checkpoints can neither name values nor keep them in host memory, so that the policies
names and offload are refused. A block's keys and values, its cache entry, are kept until the end of the decoder's
forward pass, but not for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

POLICIES = ("none", "block", "group")


def apply(model: Any, *, policy: str, group: int = 1, names: Sequence[str] = ()) -> Any:
    """Make a decoder recompute its blocks in the backward pass, and return it.

    Args:
      policy: what the backward pass recomputes. none: nothing. block: each block keeps only its input. group: `group`
        consecutive blocks keep only the first one's input.
      group: blocks recomputed together, >= 1 (policy group).
      names: for the twin's policies; no policy here takes names.

    Raises:
      ValueError: a policy that PyTorch does not have, or group < 1.
    """
    if policy not in POLICIES:
        raise ValueError(
            f"remat: policy={policy!r} with names {list(names)} is not in torch_ref, which has {', '.join(POLICIES)}: "
            "PyTorch's checkpoints have no names for values; use --backend=flax"
        )
    if policy == "group" and group < 1:
        raise ValueError(f"remat: policy='group' with group={group}, wanted at least 1 block")
    model.remat_group = {"none": 0, "group": group}.get(policy, 1)
    model.remat_names, model.remat_offloads = (), False
    return model


def checkpointed(function: Callable[..., Any], names: Sequence[str], *, offload: bool) -> Callable[..., Any]:
    """Wrap a function so that the backward pass recomputes its inner values (torch.utils.checkpoint); names: none.

    Its dropout masks come from Philox with key, step and site, so that no generator's state is kept for them.
    offload: for the twin; without names nothing is kept.

    Raises:
      ValueError: names to keep.
    """
    if names:
        raise ValueError(
            f"remat: names {','.join(names)!r}, wanted none: PyTorch's checkpoints have no names for values"
        )

    def run(*args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)

    return run


def run_blocks(
    layers: list[Any],
    sites: list[Any],
    hidden: Float[Tensor, "B T D"],
    context: Any,
    *,
    group: int,
    names: Sequence[str],
    offload: bool,
) -> tuple[Float[Tensor, "B T D"], list[tuple[Float[Tensor, "B K H S"], Float[Tensor, "B K S H"]]]]:
    """Residual stream after blocks without a cache, `group` of them per checkpoint, and their keys and values."""
    keys_values: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(layers), group):
        part = slice(start, start + group)

        def run(hidden: Tensor, part: slice = part) -> tuple[Tensor, list]:
            cached = []
            for layer, site in zip(layers[part], sites[part]):
                hidden, key_value = layer(hidden, context, site)
                cached.append(key_value)
            return hidden, cached

        hidden, cached = checkpointed(run, names, offload=offload)(hidden)
        keys_values += cached
    return hidden, keys_values
