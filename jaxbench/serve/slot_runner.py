"""Steps of the engine on XLA's own programs, for decoders whose layers keep more state than keys and values.

Twin: torch_ref/serve/slot_runner.py.

A block is one slot, which holds a whole request: its keys and values and its layers' other state, empty at the start. A
prompt is read one segment at a time, an answer token by token, with the tokens of all slots in one program. How a text
is cut depends on the text alone, so that an answer is the same in any batch.
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
from jaxtyping import Float, Int

from jaxbench.serve.batch_rows import Batch, Piece, pieces
from jaxbench.transformer import Transformer


class SlotRunner:
    """A decoder and the slots of its requests."""

    def __init__(
        self, model: Transformer, *, num_slots: int, slot_tokens: int, segment: int, max_rows: int,
        progress: Callable[[], Any] = lambda: None,
    ):  # fmt: skip
        """Compile the programs of the runner; progress is called after each of them.

        num_slots: requests at once. slot_tokens: maximum per request; every token of its answer reads so many keys.
        segment: tokens of a prompt that are read at once. max_rows: per step.
        """
        self.segment, self.block_size, self.max_seq_len = segment, slot_tokens, slot_tokens
        self.num_blocks, self.vocab_size = num_slots + 1, model.vocab_size  # block b is slot b - 1
        self.sizes, self.max_wanted = (max_rows,), max_rows
        self._spare = -(-slot_tokens // segment) * segment  # idle slots write here, after all positions of a request
        graph, self._weights = nnx.split(model)
        empty = functools.partial(_empty, graph, length=self._spare + 1, segment=segment)
        row = jax.jit(empty)(self._weights)
        self._fill = jax.jit(functools.partial(_filled, row, num_slots=num_slots))
        self.reset()
        integer, tokens = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((segment,), jnp.int32)
        slots = jax.ShapeDtypeStruct((num_slots,), jnp.int32)

        def compiled(step: Callable, *shapes: Any) -> Callable:
            made = jax.jit(functools.partial(step, graph), donate_argnums=1)
            found = made.lower(self._weights, self._cache, *shapes).compile()
            progress()
            return found

        self._read = compiled(_read, integer, tokens, tokens, integer)
        self._next = compiled(_next, slots, slots, slots)
        self._clear = jax.jit(functools.partial(_cleared, row), donate_argnums=0).lower(self._cache, integer).compile()
        progress()

    @property
    def cache_bytes(self) -> int:
        """Bytes of the slots: keys, values and other state."""
        return sum(each.nbytes for each in jax.tree.leaves(self._cache))

    def reset(self) -> None:
        """Empty all slots."""
        self._cache = None  # freed before the new one is allocated
        self._cache = self._fill()

    def run(self, batch: Batch) -> Float[np.ndarray, "M V"]:
        """Return the logits of the wanted rows; afterwards the slots have read all rows."""
        cache, self._cache = self._cache, None  # donated: if a program fails, there is none
        found: dict[int, Any] = {}
        decoding: list[Piece] = []
        for piece in pieces(batch, self.segment):
            slot = np.int32(piece.block - 1)
            if piece.start == 0:
                cache = self._clear(cache, slot)
            if len(piece.tokens) == 1:
                decoding.append(piece)
                continue
            tokens, positions = np.zeros(self.segment, np.int32), np.full(self.segment, -1, np.int32)
            tokens[: len(piece.tokens)] = piece.tokens
            positions[: len(piece.tokens)] = np.arange(piece.start, piece.start + len(piece.tokens))
            logits, cache = self._read(self._weights, cache, slot, tokens, positions, np.int32(piece.start))
            found[piece.last_row] = logits
        if decoding:
            count = self.num_blocks - 1
            tokens, positions = np.zeros(count, np.int32), np.full(count, -1, np.int32)
            places = np.full(count, self._spare, np.int32)
            for piece in decoding:
                slot = piece.block - 1
                tokens[slot], positions[slot], places[slot] = piece.tokens[0], piece.start, piece.start
            logits, cache = self._next(self._weights, cache, tokens, positions, places)
            rows = np.asarray(logits)
            found |= {piece.last_row: rows[piece.block - 1] for piece in decoding}
        # JAX dispatches asynchronously: a prompt's steps would pile up, and the worker would seem to hang
        self._cache = jax.block_until_ready(cache)
        wanted = [np.asarray(found[row]) for row in batch.wanted.tolist()]
        return np.stack(wanted) if wanted else np.zeros((0, self.vocab_size), np.float32)


def _empty(graph: Any, weights: Any, *, length: int, segment: int) -> Any:
    """Return the cache of a request that has read nothing."""
    model, nothing = nnx.merge(graph, weights), jnp.zeros((1, segment), jnp.int32)
    _, cache = model.features(nothing, nothing - 1)
    return cache.padded(length, dtype=str(model.dtype))


def _filled(row: Any, *, num_slots: int) -> Any:
    return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (num_slots, *x.shape)), row)


def _cleared(row: Any, cache: Any, slot: Array) -> Any:
    return jax.tree.map(lambda x, new: x.at[slot].set(new), cache, row)


def _step(model: Transformer, row: Any, tokens: Array, positions: Array, place: Array) -> tuple[Array, Any]:
    """Return hidden states of one slot's tokens, and the slot after them."""
    hidden, new = model.features(tokens[None], positions[None], cache=row, slot=place)
    return hidden[0], jax.tree.map(lambda x, old: x.astype(old.dtype), new, row)


def _read(
    graph: Any, weights: Any, cache: Any, slot: Array, tokens: Int[Array, " T"], positions: Int[Array, " T"],
    place: Array,
) -> tuple[Float[Array, " V"], Any]:  # fmt: skip
    """Return the logits after a segment of one slot's prompt, and the slots."""
    model = nnx.merge(graph, weights)
    hidden, row = _step(model, jax.tree.map(lambda x: x[slot], cache), tokens, positions, place)
    last = hidden[jnp.sum(positions >= 0) - 1]
    return model.logits(last[None, None])[0, 0].astype(jnp.float32), _cleared(row, cache, slot)


def _next(
    graph: Any, weights: Any, cache: Any, tokens: Int[Array, " M"], positions: Int[Array, " M"],
    places: Int[Array, " M"],
) -> tuple[Float[Array, "M V"], Any]:  # fmt: skip
    """Return the logits after one token of every slot, and the slots; a slot at position -1 keeps its content."""
    model = nnx.merge(graph, weights)
    step = jax.vmap(functools.partial(_step, model))
    hidden, cache = step(cache, tokens[:, None], positions[:, None], places)
    return model.logits(hidden)[:, 0].astype(jnp.float32), cache
