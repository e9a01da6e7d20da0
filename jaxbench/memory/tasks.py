"""Tasks that a memory can be tested on: sequences whose answers lie far back (S file).

A row is a function of (task, seed, step, row) alone. Token 0 is filler, 1 asks, 2 marks a fact; content comes from 3
on. Sources: multi-query associative recall, Arora et al. 2023, arXiv:2312.04927, section 3; copying, Arjovsky et al.
2016, arXiv:1511.06464, section 5.1; selective copying, Gu and Dao 2023, arXiv:2312.00752, section 3.1; passkey,
Mohtashami and Jaggi 2023, arXiv:2305.16300, section 4.2, with random tokens as filler; key-value retrieval, Liu et
al. 2023, arXiv:2307.03172, section 4.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import pydantic
from pydantic import Field

from jaxbench.config import Base

FILLER, ASK, MARK, FIRST = 0, 1, 2, 3  # FIRST: the first token that carries content
UNSCORED = -1
HELD_OUT, TEST = 2**40, 2**41  # seeds of rows that no run is trained on


class TaskConfig(Base):
    """A task and its size."""

    task: Literal["recall", "copy", "selective_copy", "passkey", "key_value"]
    length: int = Field(gt=0)  # tokens of a row, question and answer included
    vocab_size: int = Field(default=64, ge=8)
    items: int = Field(default=8, ge=1)  # pairs (recall), symbols (copies), tokens of a key or value
    queries: int = Field(default=4, ge=1)  # recall: questions; every pair is asked for once before one is again

    @pydantic.model_validator(mode="after")
    def _check(self) -> TaskConfig:
        if self.task == "recall" and not self.items <= self.half:
            raise ValueError(
                f"tasks: items={self.items} pairs need as many keys, vocab_size={self.vocab_size} has {self.half}"
            )
        if self.length < self.least:
            raise ValueError(f"tasks: length={self.length} is below the {self.least} tokens that {self.task} takes")
        return self

    @property
    def half(self) -> int:
        """Return how many tokens can be a key; values come from as many others."""
        return (self.vocab_size - FIRST) // 2

    @property
    def least(self) -> int:
        """Return the fewest tokens that a row can have."""
        n = self.items
        sizes = {"recall": 2 * n + self.queries, "copy": 2 * n + 1, "selective_copy": 2 * n + 1}
        return (sizes | {"passkey": 2 * n + 1, "key_value": 4 * n + 2})[self.task]

    @property
    def chance(self) -> float:
        """Return the accuracy of guessing among the tokens that can be an answer."""
        return 1.0 / (self.half if self.task == "recall" else self.vocab_size - FIRST)

    def at_length(self, factor: int) -> TaskConfig:
        """Return the same task in rows `factor` times as long: equal facts and questions, more in between."""
        return TaskConfig(**self.model_dump() | {"length": factor * self.length})


class TaskBatch(NamedTuple):
    """Rows of a task."""

    tokens: np.ndarray  # int32 [B T]
    targets: np.ndarray  # int32 [B T]: what to answer at a token, UNSCORED where nothing is asked
    distance: np.ndarray  # int32 [B T]: tokens between a fact and the question for it; 0 where nothing is asked


def batch(config: TaskConfig, *, seed: int, step: int, batch_size: int) -> TaskBatch:
    """Return rows of a task; a row does not depend on how many there are.

    Raises:
      ValueError: batch_size is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"tasks: batch_size={batch_size} must be at least 1")
    make = {
        "recall": _recall,
        "copy": _copy,
        "selective_copy": _selective_copy,
        "passkey": _passkey,
        "key_value": _key_value,
    }[config.task]
    rows = []
    for row in range(batch_size):
        blank = TaskBatch(*(np.full(config.length, value, np.int32) for value in (FILLER, UNSCORED, 0)))
        make(config, np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, step, row)))), blank)
        rows.append(blank)
    return TaskBatch(*(np.stack(each) for each in zip(*rows, strict=True)))


