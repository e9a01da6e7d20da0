"""Training rows of a compressor from texts: a passage, and the decoder's targets after its vectors (S file).

The targets are the passage itself (reconstruct) or what follows it (continue). Rows depend only on the seed and the
step: a killed run resumes with the rows that it would have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pydantic
from jaxtyping import Int32

from jaxbench.compress.config import TAGS, Arrays, CompressorConfig, group_positions
from jaxbench.config import Base

RECONSTRUCT, CONTINUE, ANSWER, BLANK = (TAGS.index(tag) for tag in ("reconstruct", "continue", "answer", "blank"))


class RowsConfig(Base):
    """Settings of the rows of a step."""

    batch: int = pydantic.Field(default=8, ge=1)  # rows
    num_chunks: int = pydantic.Field(default=2, ge=1)  # in a row's passage
    num_targets: int = pydantic.Field(default=256, ge=1)  # of the decoder, at most a chunk
    reconstruct: float = pydantic.Field(default=0.4, ge=0, le=1)  # share of rows that are read back
    readable: int = pydantic.Field(default=32, ge=0)  # highest ratio with reconstruction; above it, all are continued
    dropout: float = pydantic.Field(default=0.4, ge=0, lt=1)  # of the decoder's inputs in reconstruction
    short: float = pydantic.Field(default=0.25, ge=0, le=1)  # share of rows whose last chunk is not full
    clear: int = pydantic.Field(default=64, ge=0)  # most tokens of plain text between a passage and the targets
    sampled: int = pydantic.Field(default=64, ge=1)  # tokens of a chunk that the local head predicts
    aligned: float = pydantic.Field(default=0.5, ge=0, le=1)  # share of rows whose vectors have their tokens' positions
    ratio: int | None = None  # of all steps; None = one of the compressor's per step, drawn by `weights`
    weights: tuple[float, ...] | None = None  # of the ratios; None = uniform
    in_clear: float = pydantic.Field(default=0.0, ge=0, lt=1)  # share of question steps whose passages are plain text


class Draw(NamedTuple):
    """A step's rows and their compression ratio."""

    ratio: int
    arrays: Arrays


def draw(
    texts: Sequence[Int32[np.ndarray, " N"]], config: CompressorConfig, rows: RowsConfig, *, seed: int, step: int
) -> Draw:
    """Draw the rows of one step.

    Args:
      texts: token ids of each document; those shorter than a row's passage and what follows it are not used.

    Raises:
      ValueError: no document is long enough, or rows do not fit the compressor.
    """
    if rows.ratio is not None:
        config.check_ratio(rows.ratio)
    if rows.num_targets > config.chunk:
        raise ValueError(f"rows: num_targets={rows.num_targets}; wanted at most a chunk of {config.chunk}")
    length = rows.num_chunks * config.chunk
    behind = rows.clear + rows.num_targets
    fitting = [text for text in texts if len(text) >= length + behind]
    if not fitting:
        longest = max(map(len, texts), default=0)
        raise ValueError(f"compress: the longest text has {longest} tokens; wanted {length + behind}")
    random = np.random.default_rng((seed, step))
    ratio = rows.ratio or int(random.choice(config.ratios, p=None if rows.weights is None else rows.weights))
    reconstruct = rows.reconstruct if ratio <= rows.readable else 0.0
    sizes = np.array([len(text) - length - behind + 1 for text in fitting], np.float64)
    made = []
    for _ in range(rows.batch):
        text = fitting[random.choice(len(fitting), p=sizes / sizes.sum())]
        start = int(random.integers(len(text) - length - behind + 1))
        last = config.chunk
        if random.random() < rows.short:
            last = int(random.integers(1, config.chunk + 1))
        passage = text[start : start + length - config.chunk + last]
        clear = int(random.integers(rows.clear + 1))
        aligned = random.random() < rows.aligned
        if random.random() < reconstruct:
            made.append(_reconstructed(passage, config, rows, ratio, random, aligned=aligned))
        else:
            clear, asked = np.split(text[start + len(passage) :][: rows.num_targets + clear], [clear])
            made.append(row(passage, asked, CONTINUE, config, ratio, rows.num_chunks, aligned=aligned, clear=clear))
    arrays = stacked(made, rows.num_targets, clear=rows.clear + config.prefix - 1)
    return Draw(ratio, arrays._replace(sampled=sampled(arrays.context, rows.sampled, random)))


