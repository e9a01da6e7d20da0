"""How rows, heads and chunks lie in memory, and the walk over chunks. Twin: jaxbench/memory/layout.py.

Axis letters: E memories, a row's heads side by side (B * N); C slots of a chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NESTED_FROM = 32  # chunks from which on the backward pass works by groups


def tree_map(function: Callable[..., Any], *trees: Any) -> Any:
    """Return the tree of function(leaf, ...) over leaves at equal places; None is no leaf."""
    first = trees[0]
    if first is None:
        return None
    if not isinstance(first, tuple):
        return function(*trees)
    parts = [tree_map(function, *each) for each in zip(*trees, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)


def gathered(x: Float[Tensor, "B T ..."], index: Int[Tensor, "B S"]) -> Float[Tensor, "B S ..."]:
    """Return the rows of axis 1 that an index names."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def chosen(condition: Bool[Tensor, " E"], one: Float[Tensor, "E ..."], other: Float[Tensor, "E ..."]) -> Tensor:
    """Return `one` where the condition of axis 0 holds, else `other`."""
    return torch.where(condition.reshape(-1, *(1,) * (one.ndim - 1)), one, other)


def merged(x: Float[Tensor, "B N ..."]) -> Float[Tensor, "E ..."]:
    """Lay rows' heads side by side."""
    return x.reshape(-1, *x.shape[2:])


def split(x: Float[Tensor, "E ..."], num_heads: int) -> Float[Tensor, "B N ..."]:
    """Undo `merged`."""
    return x.reshape(-1, num_heads, *x.shape[1:])


def by_memory(x: Float[Tensor, "B T N ..."]) -> Float[Tensor, "E T ..."]:
    """Put tokens behind heads."""
    return merged(x.transpose(1, 2))


def by_row(x: Float[Tensor, "E T ..."], num_heads: int) -> Float[Tensor, "B T N ..."]:
    """Undo `by_memory`."""
    return split(x, num_heads).transpose(1, 2)


def cut(x: Float[Tensor, "E T ..."], size: int) -> Float[Tensor, "L E C ..."]:
    """Cut tokens into L chunks; T is a multiple of size."""
    return x.reshape(len(x), -1, size, *x.shape[2:]).transpose(0, 1)


def joined(x: Float[Tensor, "L E C ..."]) -> Float[Tensor, "E T ..."]:
    """Undo `cut`."""
    return x.transpose(0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def walk(read: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunks: Any) -> tuple[Any, Any]:
    """Return the last carry and every chunk's answer of `carry, answer = read(carry, chunk)` over the leading axis.

    The backward pass keeps the carry before each chunk, and computes the rest of a chunk again; of many chunks it
    keeps the carry before each of about sqrt(n) groups, and goes through a group twice.
    """
    number = _length(chunks)
    if number < NESTED_FROM:
        return _steps(read, carry, chunks)
    group = group_size(number)
    answers = []
    for start in range(0, number, group):
        several = functools.partial(_steps, read)
        few = tree_map(lambda x, at=slice(start, start + group): x[at], chunks)
        carry, answer = rematerialised(several, carry, few)
        answers.append(answer)
    return carry, torch.cat(answers)


def _length(tree: Any) -> int:
    while isinstance(tree, tuple):
        tree = tree[0]
    return len(tree)


def _steps(read: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunks: Any) -> tuple[Any, Any]:
    answers = []
    for i in range(_length(chunks)):
        carry, answer = rematerialised(read, carry, tree_map(lambda x, i=i: x[i], chunks))
        answers.append(answer)
    return carry, torch.stack(answers)


def group_size(number: int) -> int:
    """Return the chunks of a group: about the root of their number, and where that can be a divisor of it."""
    root = math.isqrt(number)
    return next((size for size in range(root, root // 2, -1) if number % size == 0), root)


def rematerialised(read: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunk: Any) -> tuple[Any, Any]:
    """Return read(carry, chunk), whose inner values the backward pass computes again."""
    if not torch.is_grad_enabled():
        return read(carry, chunk)
    return checkpoint(read, carry, chunk, use_reentrant=False, preserve_rng_state=False)