def _recall(config: TaskConfig, random: np.random.Generator, row: TaskBatch) -> None:
    """Pairs key value key value ..., then some of the keys again among filler: each is to be answered by its value."""
    n = config.items
    keys = FIRST + random.permutation(config.half)[:n]
    values = FIRST + config.half + random.integers(config.half, size=n)
    row.tokens[: 2 * n] = np.stack([keys, values], axis=1).reshape(-1)
    rounds = -(-config.queries // n)
    asked = np.concatenate([random.permutation(n) for _ in range(rounds)])[: config.queries]
    places = np.sort(2 * n + random.permutation(config.length - 2 * n)[: config.queries])
    row.tokens[places], row.targets[places] = keys[asked], values[asked]
    row.distance[places] = places - (2 * asked + 1)


def _answered(config: TaskConfig, row: TaskBatch, symbols: np.ndarray, places: np.ndarray) -> None:
    """Ask for symbols behind the row: ASK, then filler; the answers are due from the first filler on."""
    n = len(symbols)
    asked = np.arange(config.length - n, config.length)
    row.tokens[asked[0] - 1] = ASK
    row.targets[asked], row.distance[asked] = symbols, asked - places


def _symbols(config: TaskConfig, random: np.random.Generator, number: int) -> np.ndarray:
    return random.integers(FIRST, config.vocab_size, size=number)


def _copy(config: TaskConfig, random: np.random.Generator, row: TaskBatch) -> None:
    """Symbols, filler, and the symbols again."""
    places = np.arange(config.items)
    row.tokens[places] = symbols = _symbols(config, random, config.items)
    _answered(config, row, symbols, places)


def _selective_copy(config: TaskConfig, random: np.random.Generator, row: TaskBatch) -> None:
    """Symbols here and there among filler, to be repeated in order."""
    n = config.items
    places = np.sort(random.permutation(config.length - n - 1)[:n])
    row.tokens[places] = symbols = _symbols(config, random, n)
    _answered(config, row, symbols, places)


def _passkey(config: TaskConfig, random: np.random.Generator, row: TaskBatch) -> None:
    """Random tokens with a marked key among them; the mark again at the end is to be followed by the key."""
    n, length = config.items, config.length
    row.tokens[:] = _symbols(config, random, length)
    place = int(random.integers(length - 2 * n))
    row.tokens[place] = MARK
    _told(row, length - n, np.arange(place + 1, place + 1 + n), row.tokens[place + 1 : place + 1 + n].copy())
    row.tokens[length - n] = MARK


def _told(row: TaskBatch, start: int, places: np.ndarray, answer: np.ndarray) -> None:
    """Let an answer be due from token `start` on; each of its tokens is read before the next one is due."""
    asked = np.arange(start, start + len(answer))
    row.tokens[asked[1:]] = answer[:-1]
    row.targets[asked], row.distance[asked] = answer, asked - places


def _key_value(config: TaskConfig, random: np.random.Generator, row: TaskBatch) -> None:
    """As many marked keys with values as fit; one of the keys again at the end, its value is the answer."""
    n, length = config.items, config.length
    size = 2 * n + 1
    number = (length - size) // size
    content = _symbols(config, random, 2 * n * number).reshape(number, 2 * n)
    pairs = np.concatenate([np.full((number, 1), MARK), content], axis=1)
    row.tokens[: number * size] = pairs.reshape(-1)
    which = int(random.integers(number))
    key, value = content[which, :n], content[which, n:]
    # A key that occurs twice would have two values: the others give up one token.
    for other in np.flatnonzero((content[:, :n] == key).all(axis=1)):
        if other != which:
            place = other * size + 1
            row.tokens[place] = FIRST + (row.tokens[place] - FIRST + 1) % (config.vocab_size - FIRST)
    start = length - n
    row.tokens[start - n : start + 1] = [ASK, *key]
    _told(row, start, which * size + 1 + n + np.arange(n), value)
