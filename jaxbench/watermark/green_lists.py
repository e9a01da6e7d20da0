"""Green lists of MarkLLM 0.1.5 and of transformers' WatermarkingConfig, bit for bit, without PyTorch (S file).

Both take the first floor(gamma V) entries of `torch.randperm(V, generator=g)` on the CPU, g seeded by the context: a
Mersenne Twister (MT19937, initialised by one 32-bit integer as numpy's legacy seeding does) drives a Fisher-Yates
shuffle, step i of which swaps entry i with entry j_i = i + word_i mod (V - i). The shuffle is sequential; here each
entry is traced back through the swaps that touched it, vectorised over all entries (`Shuffle`). A CUDA generator draws
other lists: text marked with those can only be detected with lists made on CUDA.

A context is first combined into one number below V, which selects a row; with 1 <= h <= 8 tokens of context:
  time      product of the h tokens before, mod V        additive  their sum, mod V
  skip      the token `lag` places before                min       the smallest prf value of the h tokens before
The window scheme `self` (MarkLLM) and `selfhash` (transformers) give every candidate token a separate list.

R rows (one per context value), W = ceil(V / 8) bytes per row. Source: PyTorch, randperm_cpu in
aten/src/ATen/native/TensorFactories.cpp; schemes/kgw_markllm.py and schemes/kgw_transformers.py say which list a
context selects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt8, UInt32

from jaxbench import outputs, philox, process_environment
from jaxbench.watermark import reference
from jaxbench.watermark.schemes.contract import Scheme

VERSION = 1  # of the cached files
LARGEST = (2**32 - 1) // 20  # torch.randperm uses another algorithm from here on
SPOT_CHECKS = 3  # rows recomputed when a cached table is opened


class ListRule(NamedTuple):
    """How contexts select lists; returned by `list_rule` of a toolkit's scheme."""

    bias: float  # added to green logits, nats
    combine: Literal["time", "additive", "skip", "min"]
    lag: int  # how far back `skip` looks
    values: Int[np.ndarray, " V"]  # each context token's value in the combination
    rows: Int[np.ndarray, " V"]  # the row that a combined context selects, if candidates share a list
    row_seeds: Int[np.ndarray, " R"] | None  # the generator's seed of each row, R = V; None: 2^32 lists, no rows
    hashed: Int[np.ndarray, " V"] | None = None  # with candidate_factors: row = hashed[combined context]
    candidate_factors: Int[np.ndarray, " V"] | None = None  # times candidate_factors[candidate], mod V
    candidate_seeds: Callable[[np.ndarray], np.ndarray] | None = None  # tokens [B T] to seeds, if there are no rows


