"""Byte-level language modelling as a task: bits per byte by the number of bytes before it in a row (S file).

A row is a piece of the text from a random start, with end tokens between documents; it depends only on (text, length,
seed, step, row). The last part of the text is held out: its first half gives the rows of seed HELD_OUT, its second half
those of seed TEST, and no other seed's rows overlap it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Literal

import numpy as np
from pydantic import Field

from jaxbench.config import Base
from jaxbench.memory.study.tasks import HELD_OUT, TEST, TaskBatch
from jaxbench.pretrained.small_tokenizers import ByteTokenizer
from jaxbench.text import dataset
from jaxbench.text.dataset import Corpus


class TextConfig(Base):
    """A text and the length of its rows."""

    task: Literal["text"]
    length: int = Field(gt=0)  # bytes read per row; as many are predicted
    path: str | None = None  # a .txt, .jsonl or .jsonl.gz file; None = the default text
    held_out_share: float = Field(default=0.1, gt=0, lt=1)  # the last part of the text, which is not trained on

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: the bytes and the end-of-document token."""
        return ByteTokenizer.vocab_size

    def at_length(self, factor: int) -> TextConfig:
        """The same text in rows `factor` times as long."""
        return self.model_copy(update={"length": factor * self.length})


@functools.lru_cache
def _corpus(path: str | None) -> Corpus:
    if path is not None and path.endswith(dataset.TOKEN_SUFFIXES):
        raise ValueError(f"text: {path} holds ids, wanted a text: {', '.join(dataset.SUFFIXES)}")
    return dataset.prepare(path)


def sha256(config: TextConfig) -> str:
    """SHA-256 of a task's text, in hexadecimal.

    Raises:
      ValueError: there is no such file, or no text in it.
    """
    return _corpus(config.path).sha256


@functools.lru_cache
def _parts(path: str | None, share: float) -> dict[int | None, np.ndarray]:
    """Ids [N] by part: training (None), HELD_OUT and TEST."""
    train, held_out = dataset.split(_corpus(path), share)
    half = len(held_out.ids) // 2
    return {None: train.ids, HELD_OUT: held_out.ids[:half], TEST: held_out.ids[half:]}


def check(config: TextConfig, factors: Iterable[int]) -> None:
    """Check that the text is long enough for rows of training, selection and test at every factor.

    Raises:
      ValueError: as `batch`.
    """
    wanted = [(config, 0), (config, HELD_OUT), *((config.at_length(factor), TEST) for factor in factors)]
    for rows, seed in wanted:
        batch(rows, seed=seed, step=0, batch_size=1)


def batch(config: TextConfig, *, seed: int, step: int, batch_size: int) -> TaskBatch:
    """Rows of a text; `distance` is the number of bytes read before the byte to be predicted.

    Raises:
      ValueError: the text, or a half of what is held out, is not longer than a row; or there is no such file.
    """
    parts = _parts(config.path, config.held_out_share)
    ids = parts.get(seed, parts[None])
    room = len(ids) - config.length
    if room < 1:
        raise ValueError(
            f"text: rows of length={config.length} do not fit into a part of {len(ids)} tokens; use a longer text"
        )
    rows = []
    for row in range(batch_size):
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, step, row))))
        start = int(random.integers(room))
        rows.append(ids[start : start + config.length + 1])
    ids = np.stack(rows).astype(np.int32)
    num_read = np.broadcast_to(np.arange(1, config.length + 1, dtype=np.int32), ids[:, 1:].shape)
    return TaskBatch(ids[:, :-1], ids[:, 1:], num_read)
