"""Score given tokens with a decoder after vectors, after text, and after nothing: losses and hits.

Data flow: rows of inputs (token ids; ids past the vocabulary are vectors) -> decoder -> for each target, its loss and
whether it was the most probable token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int32

SIZES = (64, 256)  # rows are padded to a multiple of the first, or if longer than the second, of the second
ASKED = 16  # targets are padded to a multiple of this
ROWS = 4  # per call


class Row(NamedTuple):
    """What a decoder reads, and the target tokens at its end."""

    inputs: Int32[np.ndarray, " S"]  # token ids; from the vocabulary's size on: rows of `vectors`
    asked: Int32[np.ndarray, " U"]  # the targets; all but the last are also the last inputs
    vectors: Float32[np.ndarray, "M D"]
    positions: Int32[np.ndarray, " S"] | None = None  # None = consecutive


class Heard(NamedTuple):
    """Scores of a row's targets."""

    losses: Float32[np.ndarray, " U"]  # nats
    hits: Bool[np.ndarray, " U"]


class Reader:
    """A decoder that scores given tokens (teacher forcing)."""

    def __init__(self, model: Any):
        self._model, self._size, self._width = model, model.vocab_size, model.embed.embedding.shape[1]
        self._max_seq_len = model.max_seq_len
        self._program = jax.jit(_heard)

    def __call__(self, rows: Sequence[Row], *, progress: Callable[[int], Any] = lambda count: None) -> list[Heard]:
        """Losses and hits of each row's targets.

        Raises:
          ValueError: a row is longer than the decoder's context.
        """
        check_room(max(map(_length, rows), default=0), self._max_seq_len)
        order = sorted(range(len(rows)), key=lambda i: _bucket(rows[i]))
        found: list[Heard | None] = [None] * len(rows)
        while order:
            bucket = _bucket(rows[order[0]])
            mine = [i for i in order[:ROWS] if _bucket(rows[i]) == bucket]
            order = order[len(mine) :]
            for i, each in zip(mine, self._read([rows[i] for i in mine], *bucket)):
                found[i] = each
            progress(len(mine))
        return [each for each in found if each is not None]

    def _read(self, rows: Sequence[Row], length: int, num_asked: int, num_vectors: int) -> list[Heard]:
        inputs, positions = np.zeros((ROWS, length), np.int32), np.full((ROWS, length), -1, np.int32)
        places, asked = np.zeros((2, ROWS, num_asked), np.int32)
        table = np.zeros((ROWS * num_vectors, self._width), np.float32)
        for i, row in enumerate(rows):
            count, first = len(row.inputs), len(row.inputs) - len(row.asked)
            is_vector = row.inputs >= self._size
            inputs[i, :count] = row.inputs + np.where(is_vector, i * num_vectors, 0)
            positions[i, :count] = np.arange(count) if row.positions is None else row.positions
            places[i, : len(row.asked)] = np.arange(first, count)
            asked[i, : len(row.asked)] = row.asked
            if len(row.vectors):
                table[i * num_vectors :][: len(row.vectors)] = row.vectors
        arrays = self._program(self._model, inputs, positions, places, asked, table)
        losses, hits = map(np.asarray, arrays)
        return [Heard(losses[i, : len(row.asked)], hits[i, : len(row.asked)]) for i, row in enumerate(rows)]


def check_room(length: int, max_seq_len: int) -> None:
    """Check that a decoder's context has room for a row of `length` positions.

    Raises:
      ValueError: it has not: beyond it, losses would say nothing about the decoder.
    """
    if length > max_seq_len:
        raise ValueError(f"reading: a row has {length} positions; wanted at most the decoder's context, {max_seq_len}")


def _length(row: Row) -> int:
    """Positions that a row takes, from the first to the last."""
    return len(row.inputs) if row.positions is None else int(row.positions.max()) + 1


def _bucket(row: Row) -> tuple[int, int, int]:
    """Sizes that a row is padded to: inputs, targets, vectors."""
    step = SIZES[0] if len(row.inputs) <= SIZES[1] else SIZES[1]
    vectors = max(16, 1 << (len(row.vectors) - 1).bit_length()) if len(row.vectors) else 16
    return -(-len(row.inputs) // step) * step, -(-len(row.asked) // ASKED) * ASKED, vectors


def _heard(model: Any, inputs, positions, places, asked, table) -> tuple[jax.Array, jax.Array]:
    hidden, _ = model.features(inputs, positions, vectors=table.astype(model.dtype))
    hidden = jnp.take_along_axis(hidden, places[:, :, None], axis=1)
    logits = model.logits(hidden).astype(jnp.float32)
    losses = jax.nn.logsumexp(logits, axis=2) - jnp.take_along_axis(logits, asked[:, :, None], axis=2)[:, :, 0]
    return losses, jnp.argmax(logits, axis=2) == asked


def behind_text(before: np.ndarray, asked: np.ndarray, *, start: int, num_clear: int = 0) -> Row:
    """Make a row of text: the token `start`, text before, then tokens of which the first num_clear are not targets."""
    inputs = np.concatenate([[start], before, asked[:-1]]).astype(np.int32)
    return Row(inputs, asked[num_clear:].astype(np.int32), np.zeros((0, 0), np.float32))


def behind_vectors(
    vectors: Float32[np.ndarray, "M D"], tag: Float32[np.ndarray, "P D"], asked: np.ndarray, *, size: int,
    places: np.ndarray | None = None,
) -> Row:  # fmt: skip
    """Make a row of vectors, a tag's vectors, and the targets.

    Args:
      size: of the vocabulary.
      places: positions of the vectors, then the number of tokens that they stand for; None = consecutive.
    """
    table = np.concatenate([vectors, tag]).astype(np.float32)
    inputs = np.concatenate([size + np.arange(len(table)), asked[:-1]]).astype(np.int32)
    positions = None
    if places is not None:
        behind = places[-1] + np.arange(len(tag) + len(asked) - 1)
        positions = np.concatenate([places[:-1], behind]).astype(np.int32)
    return Row(inputs, asked.astype(np.int32), table, positions)
