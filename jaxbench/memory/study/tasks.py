"""Synthetic long-context tasks: recall, copying, passkey and key-value retrieval (S file).

A row depends only on (task, seed, step, row). Token 0 is filler, 1 asks, 2 marks a fact; content tokens start at 3.
Sources: multi-query associative recall, Arora et al. 2023, arXiv:2312.04927, section 3; copying, Arjovsky et al.
2016, arXiv:1511.06464, section 5.1; selective copying, Gu and Dao 2023, arXiv:2312.00752, section 3.1; passkey,
Mohtashami and Jaggi 2023, arXiv:2305.16300, section 4.2, with random tokens as filler; key-value retrieval, Liu et
al. 2023, arXiv:2307.03172, section 4.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import pydantic
from jaxtyping import Int
from pydantic import Field

from jaxbench.config import Base

FILLER, ASK, MARK, FIRST = 0, 1, 2, 3  # FIRST: the first token that carries content
UNSCORED = -1
HELD_OUT, TEST = 2**40, 2**41  # seeds of rows that no run is trained on; their rows are counted from 1


class TaskConfig(Base):
    """Kind and size of a task."""

    task: Literal["recall", "copy", "selective_copy", "passkey", "key_value"]
    length: int = Field(gt=0)  # tokens per row, question and answer included
    vocab_size: int = Field(default=64, ge=8)
    items: int = Field(default=8, ge=1)  # pairs (recall), symbols (copies), tokens of a key or value
    queries: int = Field(default=4, ge=1)  # recall: questions; every pair is asked once before any is asked again

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
        """Number of tokens that can be a key; values are drawn from as many others."""
        return (self.vocab_size - FIRST) // 2

    @property
    def least(self) -> int:
        """Smallest length of a row, in tokens."""
        n = self.items
        sizes = {"recall": 2 * n + self.queries, "copy": 2 * n + 1, "selective_copy": 2 * n + 1}
        return (sizes | {"passkey": 2 * n + 1, "key_value": 4 * n + 2})[self.task]

    @property
    def chance(self) -> float:
        """Chance level: accuracy of guessing among possible answer tokens."""
        return 1.0 / (self.half if self.task == "recall" else self.vocab_size - FIRST)

    def at_length(self, factor: int) -> TaskConfig:
        """The same task in rows `factor` times as long: as many facts (key_value: more) and questions, more filler."""
        return TaskConfig.model_validate(self.model_dump() | {"length": factor * self.length})


class TaskBatch(NamedTuple):
    """Rows of a task."""

    tokens: Int[np.ndarray, "B T"]  # int32, like the others
    targets: Int[np.ndarray, "B T"]  # the answer due after a token, UNSCORED where nothing is asked
    distance: Int[np.ndarray, "B T"]  # tokens between a fact and the question for it; 0 where nothing is asked


def batch(config: TaskConfig, *, seed: int, step: int, batch_size: int) -> TaskBatch:
    """Rows of a task; a row is the same in batches of any size."""
    make = {
        "recall": _recall,
        "copy": _copy,
        "selective_copy": _selective_copy,
        "passkey": _passkey,
        "key_value": _key_value,
    }[config.task]
    # numpy pads entropy with zeros: HELD_OUT = 0 + 256 * 2^32 at step s, row 0 would draw as seed 0 at step 256, row s.
    first = 1 if seed >= HELD_OUT else 0
    rows = []
    for row in range(first, first + batch_size):
        blank = TaskBatch(*(np.full(config.length, value, np.int32) for value in (FILLER, UNSCORED, 0)))
        make(config, np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, step, row)))), blank)
        rows.append(blank)
    return TaskBatch(*(np.stack(each) for each in zip(*rows, strict=True)))


def _recall(config: TaskConfig, random: np.random.Generator, row: TaskBatch) -> None:
    """Pairs key value key value ..., then some of the keys again among filler, each to be answered with its value."""
    n = config.items
    keys = FIRST + random.permutation(config.half)[:n]
    values = FIRST + config.half + random.integers(config.half, size=n)
    row.tokens[: 2 * n] = np.stack([keys, values], axis=1).reshape(-1)
    rounds = -(-config.queries // n)
    pairs = np.concatenate([random.permutation(n) for _ in range(rounds)])[: config.queries]
    places = np.sort(2 * n + random.permutation(config.length - 2 * n)[: config.queries])
    row.tokens[places], row.targets[places] = keys[pairs], values[pairs]
    row.distance[places] = places - (2 * pairs + 1)


def _ask_for_symbols(
    config: TaskConfig, row: TaskBatch, symbols: Int[np.ndarray, " N"], places: Int[np.ndarray, " N"]
) -> None:
    """Ask for symbols at the end of the row: ASK, then filler; the answers are due from the first filler on."""
    n = len(symbols)
    due = np.arange(config.length - n, config.length)
    row.tokens[due[0] - 1] = ASK
    row.targets[due], row.distance[due] = symbols, due - places


def _symbols(config: TaskConfig, random: np.random.Generator, num_symbols: int) -> np.ndarray:
    return random.integers(FIRST, config.vocab_size, size=num_symbols)


def _copy(config: TaskConfig, random: np.random.Generator, row: TaskBatch) -> None:
    """Symbols, filler, and the symbols again."""
    places = np.arange(config.items)
    row.tokens[places] = symbols = _symbols(config, random, config.items)
    _ask_for_symbols(config, row, symbols, places)


def _selective_copy(config: TaskConfig, random: np.random.Generator, row: TaskBatch) -> None:
    """Symbols scattered among filler, to be repeated in order."""
    n = config.items
    places = np.sort(random.permutation(config.length - n - 1)[:n])
    row.tokens[places] = symbols = _symbols(config, random, n)
    _ask_for_symbols(config, row, symbols, places)


def _passkey(config: TaskConfig, random: np.random.Generator, row: TaskBatch) -> None:
    """Random tokens that contain a marked key; the mark again at the end, after which the key is due."""
    n, length = config.items, config.length
    row.tokens[:] = _symbols(config, random, length)
    place = int(random.integers(length - 2 * n))
    row.tokens[place] = MARK
    _set_answer(row, length - n, np.arange(place + 1, place + 1 + n), row.tokens[place + 1 : place + 1 + n].copy())
    row.tokens[length - n] = MARK


def _set_answer(row: TaskBatch, start: int, places: Int[np.ndarray, " N"], answer: Int[np.ndarray, " N"]) -> None:
    """Make an answer due from token `start` on, teacher-forced: each of its tokens is read before the next is due."""
    due = np.arange(start, start + len(answer))
    row.tokens[due[1:]] = answer[:-1]
    row.targets[due], row.distance[due] = answer, due - places


def _key_value(config: TaskConfig, random: np.random.Generator, row: TaskBatch) -> None:
    """As many marked keys with values as fit; at the end one of the keys again, whose value is the answer."""
    n, length = config.items, config.length
    size = 2 * n + 1
    num_pairs = (length - size) // size
    content = _symbols(config, random, 2 * n * num_pairs).reshape(num_pairs, 2 * n)
    pairs = np.concatenate([np.full((num_pairs, 1), MARK), content], axis=1)
    row.tokens[: num_pairs * size] = pairs.reshape(-1)
    which = int(random.integers(num_pairs))
    key, value = content[which, :n], content[which, n:]
    # A key that occurs twice would have two values: the others change one token.
    for other in np.flatnonzero((content[:, :n] == key).all(axis=1)):
        if other != which:
            place = other * size + 1
            row.tokens[place] = FIRST + (row.tokens[place] - FIRST + 1) % (config.vocab_size - FIRST)
    start = length - n
    row.tokens[start - n : start + 1] = [ASK, *key]
    _set_answer(row, start, which * size + 1 + n + np.arange(n), value)
