"""Text into prompts and packed batches: both backends read the same arrays (S file).

Axis letters: B rows of a batch, T tokens of a row.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxbench import assets, philox

SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")
DOCUMENT_SEPARATOR = "\f"  # a form feed in a .txt file
PADDING_SEGMENT, PADDING_POSITION, NO_TARGET = 0, -1, -1


@runtime_checkable
class Encoder(Protocol):
    """What is needed of a tokenizer."""

    eos_id: int | None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...


class Batch(NamedTuple):
    """One packed batch, each [B T] int32. Documents of a row have segments 1, 2, ...; padding 0."""

    tokens: np.ndarray
    targets: np.ndarray  # the document's next token, -1 where there is none
    segments: np.ndarray
    positions: np.ndarray  # from 0 in each segment of a row, -1 for padding


def load_text(path: str | Path | None = None) -> list[str]:
    """Return the documents of a file, or of the default text.

    .txt (documents parted by form feeds) or .jsonl (a "text" key in each line), plain or .gz, UTF-8.

    Raises:
      ValueError: no such file, another suffix, no text in it, or a damaged line; the message names file and line.
    """
    if path is None:
        return assets.default_text().split(DOCUMENT_SEPARATOR)
    path = Path(path).expanduser()
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"data: {path} has an unknown suffix, wanted one of {', '.join(SUFFIXES)}")
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"data: cannot read {path} ({error})") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"data: {path} line {line} is not UTF-8 (byte {content[error.start]:#04x})") from error
    if ".jsonl" in path.suffixes:
        documents = [_json_text(path, i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    else:
        documents = text.split(DOCUMENT_SEPARATOR)
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ValueError(f"data: {path} has no text in its {len(content)} bytes")
    return documents


def text_sha256(path: str | Path | None = None) -> str:
    """Return the checksum that records carry: of the file as it is, or of the default text."""
    return assets.TEXT_SHA256 if path is None else assets.sha256_file(path)


def encode_documents(tokenizer: Encoder, documents: Sequence[str]) -> list[list[int]]:
    """Return each document's token ids, closed by the end token where the model has one."""
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return [tokenizer.encode(document) + end for document in documents]


def real_prompts(tokenizer: Encoder, lengths: Sequence[int], documents: Sequence[str]) -> list[list[int]]:
    """Return one prompt of exactly each length in tokens, out of evenly spread places of the documents.

    A prompt starts at a paragraph and reads on, into the next documents if need be and from the last to the first.

    Raises:
      ValueError: a length below 1, or more tokens wanted than the documents have.
    """
    paragraphs = [part for document in documents for part in document.split("\n\n") if part.strip()]
    if any(length < 1 for length in lengths):
        raise ValueError(f"prompts: lengths {list(lengths)} must be at least 1 token")
    prompts: list[list[int]] = []
    for i, length in enumerate(lengths):
        start = i * len(paragraphs) // len(lengths)
        ordered = paragraphs[start:] + paragraphs[:start]
        prompts.append(_first_tokens(tokenizer, ordered, length))
    return prompts


def batches(token_ids: Sequence[Sequence[int]], batch: int, seq_len: int, *, seed: int, step: int) -> Batch:
    """Return the packed batch of one step; see PackedBatches, which is faster for many steps."""
    return PackedBatches(token_ids, batch, seq_len, seed=seed)(step)


class PackedBatches:
    """Packed batches by step number: any step can be asked for, in any order, and is a function of (seed, step).

    Each epoch lays all documents end to end in an order of its own and cuts the stream into rows of seq_len tokens;
    row r of step s is row s * batch + r of the endless sequence of epochs. A document that is cut continues in the
    next row as a segment of its own, and loses no target. Only the last row of an epoch is padded.
    """

    def __init__(self, token_ids: Sequence[Sequence[int]], batch: int, seq_len: int, *, seed: int):
        """Keep the documents.

        Raises:
          ValueError: no tokens, or sizes below 1.
        """
        if batch < 1 or seq_len < 1:
            raise ValueError(f"batches: batch={batch} and seq_len={seq_len} must be at least 1")
        self.documents = [np.asarray(ids, np.int32) for ids in token_ids if len(ids)]
        self.num_tokens = sum(len(ids) for ids in self.documents)
        if not self.num_tokens:
            raise ValueError(f"batches: the {len(token_ids)} documents have no tokens")
        self.batch, self.seq_len, self.seed = batch, seq_len, seed
        self.rows_per_epoch = -(-self.num_tokens // seq_len)
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, step: int) -> Batch:
        """Return the batch of one step.

        Raises:
          ValueError: step is negative.
        """
        if step < 0:
            raise ValueError(f"batches: step={step} must not be negative")
        rows = [self._row(step * self.batch + r) for r in range(self.batch)]
        return Batch(*(np.stack(parts) for parts in zip(*rows, strict=True)))

    def _row(self, index: int) -> Batch:
        epoch, row = divmod(index, self.rows_per_epoch)
        stream, owner = self._epoch(epoch)
        start = row * self.seq_len
        tokens, owners = stream[start : start + self.seq_len], owner[start : start + self.seq_len]
        following, its_owner = stream[start + 1 :][: len(tokens)], owner[start + 1 :][: len(tokens)]
        targets = np.full(len(tokens), NO_TARGET, np.int32)
        same = its_owner == owners[: len(following)]
        targets[: len(following)][same] = following[same]
        is_first = np.diff(owners, prepend=-1) != 0
        segments = np.cumsum(is_first, dtype=np.int32)
        index_in_row = np.arange(len(tokens), dtype=np.int32)
        positions = index_in_row - index_in_row[is_first][segments - 1]
        missing = (0, self.seq_len - len(tokens))
        fills = (0, NO_TARGET, PADDING_SEGMENT, PADDING_POSITION)
        parts = zip((tokens, targets, segments, positions), fills, strict=True)
        return Batch(*(np.pad(part, missing, constant_values=fill) for part, fill in parts))

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return an epoch's stream of tokens and, for each, the place of its document in the epoch's order."""
        if epoch not in self._epochs:
            count = len(self.documents)
            words = philox.words(self.seed, step=epoch, site="data.shuffle", rows=np.zeros(1), num_elements=count)[0]
            ordered = [self.documents[i] for i in np.argsort(words, kind="stable")]
            owner = np.repeat(np.arange(count, dtype=np.int32), [len(ids) for ids in ordered])
            kept = list(self._epochs)[-1:]  # a batch may span two epochs
            self._epochs = {e: self._epochs[e] for e in kept} | {epoch: (np.concatenate(ordered), owner)}
        return self._epochs[epoch]


def _json_text(path: Path, number: int, line: str) -> str:
    """Return the text of one line of a .jsonl file."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"data: {path} line {number} is not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise ValueError(f'data: {path} line {number} has no "text" string: {line[:60]}')
    return value["text"]


def _first_tokens(tokenizer: Encoder, paragraphs: list[str], length: int) -> list[int]:
    """Encode as much of the paragraphs as gives this many tokens."""
    count = 1
    while True:
        ids = tokenizer.encode("\n\n".join(paragraphs[:count]))
        if len(ids) >= length:
            return ids[:length]
        if count >= len(paragraphs):
            raise ValueError(
                f"prompts: the text has {len(ids)} tokens, a prompt of {length} was wanted; pass more text"
            )
        # The next try takes what the tokens so far suggest, with a margin.
        count = min(len(paragraphs), max(count + 1, count * length // max(len(ids), 1) + 1))
