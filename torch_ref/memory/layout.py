"""Layout of rows, heads and chunks in arrays; the rematerialised scan over chunks. Twin: jaxbench/memory/layout.py.

Axis letters: E memories, rows and heads merged (B * N); C token slots of a chunk; L chunks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

NESTED_FROM = 32  # from this many chunks on, rematerialisation is nested: groups of chunks, chunks of a group


def tree_map(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply a function to the leaves of trees of the same structure; None is not a leaf."""
    first = trees[0]
    if first is None:
        return None
    if not isinstance(first, tuple):
        return function(*trees)
    parts = [tree_map(function, *each) for each in zip(*trees, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)


def _unnarrowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function whose products keep their operands' types: autocast would narrow them, as nothing in JAX."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = next(leaf.device.type for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor))
        if device == "meta":  # which autocast does not know
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run


def gathered(x: Shaped[Tensor, "B T ..."], index: Int[Tensor, "B S"]) -> Shaped[Tensor, "B S ..."]:
    """Gather entries along axis 1, each row by its own indices."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def select_rows(condition: Bool[Tensor, " E"], new: Any, old: Any) -> Any:
    """Select `new` in the rows (axis 0) where the condition holds, else `old`: trees of arrays [E ...]."""
    return tree_map(lambda new, old: torch.where(condition.reshape(-1, *(1,) * (new.ndim - 1)), new, old), new, old)


def reset_rows(state: Any, is_reset: Bool[Tensor, " B"], init_state: Callable[[int], Any]) -> Any:
    """Reset some rows of a state, a tree of tensors [B ...], to those of init_state(B).

    Arguments, results and errors are the twin's.
    """
    num_rows = next(len(leaf) for leaf in pytree.tree_leaves(state) if leaf is not None)
    if tuple(is_reset.shape) != (num_rows,):
        raise ValueError(f"reset: is_reset is {tuple(is_reset.shape)}, wanted {(num_rows,)}, one for each row")
    return select_rows(is_reset, init_state(num_rows), state)


def left_align(
    x: Float[Tensor, "B T D"], is_token: Bool[Tensor, "B T"] | None
) -> tuple[Float[Tensor, "B T D"], Int[Tensor, " B"]]:
    """Move padding behind the tokens of each row, which keep their order; also the number of tokens of each row.

    Arguments, results and errors are the twin's.
    """
    if is_token is None:
        return x, torch.full((len(x),), x.shape[1], dtype=torch.int32, device=x.device)
    if tuple(is_token.shape) != tuple(x.shape[:2]):
        raise ValueError(f"memory: is_token is {tuple(is_token.shape)}, wanted {tuple(x.shape[:2])} (rows, tokens)")
    order = torch.argsort((~is_token).to(torch.int32), dim=1, stable=True)
    return gathered(x, order), is_token.sum(dim=1).to(torch.int32)


def restore_padding(x: Float[Tensor, "B T ..."], is_token: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B T ..."]:
    """Undo `left_align`: each token's value at its place, zeros at padding."""
    if is_token is None:
        return x
    back = gathered(x, (torch.cumsum(is_token, dim=1) - 1).clamp(min=0))
    return torch.where(is_token.reshape(*is_token.shape, *(1,) * (x.ndim - 2)), back, back.new_zeros(()))


def merge_heads(x: Shaped[Tensor, "B N ..."]) -> Shaped[Tensor, "E ..."]:
    """Merge rows and heads into one axis of memories, E = B * N."""
    return x.reshape(-1, *x.shape[2:])


def split_heads(x: Shaped[Tensor, "E ..."], num_heads: int) -> Shaped[Tensor, "B N ..."]:
    """Undo `merge_heads`."""
    return x.reshape(-1, num_heads, *x.shape[1:])


def heads_first(x: Shaped[Tensor, "B T N ..."]) -> Shaped[Tensor, "E T ..."]:
    """Transpose tokens behind heads and merge rows and heads."""
    return merge_heads(x.transpose(1, 2))


def tokens_first(x: Shaped[Tensor, "E T ..."], num_heads: int) -> Shaped[Tensor, "B T N ..."]:
    """Undo `heads_first`."""
    return split_heads(x, num_heads).transpose(1, 2)


def split_chunks(x: Shaped[Tensor, "E T ..."], size: int) -> Shaped[Tensor, "L E C ..."]:
    """Split the token axis into L chunks of `size` tokens, chunks first; T is a multiple of size."""
    return x.reshape(len(x), -1, size, *x.shape[2:]).transpose(0, 1)


def join_chunks(x: Shaped[Tensor, "L E C ..."]) -> Shaped[Tensor, "E T ..."]:
    """Undo `split_chunks`."""
    return x.transpose(0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def scan_chunks(read: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunks: Any) -> tuple[Any, Any]:
    """Scan `carry, output = read(carry, chunk)` over the leading axis, with rematerialisation.

    Arguments, results and errors are the twin's.
    """
    num_chunks = len(pytree.tree_leaves(chunks)[0])
    if num_chunks < NESTED_FROM:
        return _scan(read, carry, chunks)
    group = group_size(num_chunks)
    outputs = []
    for start in range(0, num_chunks, group):
        read_group = functools.partial(_scan, read)
        members = tree_map(lambda x, at=slice(start, start + group): x[at], chunks)
        carry, output = rematerialised(read_group, carry, members)
        outputs.append(output)
    return carry, torch.cat(outputs)


def _scan(read: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunks: Any) -> tuple[Any, Any]:
    outputs = []
    for i in range(len(pytree.tree_leaves(chunks)[0])):
        carry, output = rematerialised(read, carry, tree_map(lambda x, i=i: x[i], chunks))
        outputs.append(output)
    return carry, torch.stack(outputs)


def group_size(num_chunks: int) -> int:
    """Chunks in a group of nested rematerialisation: about sqrt(num_chunks), a divisor of it if one is near."""
    root = math.isqrt(num_chunks)
    return next((size for size in range(root, root // 2, -1) if num_chunks % size == 0), root)


def rematerialised(read: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunk: Any) -> tuple[Any, Any]:
    """Compute read(carry, chunk) with gradient checkpointing: the backward pass recomputes the values inside."""
    if not torch.is_grad_enabled():
        return read(carry, chunk)
    return checkpoint(read, carry, chunk, use_reentrant=False, preserve_rng_state=False)
