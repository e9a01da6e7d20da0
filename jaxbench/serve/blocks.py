"""Blocks of the cache: which are free, who reads which, and which hold text that other requests can reuse (S file).

A block holds the keys and values of `block_size` consecutive positions. Several requests may read one; a request
writes only into blocks that no other request reads. A block whose text is known is found by that text and all text
before it, even while no request reads it, until its room is needed.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ROOT = b""  # digest of no text


class Match(NamedTuple):
    """The beginning of a text that is in blocks already."""

    blocks: list[int]  # full ones, in order; the caller is a reader of them now
    tail: int | None  # a block that begins with the text's next tokens, to copy from; it gets no reader
    tail_length: int  # positions of it that belong to the text
    digests: list[bytes]  # of the full blocks


class BlockPool:
    """All blocks except block 0, which belongs to no request: padding is written there."""

    def __init__(self, num_blocks: int, block_size: int):
        """num_blocks: including block 0.

        Raises:
          ValueError: there is no block to allocate, or it has no position.
        """
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"blocks: {num_blocks} of {block_size} positions; wanted at least 2 of at least 1")
        self.block_size, self.num_blocks = block_size, num_blocks
        self._free = collections.deque(range(1, num_blocks))  # blocks that hold nothing
        self._evictable: collections.OrderedDict[int, None] = collections.OrderedDict()  # known, unread; oldest first
        self._readers = [0] * num_blocks
        self._known: dict[int, tuple[bytes, bytes, tuple[int, ...]]] = {}  # block -> parent's digest, its own, tokens
        self._block: dict[bytes, int] = {}  # digest -> block
        self._children: dict[bytes, set[int]] = collections.defaultdict(set)  # parent's digest -> blocks

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated: those that hold nothing and those that nobody reads."""
        return len(self._free) + len(self._evictable)

    @property
    def num_known(self) -> int:
        """Number of blocks that can be found by their text."""
        return len(self._known)

    def allocate(self) -> int | None:
        """Allocate a block, or return None if there is none; the known text that has been unread longest makes room."""
        if self._free:
            block = self._free.popleft()
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            self._drop(block)
        else:
            return None
        self._readers[block] = 1
        return block

    def release(self, block: int) -> None:
        """Remove one reader from a block.

        Raises:
          ValueError: the block has none.
        """
        if not 0 < block < self.num_blocks or self._readers[block] < 1:
            raise ValueError(f"blocks: block {block} is released, and nobody reads it")
        self._readers[block] -= 1
        if self._readers[block] == 0:
            if block in self._known:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def is_shared(self, block: int) -> bool:
        """Return whether others read it too, or may find it by its text."""
        return self._readers[block] > 1 or block in self._known

    def publish(self, block: int, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Make a full block known by its text, and return the digest; a known text keeps its first block.

        parent: digest of the block before it, ROOT for the first.
        """
        own = digest(parent, tokens)
        if own not in self._block and block not in self._known:
            self._known[block] = parent, own, tuple(tokens)
            self._block[own] = block
            self._children[parent].add(block)
        return own

    def acquire_prefix(self, tokens: Sequence[int]) -> Match:
        """Find blocks that hold the beginning of a text, and add a reader; at least one token is left to compute."""
        size, most = self.block_size, len(tokens) - 1
        blocks, digests, parent = [], [], ROOT
        while (len(blocks) + 1) * size <= most:
            part = tokens[len(blocks) * size : (len(blocks) + 1) * size]
            own = digest(parent, part)
            block = self._block.get(own)
            if block is None:
                break
            blocks.append(block)
            digests.append(own)
            parent = own
        for block in blocks:
            self._add_reader(block)
        rest = tokens[len(blocks) * size : most]
        tail, length = None, 0
        for block in self._children.get(parent, ()):
            common = _common(self._known[block][2], rest)
            if common > length or (common == length > 0 and tail is not None and block < tail):
                tail, length = block, common
        return Match(blocks, tail, length, digests)

    def acquire(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, bytes] | None:
        """Find the block with a text behind all text before it, and add a reader; return its digest too, None if none.

        parent: as in `publish`.
        """
        own = digest(parent, tokens)
        block = self._block.get(own)
        if block is None:
            return None
        self._add_reader(block)
        return block, own

    def invalidate(self, block: int) -> None:
        """Make the text of a block in use unknown: the block's content may be wrong."""
        if block in self._known:
            self._drop(block)

    def invalidate_all(self) -> None:
        """Make every text unknown: the content of the blocks is no longer valid."""
        for block in list(self._known):
            self._drop(block)
        self._free.extend(self._evictable)
        self._evictable.clear()

    def _add_reader(self, block: int) -> None:
        if self._readers[block] == 0:
            del self._evictable[block]
        self._readers[block] += 1

    def _drop(self, block: int) -> None:
        """Make a block's text unknown; whether the block is free is the caller's business."""
        parent, own, _ = self._known.pop(block)
        del self._block[own]
        self._children[parent].discard(block)
        if not self._children[parent]:
            del self._children[parent]

    def check(self, readers: Sequence[int]) -> None:
        """Check the invariants; readers: how many requests hold each block.

        Raises:
          AssertionError: a block is in two lists or in none, or a number is wrong.
        """
        free, evictable = set(self._free), set(self._evictable)
        held = {block for block in range(1, self.num_blocks) if self._readers[block]}
        assert list(readers) == self._readers, (list(readers), self._readers)
        assert len(free) == len(self._free), self._free
        assert not (free & evictable or free & held or evictable & held), (free, evictable, held)
        assert free | evictable | held == set(range(1, self.num_blocks)), (free, evictable, held)
        assert evictable <= set(self._known) and not free & set(self._known), (evictable, free)
        assert {own: block for block, (_, own, _) in self._known.items()} == self._block
        children = collections.defaultdict(set)
        for block, (parent, own, tokens) in self._known.items():
            assert own == digest(parent, tokens) and len(tokens) == self.block_size, (block, own)
            children[parent].add(block)
        assert children == self._children, (children, self._children)


def digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return a hash that identifies a block's text and all text before it."""
    return hashlib.sha256(parent + np.asarray(tokens, np.int32).tobytes()).digest()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens in the common beginning."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(differ[0]) if len(differ) else length