class GreenLists:
    """The green lists of one scheme and vocabulary; rows are computed on demand and kept (one thread at a time).

    Attributes:
      scheme, vocab_size, list_size: the scheme, V, and the number of tokens on each list.
      rule, width: how contexts select lists; the number of tokens that must precede a position.
    """

    def __init__(self, scheme: Scheme, *, vocab_size: int):
        """Prepare the lists of a `MarkLlmKgw` or `TransformersKgw` scheme, without computing any yet.

        Raises:
          ValueError: another scheme, or a vocabulary size outside [2, 214748364).
        """
        if getattr(scheme, "key_field", None) is None:
            name = getattr(scheme, "scheme", scheme)
            raise ValueError(f"tables: scheme={name!r} has no list tables, wanted kgw_markllm or kgw_transformers")
        if not 2 <= vocab_size < LARGEST:
            raise ValueError(f"tables: vocab_size={vocab_size} is outside [2, {LARGEST})")
        self.scheme, self.vocab_size, self.width = scheme, vocab_size, scheme.context_length
        self.rule = scheme.list_rule(vocab_size)
        self.list_size = int(vocab_size * scheme.gamma)
        self._shuffle = Shuffle(vocab_size, self.list_size)
        self._table: UInt8[np.ndarray, "n W"] | None = None  # all rows in order, or those that were computed
        self._places = np.full(vocab_size, -1, np.int32)  # where a row is in the table; -1: not computed yet
        self._is_whole = False

    def row_index(self, tokens: Int[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
        """Return the row of the list that decides each token of texts, -1 if fewer than `width` tokens precede it.

        Raises:
          ValueError: a token lies outside the vocabulary, or the scheme has no rows (transformers' selfhash).
        """
        rule = self.rule
        if rule.row_seeds is None:
            raise ValueError(f"tables: seeding_scheme={self.scheme.seeding_scheme} has 2**32 lists, so it has no rows")
        tokens = np.asarray(tokens, np.int64)
        reference.check_tokens(tokens, self.vocab_size)
        values = self._combined(tokens)
        if rule.candidate_factors is None:
            rows = rule.rows[values]
        else:
            rows = rule.hashed[values] * rule.candidate_factors[tokens] % self.vocab_size
        return np.where(values < 0, -1, rows)

    def seeds(self, tokens: Int[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
        """Return the 32-bit seed of the list that decides each token, -1 without full context.

        Equal (seed, token) is equal evidence.
        """
        if self.rule.row_seeds is None:
            return self.rule.candidate_seeds(tokens)
        index = self.row_index(tokens)
        return np.where(index < 0, -1, self.rule.row_seeds[index])

    def green(self, tokens: Int[np.ndarray, "B T"]) -> Bool[np.ndarray, "B T"]:
        """Return which tokens are on the list that their context selects; False without full context.

        Raises:
          ValueError: a token lies outside the vocabulary.
        """
        tokens = np.asarray(tokens, np.int64)
        reference.check_tokens(tokens, self.vocab_size)
        if self.rule.row_seeds is None:
            return self._green_of_seeds(self.seeds(tokens), tokens)
        index = self.row_index(tokens)
        table = self._rows(np.unique(index[index >= 0]))
        return (table[self._places[index], tokens >> 3] >> (tokens & 7).astype(np.uint8) & 1).astype(bool) & (
            index >= 0
        )

    def bits(self) -> UInt8[np.ndarray, "R W"]:
        """Return all rows as packed bits: token v of row r is green iff bits[r, v >> 3] >> (v & 7) & 1.

        The table is built once (49,152 tokens: 302 MB, tens of seconds) and memory-mapped from the cache afterwards.

        Raises:
          ValueError: transformers' selfhash has no table.
        """
        if self.rule.row_seeds is None:
            raise ValueError(f"tables: seeding_scheme={self.scheme.seeding_scheme} has 2**32 lists: detection only")
        if not self._is_whole:
            self._hold(_cached(self.rule.row_seeds, self._shuffle))
        return self._table

    def _combined(self, tokens: Int[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
        """Return the number below V that each token's context is combined into, -1 without full context."""
        values, size, combine = self.rule.values[tokens], self.vocab_size, self.rule.combine

        def earlier(places: int) -> Int[np.ndarray, "B T"]:
            return np.pad(values, ((0, 0), (places, 0)))[:, : values.shape[1]]

        if combine == "skip":
            combined = earlier(self.rule.lag)
        else:
            combined = earlier(1)
            for places in range(2, self.width + 1):
                if combine == "min":
                    combined = np.minimum(combined, earlier(places))
                else:
                    combined = (combined * earlier(places) if combine == "time" else combined + earlier(places)) % size
        return np.where(np.arange(tokens.shape[1])[None, :] < self.width, -1, combined)

    def _hold(self, table: UInt8[np.ndarray, "R W"]) -> None:
        """Keep a table of all rows."""
        self._table, self._places, self._is_whole = table, np.arange(self.vocab_size, dtype=np.int32), True

    def _rows(self, wanted: Int[np.ndarray, " N"]) -> UInt8[np.ndarray, "n W"]:
        """Return the table with at least the wanted rows in it; `_places` says where.

        Without a table of all, it grows by the rows that texts need: one of all would be 42 GiB for 600,000 tokens.
        """
        if self._table is None:
            if (found := _sound_table(self.rule.row_seeds, self._shuffle)) is not None:
                self._hold(found)
            else:
                self._table = np.zeros((1, -(-self.vocab_size // 8)), np.uint8)
        if self._is_whole:
            return self._table
        new, count = wanted[self._places[wanted] < 0], int((self._places >= 0).sum())
        if count + len(new) > len(self._table):  # twice as many each time; untouched zero pages take no memory
            larger = np.zeros((max(2 * len(self._table), count + len(new)), self._table.shape[1]), np.uint8)
            larger[:count] = self._table[:count]
            self._table = larger
        for place, row in enumerate(new, count):
            self._table[place] = self._shuffle.packed(int(self.rule.row_seeds[row]))
            self._places[row] = place
        return self._table

    def _green_of_seeds(self, seeds: Int[np.ndarray, "B T"], tokens: Int[np.ndarray, "B T"]) -> Bool[np.ndarray, "B T"]:
        is_green, places = np.zeros(tokens.size, bool), np.flatnonzero(seeds >= 0)
        places = places[np.argsort(seeds.flat[places], kind="stable")]
        distinct, starts = np.unique(seeds.flat[places], return_index=True)
        for seed, group in zip(distinct, np.split(places, starts[1:])):
            is_green[group] = self._shuffle.is_early(int(seed))[tokens.flat[group]]
        return is_green.reshape(tokens.shape)


def lists_of(scheme: Scheme, *, vocab_size: int) -> GreenLists | None:
    """Return the green lists of a toolkit's scheme (kgw_markllm, kgw_transformers), None for others."""
    return None if scheme.key_field is None else GreenLists(scheme, vocab_size=vocab_size)


# The permutation


class Shuffle:
    """The first `steps` steps of torch.randperm(size); reuses work arrays, so one thread at a time."""

    def __init__(self, size: int, steps: int):
        self.size, self.steps = size, steps
        self._generator = np.random.RandomState(0)
        self._left = np.arange(size, size - steps, -1, dtype=np.uint32)
        self._steps = np.arange(steps, dtype=np.int32)
        self._last = np.empty(size + 1, np.int32)

    def targets(self, seed: int) -> UInt32[np.ndarray, " n"]:
        """Return j_i of every step."""
        self._generator.seed(seed & philox.MASK32)
        words = self._generator.randint(0, 2**32, len(self._steps), dtype=np.uint32)
        np.remainder(words, self._left, out=words)
        return np.add(words, self._steps.view(np.uint32), out=words)

    def origins(self, targets: UInt32[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " m"], Int[np.ndarray, " n"]]:
        """Return the last step that swapped with each entry (-1: none), and what entry i holds just before step i.

        Before step i, entry i holds what the last earlier step p with j_p = i put there: what entry p held before
        step p. This is a forest of pointers to smaller numbers, whose roots hold themselves. Chains are short, so a few
        rounds of pointer jumping resolve them. The next call overwrites the first array.
        """
        last = self._last
        last.fill(-1)
        elsewhere = np.where(targets == self._steps, np.uint32(self.size), targets)  # a swap with itself moves nothing
        last[elsewhere] = self._steps  # the last assignment wins
        parents = last[: len(targets)]
        origins, moving = self._steps.copy(), np.flatnonzero(parents >= 0)
        origins[moving] = parents[moving]
        while len(moving):
            current = origins[moving]
            further = origins[current]
            is_moved = further != current
            moving = moving[is_moved]
            origins[moving] = further[is_moved]
        return last[: self.size], origins

    def is_early(self, seed: int) -> Bool[np.ndarray, " m"]:
        """Return which of the numbers below `size` are among the first `steps` of the permutation."""
        last, origins = self.origins(self.targets(seed))
        late = last[len(self._steps) :]  # entries after the list: untouched, or holding what a swap put there
        is_swapped = late >= 0
        is_early = np.ones(self.size, bool)
        is_early[len(self._steps) :] = is_swapped
        is_early[origins[late[is_swapped]]] = False
        return is_early

    def packed(self, seed: int) -> UInt8[np.ndarray, " W"]:
        """Return `is_early` as bits, eight to a byte, lowest bit first."""
        return np.packbits(self.is_early(seed), bitorder="little")


def permutation(seed: int, size: int) -> Int[np.ndarray, " n"]:
    """Reproduce torch.randperm(size) of a CPU generator under a seed, entry for entry."""
    shuffle = Shuffle(size, size)
    targets = shuffle.targets(seed)  # the last step has only one choice, and torch omits it
    _, origins = shuffle.origins(targets)
    order = np.argsort(targets, kind="stable")
    is_same = np.diff(targets[order]) == 0
    before = np.full(size, -1)
    before[order[1:][is_same]] = order[:-1][is_same]  # the step before i that swapped with the same entry
    return np.where(before < 0, targets.astype(np.int64), origins[before])


# The cache


def table_path(seeds: Int[np.ndarray, " R"], vocab_size: int, list_size: int) -> Path:
    """Name the cached file of a table; the name contains everything that decides its content."""
    digest = hashlib.sha256(f"{VERSION} {vocab_size} {list_size} ".encode() + seeds.astype("<i8").tobytes()).hexdigest()
    return process_environment.cache_dir() / "watermark" / f"green-{vocab_size}-{list_size}-{digest[:12]}.npy"


def _cached(seeds: Int[np.ndarray, " R"], shuffle: Shuffle) -> UInt8[np.ndarray, "R W"]:
    if (found := _sound_table(seeds, shuffle)) is not None:
        return found
    path, shape = table_path(seeds, shuffle.size, shuffle.steps), (len(seeds), -(-shuffle.size // 8))
    with outputs.whole(path) as temporary:
        table = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=shape)
        for row, seed in enumerate(seeds):
            table[row] = shuffle.packed(int(seed))
        table.flush()
    return np.load(path, mmap_mode="r")


def _sound_table(seeds: Int[np.ndarray, " R"], shuffle: Shuffle) -> UInt8[np.ndarray, "R W"] | None:
    """Return the memory-mapped table, or None if the file is missing, truncated, or holds other lists."""
    try:
        found = np.load(table_path(seeds, shuffle.size, shuffle.steps), mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    if found.shape != (len(seeds), -(-shuffle.size // 8)) or found.dtype != np.uint8:
        return None
    rows = np.linspace(0, len(seeds) - 1, SPOT_CHECKS, dtype=int)
    return found if all(np.array_equal(found[row], shuffle.packed(int(seeds[row]))) for row in rows) else None
