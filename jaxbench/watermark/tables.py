"""Green lists of MarkLLM 0.1.5 and of transformers' WatermarkingConfig, bit for bit, without PyTorch (S file).

Both take the first floor(gamma V) entries of `torch.randperm(V, generator=g)` on the CPU, g seeded by the context: a
Mersenne Twister (MT19937, initialised by one 32-bit integer as numpy's legacy seeding does) drives a Fisher-Yates
shuffle, step i of which swaps entry i with entry j_i = i + word_i mod (V - i). The shuffle is sequential; here each
entry is followed back through the swaps that touched it, for all entries at once (`Shuffle`). No CUDA device draws
these lists: a list made there can only be detected with lists made there.

A context is first combined to one number below V, which selects a row; with 1 <= h <= 8 tokens of context:
  time      product of the h tokens before, mod V        additive  their sum, mod V
  skip      the token `lag` places before                min       the smallest prf value of the h tokens before
The window scheme `self` (MarkLLM) and `selfhash` (transformers) give every candidate token a list of its own.

R rows (one a context value), W = ceil(V / 8) bytes a row. Sources: MarkLLM 0.1.5, markllm/watermark/kgw/kgw.py;
transformers 5.23, generation/logits_process.py, WatermarkLogitsProcessor; PyTorch, randperm_cpu in
aten/src/ATen/native/TensorFactories.cpp.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt8, UInt32

from jaxbench import assets, philox
from jaxbench.watermark import config

VERSION = 1  # of the cached files
LARGEST = (2**32 - 1) // 20  # torch.randperm uses another algorithm from here on
HASH_TABLE_SIZE = 1_000_003  # transformers' fixed table for selfhash
CHUNK_ROWS = 512
SPOT_CHECKS = 3  # rows computed anew when a cached table is opened


class Observed(NamedTuple):
    """What the lists say about tokens as they stand in texts."""

    is_green: Bool[np.ndarray, "B T"]
    has_context: Bool[np.ndarray, "B T"]  # False: not scored, and is_green is False
    seeds: Int[np.ndarray, "B T"]  # seed of the list that decides each token: equal (seed, token) = equal evidence


class Tables:
    """The green lists of one scheme and vocabulary; rows are computed when they are asked for and then kept.

    Attributes:
      scheme, vocab_size, list_size: what the lists are of, V, and tokens on each list.
      combine: "time", "additive", "skip" or "min".
      width, lag: tokens that must precede a position; how far back `skip` looks.
      per_candidate: each candidate token has its own list (window scheme self, selfhash): detection only.
      values: int64 [V], the number that a context token enters the combination with.
      rows: int64 [V], the row that a combined context selects (V rows; not for transformers' selfhash).
      seeds: int64 [R], the generator's seed of each row.
    """

    def __init__(self, scheme: Any, *, vocab_size: int):
        """Prepare the lists of a `MarkLlmKgw` or `TransformersKgw` scheme; computes no list yet.

        Raises:
          ValueError: another scheme, an f_scheme, window or seeding scheme that is unknown, a share of green tokens
            outside (0, 1), or a vocabulary size outside [2, 214748364).
        """
        name = getattr(scheme, "scheme", scheme)
        if name not in ("kgw_markllm", "kgw_transformers"):
            raise ValueError(f"tables: scheme={name!r} has no list tables, wanted kgw_markllm or kgw_transformers")
        if not 2 <= vocab_size < LARGEST:
            raise ValueError(f"tables: vocab_size={vocab_size} is outside [2, {LARGEST})")
        gamma = scheme.gamma if name == "kgw_markllm" else scheme.greenlist_ratio
        if not 0 < gamma < 1:
            raise ValueError(f"tables: the share of green tokens is {gamma}, wanted strictly between 0 and 1")
        self.scheme, self.vocab_size, self.list_size = scheme, vocab_size, int(vocab_size * gamma)
        self.width = config.context_length(scheme)
        identity = np.arange(vocab_size)
        if name == "kgw_markllm":
            _check_name("f_scheme", scheme.f_scheme, ("time", "additive", "skip", "min"))
            _check_name("window_scheme", scheme.window_scheme, ("left", "self"))
            self.combine, self.lag, self.per_candidate = (
                scheme.f_scheme,
                scheme.prefix_length,
                scheme.window_scheme == "self",
            )
            self.prf = permutation(scheme.hash_key, vocab_size)
            is_min = self.combine == "min"
            self.values = self.prf if is_min else identity
            self._hashed = identity if is_min else self.prf  # MarkLLM's _f of a combined context
            self.rows = (self._hashed * (scheme.hash_key % vocab_size)) % vocab_size
            self.seeds = identity
        else:
            _check_name("seeding_scheme", scheme.seeding_scheme, ("lefthash", "selfhash"))
            self.combine, self.lag, self.per_candidate = "skip", 1, scheme.seeding_scheme == "selfhash"
            self.values = self.rows = identity
            wrapped = (scheme.hashing_key * token % (2**64 - 1) & philox.MASK32 for token in range(vocab_size))
            self.seeds = np.fromiter(wrapped, np.int64, vocab_size)
            if self.per_candidate:
                self.prf = permutation(scheme.hashing_key, HASH_TABLE_SIZE)
        self._shuffle = Shuffle(vocab_size, self.list_size)
        self._known: dict[int, UInt8[np.ndarray, " W"]] = {}
        self._whole: np.ndarray | None = None

    def context_values(self, tokens: Int[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
        """Return the combined context of every position, -1 where fewer than `width` tokens precede it."""
        return _combined(self, np.asarray(tokens, np.int64))

    def list_seeds(self, tokens: Int[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
        """Return the 32-bit seed of the list that decides each observed token, -1 without context."""
        tokens = np.asarray(tokens, np.int64)
        if self.per_candidate and self.scheme.scheme == "kgw_transformers":
            return _selfhash_seeds(self.scheme, self.prf, tokens)
        values = self.context_values(tokens)
        if self.per_candidate:
            found = self._hashed[values] * self.prf[tokens] % self.vocab_size
        else:
            found = self.seeds[self.rows[values]]
        return np.where(values < 0, -1, found)

    def observe(self, tokens: Int[np.ndarray, "B T"], lengths: Int[np.ndarray, " B"]) -> Observed:
        """Look every token of every text up in the list that its context selects.

        Args:
          tokens: ids; what lies past a row's length may hold anything.
          lengths: tokens of each row.

        Raises:
          ValueError: a token lies outside the vocabulary.
        """
        tokens = np.asarray(tokens, np.int64)
        is_token = np.arange(tokens.shape[1])[None, :] < np.asarray(lengths)[:, None]
        tokens = np.where(is_token, tokens, 0)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            wrong = int(tokens.max() if tokens.max() >= self.vocab_size else tokens.min())
            raise ValueError(
                f"tables: token {wrong} is outside the vocabulary of {self.vocab_size}; "
                "detect with the tokenizer and vocabulary size that generated"
            )
        seeds = self.list_seeds(tokens)
        has_context = is_token & (seeds >= 0)
        is_green = np.zeros(tokens.shape, bool)
        is_green[has_context] = self._lookup(seeds[has_context], tokens[has_context])
        return Observed(is_green, has_context, np.where(has_context, seeds, -1))

    def is_green(self, contexts: Int[np.ndarray, "B h"]) -> Bool[np.ndarray, "B V"]:
        """Return the green list that follows each context of `width` tokens.

        With a list per candidate this takes a list for each distinct seed: for small vocabularies and for tests.
        """
        contexts = np.asarray(contexts, np.int64).reshape(-1, self.width)
        if not self.per_candidate:
            seeds = self.seeds[self.rows[self.context_values(np.pad(contexts, ((0, 0), (0, 1))))[:, -1]]]
            return np.stack([self._unpacked(int(seed)) for seed in seeds])
        candidates = np.arange(self.vocab_size)
        rows = []
        for context in contexts:
            texts = np.concatenate(
                [np.broadcast_to(context, (len(candidates), self.width)), candidates[:, None]], axis=1
            )
            rows.append(self._lookup(self.list_seeds(texts)[:, -1], candidates))
        return np.stack(rows)

    def bits(self, *, show: Callable[[int, int], None] | None = None) -> UInt8[np.ndarray, "R W"]:
        """Return all V rows as packed bits: token v of row r is green iff bits[r, v >> 3] >> (v & 7) & 1.

        The table is built once (about 12 s for 49,152 tokens, 302 MB) and memory-mapped from the cache afterwards.

        Args:
          show: called with (rows finished, rows in all) while the table is built.

        Raises:
          ValueError: lists per candidate on 32-bit seeds (transformers' selfhash) have no table.
        """
        if self.per_candidate and self.scheme.scheme == "kgw_transformers":
            raise ValueError(f"tables: seeding_scheme={self.scheme.seeding_scheme} has 2**32 lists: detection only")
        if self._whole is None:
            self._whole = _cached(self.seeds, self.vocab_size, self.list_size, show)
        return self._whole

    def _lookup(self, seeds: Int[np.ndarray, " N"], tokens: Int[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
        order = np.argsort(seeds, kind="stable")
        distinct, starts = np.unique(seeds[order], return_index=True)
        is_green = np.empty(len(seeds), bool)
        for seed, places in zip(distinct, np.split(order, starts[1:])):
            row = self._row(int(seed))
            is_green[places] = row[tokens[places] >> 3] >> (tokens[places] & 7) & 1
        return is_green

    def _row(self, seed: int) -> UInt8[np.ndarray, " W"]:
        if self._whole is not None and self.scheme.scheme == "kgw_markllm":
            return self._whole[seed]
        if seed not in self._known:
            if len(self._known) >= self.vocab_size:  # 2**32 possible seeds must not fill the memory
                self._known.clear()
            self._known[seed] = np.packbits(self._shuffle.is_early(seed), bitorder="little")
        return self._known[seed]

    def _unpacked(self, seed: int) -> Bool[np.ndarray, " V"]:
        return np.unpackbits(self._row(seed), count=self.vocab_size, bitorder="little").astype(bool)


# The permutation


class Shuffle:
    """The first `steps` steps of torch.randperm(size); it keeps work arrays, so one thread at a time."""

    def __init__(self, size: int, steps: int):
        self.size = size
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
        step p. That is a forest of pointers to smaller numbers, whose roots hold themselves; chains are short, so
        jumping halves them a few times. The first array is used anew by the next call.
        """
        last = self._last
        last.fill(-1)
        elsewhere = np.where(targets == self._steps, np.uint32(self.size), targets)  # a swap with itself moves nothing
        last[elsewhere] = self._steps  # the last assignment stays
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
        late = last[len(self._steps) :]  # entries behind the list: untouched, or holding what a swap put there
        is_swapped = late >= 0
        is_early = np.ones(self.size, bool)
        is_early[len(self._steps) :] = is_swapped
        is_early[origins[late[is_swapped]]] = False
        return is_early


def green_list(seed: int, vocab_size: int, list_size: int) -> Bool[np.ndarray, " V"]:
    """Return which tokens are among the first `list_size` of torch.randperm(vocab_size) under a seed."""
    return Shuffle(vocab_size, list_size).is_early(seed)


def permutation(seed: int, size: int) -> Int[np.ndarray, " n"]:
    """Return torch.randperm(size) of a CPU generator under a seed, entry for entry."""
    shuffle = Shuffle(size, size)
    targets = shuffle.targets(seed)  # the last step has one choice, and torch leaves it out
    _, origins = shuffle.origins(targets)
    order = np.argsort(targets, kind="stable")
    is_same = np.diff(targets[order]) == 0
    before = np.full(size, -1)
    before[order[1:][is_same]] = order[:-1][is_same]  # the step before i that swapped with the same entry
    return np.where(before < 0, targets.astype(np.int64), origins[before])


# Contexts and seeds


def _combined(tables: Tables, tokens: Int[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
    values, size = tables.values[tokens], tables.vocab_size

    def earlier(places: int) -> np.ndarray:
        return np.pad(values, ((0, 0), (places, 0)))[:, : values.shape[1]]

    if tables.combine == "skip":
        found = earlier(tables.lag)
    else:
        found = earlier(1)
        for places in range(2, tables.width + 1):
            if tables.combine == "min":
                found = np.minimum(found, earlier(places))
            else:
                found = (found * earlier(places) if tables.combine == "time" else found + earlier(places)) % size
    return np.where(np.arange(tokens.shape[1])[None, :] < tables.width, -1, found)


def _selfhash_seeds(
    scheme: Any, table: Int[np.ndarray, " n"], tokens: Int[np.ndarray, "B T"]
) -> Int[np.ndarray, "B T"]:
    """Return min over the window of key * H(token) * H(candidate), wrapped to 64 bits as torch's int64 product is."""
    hashes = table[tokens % HASH_TABLE_SIZE] + 1
    key = np.int64((scheme.hashing_key + 2**63) % 2**64 - 2**63)
    width = scheme.context_width
    found = np.full(tokens.shape, np.iinfo(np.int64).max)
    with np.errstate(over="ignore"):
        for places in range(width):
            window = np.pad(hashes, ((0, 0), (places, 0)))[:, : tokens.shape[1]]
            found = np.minimum(found, key * window * hashes)
    positive = np.where(found < 0, found - 1, found)  # a negative seed mod (2**64 - 1) is seed - 1 mod 2**64
    return np.where(np.arange(tokens.shape[1])[None, :] < width - 1, -1, positive & philox.MASK32)


def _check_name(field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"tables: {field}={value!r} is unknown, wanted one of {', '.join(known)}")


# The cache


def table_path(seeds: Int[np.ndarray, " R"], vocab_size: int, list_size: int) -> Path:
    """Name the cached file of a table: what decides its content is in the name."""
    digest = hashlib.sha256(f"{VERSION} {vocab_size} {list_size} ".encode() + seeds.astype("<i8").tobytes()).hexdigest()
    return assets.cache_dir() / "watermark" / f"green-{vocab_size}-{list_size}-{digest[:12]}.npy"


def _cached(
    seeds: Int[np.ndarray, " R"], vocab_size: int, list_size: int, show: Callable[[int, int], None] | None
) -> UInt8[np.ndarray, "R W"]:
    path, shape = table_path(seeds, vocab_size, list_size), (len(seeds), -(-vocab_size // 8))
    if (found := _opened(path, shape)) is not None and _is_sound(found, seeds, vocab_size, list_size):
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".npy")
    os.close(handle)
    shuffle = Shuffle(vocab_size, list_size)
    try:
        table = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=shape)
        for start in range(0, len(seeds), CHUNK_ROWS):
            lists = [shuffle.is_early(int(seed)) for seed in seeds[start : start + CHUNK_ROWS]]
            table[start : start + CHUNK_ROWS] = np.packbits(np.stack(lists), axis=1, bitorder="little")
            if show is not None:
                show(min(start + CHUNK_ROWS, len(seeds)), len(seeds))
        table.flush()
        del table
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return np.load(path, mmap_mode="r")


def _opened(path: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """Return the memory-mapped table, or None where the file is missing or is not one."""
    try:
        found = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == shape and found.dtype == np.uint8 else None


def _is_sound(table: np.ndarray, seeds: Int[np.ndarray, " R"], vocab_size: int, list_size: int) -> bool:
    for row in np.linspace(0, len(seeds) - 1, SPOT_CHECKS, dtype=int):
        wanted = np.packbits(green_list(int(seeds[row]), vocab_size, list_size), bitorder="little")
        if not np.array_equal(table[row], wanted):
            return False
    return True
