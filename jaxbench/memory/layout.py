"""How rows, heads and chunks lie in memory, and the walk over chunks. Twin: torch_ref/memory/layout.py.

Axis letters: E memories, a row's heads side by side (B * N); C slots of a chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

NESTED_FROM = 32  # chunks from which on the backward pass works by groups


def tree_map(function: Callable[..., Any], *trees: Any) -> Any:
    """Return the tree of function(leaf, ...) over leaves at equal places; None is no leaf."""
    return jax.tree.map(function, *trees)


def gathered(x: Float[Array, "B T ..."], index: Int[Array, "B S"]) -> Float[Array, "B S ..."]:
    """Return the rows of axis 1 that an index names."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)


def chosen(condition: Bool[Array, " E"], one: Float[Array, "E ..."], other: Float[Array, "E ..."]) -> Array:
    """Return `one` where the condition of axis 0 holds, else `other`."""
    return jnp.where(condition.reshape(-1, *(1,) * (one.ndim - 1)), one, other)


def merged(x: Float[Array, "B N ..."]) -> Float[Array, "E ..."]:
    """Lay rows' heads side by side."""
    return x.reshape(-1, *x.shape[2:])


def split(x: Float[Array, "E ..."], num_heads: int) -> Float[Array, "B N ..."]:
    """Undo `merged`."""
    return x.reshape(-1, num_heads, *x.shape[1:])


def by_memory(x: Float[Array, "B T N ..."]) -> Float[Array, "E T ..."]:
    """Put tokens behind heads."""
    return merged(jnp.swapaxes(x, 1, 2))


def by_row(x: Float[Array, "E T ..."], num_heads: int) -> Float[Array, "B T N ..."]:
    """Undo `by_memory`."""
    return jnp.swapaxes(split(x, num_heads), 1, 2)


def cut(x: Float[Array, "E T ..."], size: int) -> Float[Array, "L E C ..."]:
    """Cut tokens into L chunks; T is a multiple of size."""
    return jnp.swapaxes(x.reshape(len(x), -1, size, *x.shape[2:]), 0, 1)


def joined(x: Float[Array, "L E C ..."]) -> Float[Array, "E T ..."]:
    """Undo `cut`."""
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def walk(read: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunks: Any) -> tuple[Any, Any]:
    """Return the last carry and every chunk's answer of `carry, answer = read(carry, chunk)` over the leading axis.

    The backward pass keeps the carry before each chunk, and computes the rest of a chunk again; of many chunks it
    keeps the carry before each of about sqrt(n) groups, and goes through a group twice.
    """
    read = functools.partial(rematerialised, read)
    number = len(jax.tree.leaves(chunks)[0])
    if number < NESTED_FROM:
        return lax.scan(read, carry, chunks)
    group = group_size(number)
    whole = number // group * group
    groups = jax.tree.map(lambda x: x[:whole].reshape(-1, group, *x.shape[1:]), chunks)
    several = functools.partial(rematerialised, functools.partial(lax.scan, read))
    carry, answers = lax.scan(several, carry, groups)
    answers = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), answers)
    if whole == number:  # a walk over no chunks would be compiled all the same
        return carry, answers
    carry, rest = lax.scan(read, carry, jax.tree.map(lambda x: x[whole:], chunks))
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), answers, rest)


def group_size(number: int) -> int:
    """Return the chunks of a group: about the root of their number, and where that can be a divisor of it."""
    root = math.isqrt(number)
    return next((size for size in range(root, root // 2, -1) if number % size == 0), root)


def rematerialised(read: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunk: Any) -> tuple[Any, Any]:
    """Return read(carry, chunk), whose inner values the backward pass computes again."""
    # A scan's body is compiled apart from its recomputation, so nothing merges the two.
    return jax.checkpoint(read, prevent_cse=False)(carry, chunk)