def _reconstructed(
    passage: Int32[np.ndarray, " N"], config: CompressorConfig, rows: RowsConfig, ratio: int,
    random: np.random.Generator, *, aligned: bool,
) -> Arrays:  # fmt: skip
    """Make a row that reads back one of its chunks from that chunk's vectors, some of the decoder's inputs hidden.

    Half of the rows begin at the chunk's start, the others where a few tokens of plain text indicate.
    """
    chunk = int(random.integers(-(-len(passage) // config.chunk)))
    own = passage[chunk * config.chunk : (chunk + 1) * config.chunk]
    start = int(random.integers(len(own))) if random.random() < 0.5 else 0
    clear, asked = own[max(0, start - rows.clear) : start], own[start : start + rows.num_targets]
    made = row(passage, asked, RECONSTRUCT, config, ratio, rows.num_chunks, aligned=aligned, seen=chunk, clear=clear)
    vectors = rows.num_chunks * config.chunk // ratio
    hidden = np.arange(len(made.inputs)) >= vectors + config.prefix + len(clear)  # after the tag and the plain text
    hidden &= random.random(len(made.inputs)) < rows.dropout
    blank = config.decoder.vocab_size + vectors + config.tag(BLANK).start
    return made._replace(inputs=np.where(hidden, blank, made.inputs).astype(np.int32))


def row(
    passage: Int32[np.ndarray, " N"],
    asked: Int32[np.ndarray, " U"],
    tag: int,
    config: CompressorConfig,
    ratio: int,
    num_chunks: int,
    *,
    aligned: bool = False,
    seen: int | None = None,
    clear: Int32[np.ndarray, " L"] = np.zeros(0, np.int32),
) -> Arrays:
    """Make one row, without batch axis: vectors of a passage, a tag, plain text, and the targets.

    Args:
      seen: the decoder sees only this chunk's vectors; None = all.
      clear: tokens between the tag and the targets, which have no loss.
    """
    c, size, each = config, config.decoder.vocab_size, config.chunk // ratio
    context = np.full((num_chunks, c.chunk), -1, np.int32)
    context.reshape(-1)[: len(passage)] = passage
    groups = np.stack([group_positions(int((part >= 0).sum()), ratio, c.chunk) for part in context])
    vectors, following = np.arange(num_chunks * each, dtype=np.int32), np.concatenate([clear, asked])
    own = size + len(vectors) + np.arange(c.tag(tag).start, c.tag(tag).stop)
    inputs = np.concatenate([size + vectors, own, following[:-1]]).astype(np.int32)
    chosen = groups >= 0
    if seen is not None:
        chosen &= np.arange(num_chunks)[:, None] == seen
    if aligned:
        first = 0 if seen is None else seen * c.chunk
        spread = np.where(chosen, groups + np.arange(num_chunks)[:, None] * c.chunk - first, -1).reshape(-1)
        end = len(passage) if seen is None else int((context[seen] >= 0).sum())
    else:
        spread = np.where(chosen, np.cumsum(chosen).reshape(chosen.shape) - 1, -1).reshape(-1)
        end = int(chosen.sum())
    positions = np.concatenate([spread, end + np.arange(len(inputs) - len(vectors))]).astype(np.int32)
    places = len(vectors) + c.prefix - 1 + np.arange(len(clear), len(following), dtype=np.int32)
    mask = np.ones(len(asked), bool)
    return Arrays(context, groups, inputs, positions, places, asked.astype(np.int32), mask, np.zeros(0, np.int32))


def stacked(made: Sequence[Arrays], num_targets: int, *, clear: int = 0) -> Arrays:
    """Stack rows of one ratio, padded to num_targets targets and `clear` more inputs.

    Args:
      clear: number of plain-text tokens, and of a tag's vectors after its first.
    """
    size = made[0].groups.size + clear + num_targets

    def filled(field: str, length: int, value: int) -> np.ndarray:
        parts = [getattr(each, field) for each in made]
        return np.stack([np.pad(x, (0, length - len(x)), constant_values=value) for x in parts])

    return Arrays(
        np.stack([each.context for each in made]),
        np.stack([each.groups for each in made]),
        filled("inputs", size, 0),
        filled("positions", size, -1),
        filled("places", num_targets, 0),
        filled("targets", num_targets, 0),
        filled("mask", num_targets, False),
        np.full((len(made), made[0].context.shape[0], 1), -1, np.int32),
    )


def sampled(context: Int32[np.ndarray, "B C T"], count: int, random: np.random.Generator) -> Int32[np.ndarray, "B C P"]:
    """Draw tokens of each chunk for the local head to predict, with replacement; -1 where a chunk has none."""
    lengths = (context >= 0).sum(axis=2)[:, :, None]
    drawn = (random.random((*context.shape[:2], count)) * lengths).astype(np.int32)
    return np.where(lengths > 0, drawn, -1).astype(np.int32)
