"""Steps of the engine on native kernels, in programs that are compiled before the first request.

Twin: torch_ref/serve/native_runner.py. A row of a program is one token with the blocks of its own request. Its result
does not depend on the other rows, so that an answer has the same bits in any batch (native/run.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxbench.native import paged, run
from jaxbench.native.model import NativeTransformer
from jaxbench.serve.batch_rows import Batch

COPIED = 8  # blocks that one call copies; fewer are padded to that number, at the same cost


class NativeRunner:
    """A packed decoder and the blocks of its cache, pages of paged.PAGE_SIZE positions."""

    segment = None  # a row is one token, independent of the others

    def __init__(
        self, model: NativeTransformer, *, num_blocks: int, sizes: tuple[int, ...], max_wanted: int,
        progress: Callable[[], Any] = lambda: None,
    ):  # fmt: skip
        """Compile the programs of the runner; progress is called after each of them.

        num_blocks: of the cache, including block 0, where padding is written. sizes: numbers of rows, ascending.
        max_wanted: rows of a step whose logits may be wanted.
        """
        self.num_blocks, self.sizes, self.max_wanted = num_blocks, sizes, max_wanted
        self.block_size, self.max_seq_len, self.vocab_size = paged.PAGE_SIZE, model.max_seq_len, model.vocab_size
        self._config, self._cache_dtype = model.configs[0], model.cache_dtype
        self.reset()
        graph, self._weights = nnx.split(model)
        self._programs = {}
        for size in sizes:
            self._programs[size] = _compiled(graph, self._weights, self._pages, self._shapes(size), num_rows=sizes[-1])
            progress()
        hidden = jax.ShapeDtypeStruct((sizes[-1], self._config.d_model), jnp.float32)
        self._wanted_sizes = tuple(size for size in sizes if size < max_wanted) + (max_wanted,)
        self._heads = {}
        for size in self._wanted_sizes:
            rows = jax.ShapeDtypeStruct((size,), jnp.int32)
            self._heads[size] = jax.jit(functools.partial(_logits, graph)).lower(self._weights, hidden, rows).compile()
            progress()
        pairs = jax.ShapeDtypeStruct((COPIED, 2), jnp.int32)
        self._copy = jax.jit(_copied, donate_argnums=0).lower(self._pages, pairs).compile()
        progress()

    @property
    def cache_bytes(self) -> int:
        """Bytes of the blocks."""
        return sum(each.nbytes for each in jax.tree.leaves(self._pages))

    def reset(self) -> None:
        """Make a new cache; the content of the old one is lost."""
        self._pages = None  # freed before the new one is allocated
        self._pages = paged.empty(self._config, self.num_blocks, self.block_size, self._cache_dtype)[:4]

    def run(self, batch: Batch) -> Float[np.ndarray, "M V"]:
        """Return the logits of the wanted rows; afterwards the blocks hold the keys and values of all rows."""
        pages, self._pages = self._pages, None  # donated: if the program fails, there are none
        for start in range(0, len(batch.copies), COPIED):
            pairs = np.zeros((COPIED, 2), np.int32)  # block 0 onto itself
            pairs[: len(batch.copies[start:])] = batch.copies[start : start + COPIED]
            pages = self._copy(pages, pairs)
        program = self._programs[len(batch.tokens)]
        hidden, self._pages = program(self._weights, pages, batch.tokens, batch.positions, batch.table)
        count = len(batch.wanted)
        if not count:
            # JAX dispatches asynchronously: a prompt's steps would pile up, and the worker would seem to hang
            jax.block_until_ready(self._pages)
            return np.zeros((0, self.vocab_size), np.float32)
        wanted = np.zeros(next(size for size in self._wanted_sizes if size >= count), np.int32)
        wanted[:count] = batch.wanted
        return np.asarray(self._heads[len(wanted)](self._weights, hidden, wanted))[:count]

    def _shapes(self, size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        width = -(-self.max_seq_len // self.block_size)
        return tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((size,), (size,), (size, width)))


def _compiled(
    graph: Any, weights: Any, pages: Any, shapes: tuple[jax.ShapeDtypeStruct, ...], *, num_rows: int
) -> Callable:
    step = functools.partial(_step, graph, num_rows=num_rows)
    return jax.jit(step, donate_argnums=1).lower(weights, pages, *shapes).compile()


def _step(
    graph: Any, weights: Any, pages: Any, tokens: Array, positions: Array, table: Array, *, num_rows: int
) -> tuple[Array, Any]:
    """Return hidden states of the rows, padded to num_rows, and the pages."""
    model = nnx.merge(graph, weights)
    cache = paged.PagedCache(*pages, table)
    arguments = (tokens[:, None], positions[:, None], cache, model.settings)
    hidden, cache = run.run_part(model.weights, model.configs, *arguments)
    return jnp.pad(hidden[:, 0], ((0, num_rows - len(tokens)), (0, 0))), cache[:4]


def _logits(graph: Any, weights: Any, hidden: Array, rows: Array) -> Array:
    return nnx.merge(graph, weights).logits(hidden[rows][:, None])[:, 0]


def _copied(pages: Any, pairs: Array) -> Any:
    return jax.tree.map(lambda x: x if x.size == 0 else x.at[pairs[:, 1]].set(x[pairs[:, 0]]), pages)
