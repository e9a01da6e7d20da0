"""A model whose next token is a hash of everything that it sees, with its cache and without (S file).

For each token, a block holds a hash of the token and of what the blocks hold for all tokens before it, just as keys and
values of a deep decoder depend on these. One wrong block, position or order gives a different next token.
"""

from __future__ import annotations

import numpy as np

from jaxbench.serve.batch_rows import Batch, pieces

MASK = 2**61 - 1


def mixed(hash: int, value: int) -> int:
    """Return the hash of what came before and of one more number."""
    return (hash * 6364136223846793005 + value * 2862933555777941757 + 1442695040888963407) % MASK


def logits_of(hash: int, vocab_size: int) -> np.ndarray:
    """Return float32 logits that the hash determines."""
    return np.random.default_rng(hash).standard_normal(vocab_size).astype(np.float32)


class HashModel:
    """The model without a cache."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def logits(self, tokens: list[int], num_prompt: int = 0) -> np.ndarray:
        """Return the logits after a text; num_prompt makes no difference."""
        held: list[int] = []
        for token in tokens:
            held.append(_held(held, token))
        return logits_of(_seen(held), self.vocab_size)


class HashRunner:
    """The same model as an engine's Runner; it can be told to fail."""

    segment = None

    def __init__(
        self, *, num_blocks: int, block_size: int, max_seq_len: int, vocab_size: int, sizes: tuple[int, ...],
        max_wanted: int,
    ):  # fmt: skip
        self.num_blocks, self.block_size, self.max_seq_len = num_blocks, block_size, max_seq_len
        self.vocab_size, self.sizes, self.max_wanted = vocab_size, sizes, max_wanted
        self.cells: dict[tuple[int, int], int] = {}
        self.fails = 0  # number of next steps that fail
        self.spoilt: set[int] = set()  # of the next step's wanted rows, those whose logits are NaN

    def reset(self) -> None:
        """Forget what the blocks hold."""
        self.cells.clear()

    def run(self, batch: Batch) -> np.ndarray:
        """Return the logits of the wanted rows.

        Raises:
          RuntimeError: it was told to fail; half of the work is done by then.
        """
        copied = [
            {(to, i): self.cells[from_, i] for i in range(self.block_size) if (from_, i) in self.cells}
            for from_, to in batch.copies.tolist()
        ]
        for cells in copied:
            self.cells |= cells
        rows, count = {}, len(batch.tokens)
        for row in range(count // 2 if self.fails else count):
            position = int(batch.positions[row])
            if position < 0:
                continue
            held = [self.cells.get(self._cell(batch, row, i), -1) for i in range(position)]
            held.append(_held(held, int(batch.tokens[row])))
            self.cells[self._cell(batch, row, position)] = held[-1]
            rows[row] = _seen(held)
        if self.fails:
            self.fails -= 1
            raise RuntimeError(f"the runner was told to fail, {self.fails} times more")
        found = np.zeros((len(batch.wanted), self.vocab_size), np.float32)
        for i, row in enumerate(batch.wanted.tolist()):
            found[i] = np.nan if i in self.spoilt else logits_of(rows[row], self.vocab_size)
        self.spoilt = set()
        return found

    def _cell(self, batch: Batch, row: int, position: int) -> tuple[int, int]:
        return int(batch.table[row, position // self.block_size]), position % self.block_size


class SegmentModel:
    """A model that remembers where its text was cut, without slots."""

    def __init__(self, vocab_size: int, segment: int):
        self.vocab_size, self.segment = vocab_size, segment

    def logits(self, tokens: list[int], num_prompt: int) -> np.ndarray:
        """Return the logits after a text; its prompt of num_prompt tokens is cut at multiples of the segment."""
        cuts = [*range(0, num_prompt, self.segment), *range(num_prompt, len(tokens) + 1)]
        state = 0
        for start, end in zip(cuts, cuts[1:]):
            state = _read(state, tokens[start:end])
        return logits_of(state, self.vocab_size)


class SlotRunner:
    """SegmentModel as an engine's Runner with slots; it can be told to fail, as HashRunner."""

    def __init__(self, *, num_slots: int, segment: int, max_seq_len: int, vocab_size: int, max_rows: int):
        self.num_blocks, self.block_size, self.max_seq_len = num_slots + 1, max_seq_len, max_seq_len
        self.vocab_size, self.sizes, self.max_wanted, self.segment = vocab_size, (max_rows,), max_rows, segment
        self.slots: dict[int, int] = {}
        self.fails, self.spoilt = 0, set[int]()

    def reset(self) -> None:
        """Forget what the slots hold."""
        self.slots.clear()

    def run(self, batch: Batch) -> np.ndarray:
        """Return the logits of the wanted rows.

        Raises:
          RuntimeError: it was told to fail; half of the work is done by then.
        """
        found, cut = {}, pieces(batch, self.segment)
        for piece in cut[: len(cut) // 2] if self.fails else cut:
            before = self.slots.get(piece.block, -1) if piece.start else 0
            found[piece.last_row] = self.slots[piece.block] = _read(before, piece.tokens)
        if self.fails:
            self.fails -= 1
            raise RuntimeError(f"the runner was told to fail, {self.fails} times more")
        logits = np.zeros((len(batch.wanted), self.vocab_size), np.float32)
        for i, row in enumerate(batch.wanted.tolist()):
            logits[i] = np.nan if i in self.spoilt else logits_of(found[row], self.vocab_size)
        self.spoilt = set()
        return logits


def _read(state: int, tokens: list[int]) -> int:
    """Return the state after a piece of text, which depends on where the text was cut."""
    for token in tokens:
        state = mixed(state, token)
    return mixed(state, -1 - len(tokens))


def _held(before: list[int], token: int) -> int:
    return mixed(_seen(before), token)


def _seen(held: list[int]) -> int:
    hash = len(held)
    for each in held:
        hash = mixed(hash, each)
    return hash
