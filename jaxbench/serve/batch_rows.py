"""Tokens of requests as the arrays of one step (S file)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float, Int


class Batch(NamedTuple):
    """One step for a runner. R: tokens, padded to one of its sizes; P: blocks of the longest request it takes."""

    tokens: Int[np.ndarray, " R"]
    positions: Int[np.ndarray, " R"]  # -1 = padding
    table: Int[np.ndarray, "R P"]  # blocks of each row's positions, in order; 0 = none
    wanted: Int[np.ndarray, " M"]  # rows whose logits are wanted
    copies: Int[np.ndarray, "C 2"]  # blocks (from, to), copied all at once before anything is written


class Runner(Protocol):
    """A model and the blocks of its cache."""

    num_blocks: int  # with block 0, which padding is written to
    block_size: int
    max_seq_len: int
    vocab_size: int
    sizes: tuple[int, ...]  # numbers of rows that are compiled, ascending
    max_wanted: int
    segment: int | None  # None = how a text is split into steps changes no bit, and blocks of equal text are shared

    def run(self, batch: Batch) -> Float[np.ndarray, "M V"]:
        """Return the logits of the wanted rows; afterwards the blocks hold the keys and values of all rows."""

    def reset(self) -> None:
        """Make a new cache; the content of the old one is lost."""


class Rows(NamedTuple):
    """Consecutive tokens of one text."""

    blocks: Sequence[int]  # of the text
    tokens: Sequence[int]
    start: int  # position of the first
    num_wanted: int  # number of last tokens whose logits are wanted


class Piece(NamedTuple):
    """Consecutive tokens of one text that a runner with segments computes together."""

    block: int  # of the text
    start: int  # position of the first token
    tokens: list[int]
    last_row: int  # of the batch


def pieces(batch: Batch, segment: int) -> list[Piece]:
    """Cut a step's texts at multiples of a segment, in order; a text has one block.

    Raises:
      ValueError: blocks are to be copied, or a text continues inside a segment with more than one token.
    """
    if len(batch.copies):
        raise ValueError(f"slots: {len(batch.copies)} blocks to be copied; wanted none")
    found: list[Piece] = []
    for row, position in enumerate(batch.positions.tolist()):
        if position < 0:
            continue
        block, token = int(batch.table[row, 0]), int(batch.tokens[row])
        last = found[-1] if found else None
        if last is not None and last.block == block and position % segment:
            if last.start % segment:
                raise ValueError(f"slots: tokens {last.start} and {position} of a text, which begin inside a segment")
            found[-1] = Piece(block, last.start, [*last.tokens, token], row)
        else:
            found.append(Piece(block, position, [token], row))
    return found


def batch_of(runner: Runner, rows: Sequence[Rows], copies: Int[np.ndarray, "C 2"]) -> Batch:
    """Return rows of texts as a step of a runner, padded to one of its sizes."""
    count = sum(len(each.tokens) for each in rows)
    size = next(size for size in runner.sizes if size >= count)
    width = -(-runner.max_seq_len // runner.block_size)
    tokens, positions = np.zeros(size, np.int32), np.full(size, -1, np.int32)
    table, at, wanted = np.zeros((size, width), np.int32), 0, []
    for each in rows:
        place = slice(at, at + len(each.tokens))
        tokens[place] = each.tokens
        positions[place] = np.arange(each.start, each.start + len(each.tokens))
        blocks = each.blocks[:width]
        table[place, : len(blocks)] = blocks
        at += len(each.tokens)
        wanted += range(at - each.num_wanted, at)
    return Batch(tokens, positions, table, np.array(wanted, np.int32), copies)
