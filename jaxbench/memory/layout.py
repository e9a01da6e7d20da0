"""Layout of rows, heads and chunks in arrays; the rematerialised scan over chunks. Twin: torch_ref/memory/layout.py.

Axis letters: E memories, rows and heads merged (B * N); C token slots of a chunk; L chunks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Shaped

NESTED_FROM = 32  # from this many chunks on, rematerialisation is nested: groups of chunks, chunks of a group


def tree_map(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply a function to the leaves of trees of the same structure; None is not a leaf."""
    return jax.tree.map(function, *trees)


def gathered(x: Shaped[Array, "B T ..."], index: Int[Array, "B S"]) -> Shaped[Array, "B S ..."]:
    """Gather entries along axis 1, each row by its own indices."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)


def select_rows(condition: Bool[Array, " E"], new: Any, old: Any) -> Any:
    """Select `new` in the rows (axis 0) where the condition holds, else `old`: trees of arrays [E ...]."""
    return tree_map(lambda new, old: jnp.where(condition.reshape(-1, *(1,) * (new.ndim - 1)), new, old), new, old)


def reset_rows(state: Any, is_reset: Bool[Array, " B"], init_state: Callable[[int], Any]) -> Any:
    """Reset some rows of a state, a tree of arrays [B ...], to those of init_state(B).

    Raises:
      ValueError: is_reset is not one value for each row of the state.
    """
    num_rows = len(jax.tree.leaves(state)[0])
    if tuple(is_reset.shape) != (num_rows,):
        raise ValueError(f"reset: is_reset is {tuple(is_reset.shape)}, wanted {(num_rows,)}, one for each row")
    return select_rows(is_reset, init_state(num_rows), state)


def left_align(
    x: Float[Array, "B T D"], is_token: Bool[Array, "B T"] | None
) -> tuple[Float[Array, "B T D"], Int[Array, " B"]]:
    """Move padding behind the tokens of each row, which keep their order; also the number of tokens of each row.

    Raises:
      ValueError: is_token has another number of rows or tokens.
    """
    if is_token is None:
        return x, jnp.full((len(x),), x.shape[1], jnp.int32)
    if tuple(is_token.shape) != tuple(x.shape[:2]):
        raise ValueError(f"memory: is_token is {tuple(is_token.shape)}, wanted {tuple(x.shape[:2])} (rows, tokens)")
    order = jnp.argsort(~is_token, axis=1, stable=True)
    return gathered(x, order), jnp.sum(is_token, axis=1).astype(jnp.int32)


def restore_padding(x: Float[Array, "B T ..."], is_token: Bool[Array, "B T"] | None) -> Float[Array, "B T ..."]:
    """Undo `left_align`: each token's value at its place, zeros at padding."""
    if is_token is None:
        return x
    back = gathered(x, jnp.maximum(jnp.cumsum(is_token, axis=1) - 1, 0))
    return jnp.where(is_token.reshape(*is_token.shape, *(1,) * (x.ndim - 2)), back, jnp.zeros((), x.dtype))


def merge_heads(x: Shaped[Array, "B N ..."]) -> Shaped[Array, "E ..."]:
    """Merge rows and heads into one axis of memories, E = B * N."""
    return x.reshape(-1, *x.shape[2:])


def split_heads(x: Shaped[Array, "E ..."], num_heads: int) -> Shaped[Array, "B N ..."]:
    """Undo `merge_heads`."""
    return x.reshape(-1, num_heads, *x.shape[1:])


def heads_first(x: Shaped[Array, "B T N ..."]) -> Shaped[Array, "E T ..."]:
    """Transpose tokens behind heads and merge rows and heads."""
    return merge_heads(jnp.swapaxes(x, 1, 2))


def tokens_first(x: Shaped[Array, "E T ..."], num_heads: int) -> Shaped[Array, "B T N ..."]:
    """Undo `heads_first`."""
    return jnp.swapaxes(split_heads(x, num_heads), 1, 2)


def split_chunks(x: Shaped[Array, "E T ..."], size: int) -> Shaped[Array, "L E C ..."]:
    """Split the token axis into L chunks of `size` tokens, chunks first; T is a multiple of size."""
    return jnp.swapaxes(x.reshape(len(x), -1, size, *x.shape[2:]), 0, 1)


def join_chunks(x: Shaped[Array, "L E C ..."]) -> Shaped[Array, "E T ..."]:
    """Undo `split_chunks`."""
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def scan_chunks(read: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunks: Any) -> tuple[Any, Any]:
    """Scan `carry, output = read(carry, chunk)` over the leading axis, with rematerialisation.

    Args:
      carry: tree of arrays before the first chunk.
      chunks: tree of arrays [L ...].

    Returns:
      The last carry, and the outputs of all chunks [L ...].

    The backward pass keeps the carry before each chunk and recomputes values inside a chunk. From NESTED_FROM chunks
    on it keeps the carry before each of about sqrt(L) groups and goes through a group twice (Chen et al. 2016,
    arXiv:1604.06174, section 4).
    """
    read = functools.partial(rematerialised, read)
    num_chunks = len(jax.tree.leaves(chunks)[0])
    if num_chunks < NESTED_FROM:
        return lax.scan(read, carry, chunks)
    group = group_size(num_chunks)
    whole = num_chunks // group * group
    groups = jax.tree.map(lambda x: x[:whole].reshape(-1, group, *x.shape[1:]), chunks)
    read_group = functools.partial(rematerialised, functools.partial(lax.scan, read))
    carry, outputs = lax.scan(read_group, carry, groups)
    outputs = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), outputs)
    if whole == num_chunks:  # a scan over no chunks would still be compiled
        return carry, outputs
    carry, rest = lax.scan(read, carry, jax.tree.map(lambda x: x[whole:], chunks))
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), outputs, rest)


def group_size(num_chunks: int) -> int:
    """Chunks in a group of nested rematerialisation: about sqrt(num_chunks), a divisor of it if one is near."""
    root = math.isqrt(num_chunks)
    return next((size for size in range(root, root // 2, -1) if num_chunks % size == 0), root)


def rematerialised(read: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunk: Any) -> tuple[Any, Any]:
    """Compute read(carry, chunk) with gradient checkpointing: the backward pass recomputes the values inside."""
    # A scan's body is compiled separately from its recomputation, so no CSE merges the two.
    return jax.checkpoint(read, prevent_cse=False)(carry, chunk)
