"""Text and token files as packed batches: tokenised once, memory-mapped, a pure function of (seed, step) (S file).

    corpus = prepare("books.jsonl.gz", tokenizer="byte")
    train, validation = split(corpus, 0.1)
    batch = PackedDataset(train, seq_len=256, seed=0).batch(step=17, batch_size=32)

Each epoch concatenates all documents in its own order, cuts the stream into rows of seq_len tokens, and takes the rows
in its own order; row r of step s is row s * batch_size + r of the endless sequence of epochs. Nothing is kept between
steps: any host can ask for any rows of any step, so the data of a run depends neither on the number of hosts nor on
where it was interrupted. Axis letters: B rows of a batch, T tokens of a row.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import tokenize
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64

from jaxbench import outputs, philox, process_environment
from jaxbench.pretrained import assets, small_tokenizers
from jaxbench.pretrained.tokenizer import identity
from jaxbench.text import packing
from jaxbench.text.lines import JSON_LINES
from jaxbench.text.packing import DOCUMENT_SEPARATOR, SUFFIXES, text_sha256

TOKEN_SUFFIXES = (".npy", ".bin")  # one-dimensional integers; .bin is little-endian uint16, as nanoGPT writes it
FORMAT = 2  # of the cache; after a change every text is tokenised again
IDS, STARTS, META = "ids.bin", "starts.npy", "meta.json"
Progress = Callable[[int, int], None]  # bytes of the file read, bytes in all


class Corpus(NamedTuple):
    """Documents as one array of ids; document i is ids[starts[i] : starts[i + 1]], its end token included."""

    ids: Int[np.ndarray, " tokens"]  # memory-mapped
    starts: Int64[np.ndarray, " documents+1"]
    tokenizer: Any  # None for a token file
    sha256: str  # of the file (default text: of its bytes)


class Batch(NamedTuple):
    """One packed batch; the fields of a backend's Batch."""

    tokens: Int32[np.ndarray, "B T"]
    targets: Int32[np.ndarray, "B T"]  # the document's next token, 0 where there is none
    positions: Int32[np.ndarray, "B T"]  # from 0 in each segment of a row, -1 for padding
    mask: Bool[np.ndarray, "B T"]  # True where the target counts
    segments: Int32[np.ndarray, "B T"]  # documents of a row are 1, 2, ...; padding 0


# Preparing a corpus


def prepare(
    path: str | Path | None,
    *,
    tokenizer: Any = "byte",
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Corpus of a file: its documents as memory-mapped token ids, tokenised on first use.

    Args:
      path: .txt (form feeds between documents) or .jsonl (a "text" key in each line), plain or .gz, UTF-8; or ids as
        .npy or .bin; None = the default text.
      tokenizer: "byte", "character" (its vocabulary is the text's characters), a tokenizer, or what
        `tokenizer.load_tokenizer` takes ("default", a GGUF file, a folder, a hub id).
      cache: folder for the ids; the default is tokens/ in the cache folder.
      progress: called with bytes read and bytes in all while a text is tokenised.

    Raises:
      ValueError: no such file, unknown suffix, no text, a line that is not UTF-8 or not JSON; the place is named.
    """
    if path is not None and Path(path).suffix in TOKEN_SUFFIXES:
        return _token_file(Path(path).expanduser(), None if tokenizer in small_tokenizers.KINDS else tokenizer)
    if path is not None:
        path = Path(path).expanduser()
        if not path.name.endswith(SUFFIXES):
            raise ValueError(f"dataset: {path} has an unknown suffix, wanted {', '.join((*SUFFIXES, *TOKEN_SUFFIXES))}")
        if not path.is_file():
            raise ValueError(f"dataset: {path} is no file")
    sha256 = text_sha256(path)
    tokenizer = _load_tokenizer(tokenizer)
    name = tokenizer if isinstance(tokenizer, str) else tokenizer_id(tokenizer)
    key = hashlib.sha256(json.dumps([FORMAT, sha256, name, _kind(path)]).encode()).hexdigest()[:24]
    folder = (process_environment.cache_dir() / "tokens" if cache is None else Path(cache)) / key
    if not _is_whole(folder):
        try:
            _build(folder, path, tokenizer, progress)
        except OSError:
            if not _is_whole(folder):  # else another process has made it meanwhile
                raise
    return _open(folder, tokenizer, sha256)


def tokenizer_id(tokenizer: Any) -> str:
    """Cache key of a tokenizer; one that gives other ids has another key."""
    if isinstance(tokenizer, small_tokenizers.ByteTokenizer):
        return "byte"
    if isinstance(tokenizer, small_tokenizers.CharacterTokenizer):
        return "character " + hashlib.sha256(tokenizer.characters.encode()).hexdigest()
    return hashlib.sha256(f"{tokenizer.eos_id} {identity(tokenizer.core)}".encode()).hexdigest()


def split(corpus: Corpus, fraction: float) -> tuple[Corpus, Corpus]:
    """First and last part of a corpus, cut at token floor((1 - fraction) * tokens), even inside a document.

    Raises:
      ValueError: fraction is outside (0, 1), or a part would be empty.
    """
    count = len(corpus.ids)
    cut = int((1.0 - fraction) * count)
    if not 0.0 < fraction < 1.0 or not 0 < cut < count:
        raise ValueError(f"dataset: a fraction of {fraction} of {count} tokens leaves nothing on one side of the cut")
    inside = corpus.starts[(corpus.starts > 0) & (corpus.starts < count)]
    first = np.concatenate([[0], inside[inside < cut], [cut]])
    second = np.concatenate([[cut], inside[inside > cut], [count]]) - cut
    return corpus._replace(ids=corpus.ids[:cut], starts=first), corpus._replace(ids=corpus.ids[cut:], starts=second)


def check(corpus: Corpus, *, vocab_size: int, what: str) -> None:
    """Check that a decoder of this vocabulary can learn from a corpus, or be measured on it; `what` names it in errors.

    Raises:
      ValueError: an id lies outside the vocabulary, or no token follows another.
    """
    ids, num_documents = corpus.ids, len(corpus.starts) - 1
    if len(ids) <= num_documents:
        raise ValueError(
            f"dataset: {what} has {len(ids)} tokens in {num_documents} documents, so that none follows another and "
            "there is no target; use a longer text, or hold out another share of it (data.validation_fraction)"
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        place = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        raise ValueError(
            f"dataset: {what} has token id {ids[place]} at place {place}, wanted 0 to {vocab_size - 1} "
            f"(model.vocab_size={vocab_size})"
        )


def documents(path: Path | None, progress: Progress | None = None) -> Iterator[str]:
    """Yield the documents of a text file, one in memory at a time for .jsonl.

    Raises:
      ValueError: a damaged file or line, with line and byte offset.
    """
    if path is None:
        yield from assets.default_text().split(DOCUMENT_SEPARATOR)
        return
    size, has_lines = max(path.stat().st_size, 1), path.name.endswith(JSON_LINES)
    with open(path, "rb") as raw:
        stream = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        offset = 0
        try:
            for line_number, content in enumerate(stream if has_lines else iter([stream.read()]), start=1):
                text = _decoded(path, content, line_number, offset)
                offset += len(content)
                if has_lines and text.strip():
                    yield packing.json_text(text, f"dataset: {path} line {line_number}")
                elif not has_lines:
                    yield from (part for part in text.split(DOCUMENT_SEPARATOR) if part.strip())
                if progress is not None:
                    progress(min(raw.tell(), size), size)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"dataset: cannot read {path} past byte {offset} ({error})") from error


def _decoded(path: Path, content: bytes, line: int, offset: int) -> str:
    """Text of a line, or of a whole file, that starts at a byte offset."""
    try:
        return content.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        raise ValueError(
            f"dataset: {path} line {line} is not UTF-8 (byte {content[error.start]:#04x} at offset "
            f"{offset + error.start}); convert it, for example with iconv -t UTF-8"
        ) from error


def _load_tokenizer(spec: Any) -> Any:
    """Tokenizer by name, path or value; "character" stays a string, because its vocabulary is the text's."""
    if spec == "byte":
        return small_tokenizers.ByteTokenizer()
    if spec is None or (isinstance(spec, str | Path) and spec != "character"):
        from jaxbench.pretrained import tokenizer

        return tokenizer.load_tokenizer(spec)
    return spec


def _kind(path: Path | None) -> str:
    return "default" if path is None else ".jsonl" if path.name.endswith(JSON_LINES) else ".txt"


def _is_whole(folder: Path) -> bool:
    """True if a cache folder holds as many ids as its metadata says, and documents up to the last of them."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        size = meta["num_tokens"] * np.dtype(meta["dtype"]).itemsize
        starts = np.load(folder / STARTS, mmap_mode="r")
        return (folder / IDS).stat().st_size == size and bool(starts[-1] == meta["num_tokens"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError):
        return False


def _build(folder: Path, path: Path | None, tokenizer: Any, progress: Progress | None) -> None:
    """Tokenise a text into a folder that appears whole or not at all."""
    if tokenizer == "character":
        tokenizer = small_tokenizers.CharacterTokenizer("".join(sorted(set().union(*map(set, documents(path))))) or " ")
    with outputs.whole_folder(folder) as made:
        dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
        end = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype)
        starts = [0]
        with open(made / IDS, "wb") as file:
            for number, document in enumerate(documents(path, progress), start=1):
                try:
                    ids = small_tokenizers.encode_array(tokenizer, document)
                except ValueError as error:
                    raise ValueError(f"dataset: {path or 'the default text'} document {number}: {error}") from error
                if len(ids):
                    # Some tokenizers append the end token themselves.
                    ending = end[:0] if ids[-1] == tokenizer.eos_id else end
                    file.write(np.concatenate([ids.astype(dtype), ending]).tobytes())
                    starts.append(starts[-1] + len(ids) + len(ending))
        if starts[-1] == 0:
            size = 0 if path is None else path.stat().st_size
            raise ValueError(f"dataset: {path} has no text in its {size} bytes")
        np.save(made / STARTS, np.array(starts, np.int64))
        meta = {"dtype": dtype.str, "num_tokens": starts[-1], "vocab_size": tokenizer.vocab_size}
        meta |= {"characters": getattr(tokenizer, "characters", None), "source": str(path or "default text")}
        (made / META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        if folder.exists() and not _is_whole(folder):
            shutil.rmtree(folder)  # damaged, or of a build that a crash cut off


def _open(folder: Path, tokenizer: Any, sha256: str) -> Corpus:
    """Corpus of a cache folder."""
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    if tokenizer == "character":
        tokenizer = small_tokenizers.CharacterTokenizer(meta["characters"])
    ids = np.memmap(folder / IDS, dtype=meta["dtype"], mode="r")
    return Corpus(ids, np.load(folder / STARTS), tokenizer, sha256)


def _token_file(path: Path, tokenizer: Any) -> Corpus:
    """Corpus of a file of ids; each end token of the tokenizer closes a document."""
    try:  # not by np.load, which opens archives and pickles under any name
        is_array = path.suffix == ".npy"
        ids = np.lib.format.open_memmap(path, mode="r") if is_array else np.memmap(path, dtype="<u2", mode="r")
    except (OSError, ValueError, tokenize.TokenError) as error:  # numpy parses a damaged header as Python
        raise ValueError(f"dataset: cannot read {path} as token ids ({error})") from error
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not len(ids):
        raise ValueError(f"dataset: {path} is {ids.dtype} of shape {ids.shape}, wanted a row of integers")
    tokenizer = None if tokenizer is None else _load_tokenizer(tokenizer)
    ends = np.array([], np.int64)
    if tokenizer is not None and tokenizer.eos_id is not None:
        ends = np.flatnonzero(ids == tokenizer.eos_id) + 1
    inside = ends[ends < len(ids)]
    return Corpus(ids, np.concatenate([[0], inside, [len(ids)]]), tokenizer, assets.sha256_file(path))


# Batches


class PackedDataset:
    """Packed rows of a corpus by index, a function of (seed, step); see the module's docstring.

    A document that is cut continues in another row as a separate segment and loses no target; only the last row of an
    epoch is padded. Memory: 8 bytes a document and 4 a row for each of the last two epochs.
    """

    def __init__(self, corpus: Corpus, seq_len: int, *, seed: int, shuffle: bool = True):
        """Keep the corpus.

        Raises:
          ValueError: seq_len is below 1.
        """
        if seq_len < 1:
            raise ValueError(f"dataset: seq_len={seq_len} must be at least 1")
        self.corpus, self.seq_len, self.seed, self.shuffle = corpus, seq_len, seed, shuffle
        self.num_tokens = len(corpus.ids)
        self.rows_per_epoch = -(-self.num_tokens // seq_len)
        self._lengths = np.diff(corpus.starts)
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def batch(self, step: int, batch_size: int, *, first: int = 0, count: int | None = None) -> Batch:
        """Packed batch of one step, or its rows first to first + count.

        Raises:
          ValueError: step is negative, or the rows lie outside the batch.
        """
        count = batch_size - first if count is None else count
        if step < 0 or not 0 <= first < first + count <= batch_size:
            raise ValueError(f"dataset: step={step}, rows {first} to {first + count} of a batch of {batch_size}")
        return self.rows(step * batch_size + first, count)

    def rows(self, first: int, count: int) -> Batch:
        """Packed rows first to first + count of the endless sequence of epochs."""
        rows = [self._row(index) for index in range(first, first + count)]
        return Batch(*(np.stack(parts) for parts in zip(*rows, strict=True)))

    def num_documents(self, count: int) -> Iterator[Int64[np.ndarray, " rows"]]:
        """Yield the number of documents, cut ones included, in each of the first `count` rows, epoch by epoch."""
        for first in range(0, count, self.rows_per_epoch):
            _, ends, rows = self._epoch(first // self.rows_per_epoch)
            starts = rows[: count - first].astype(np.int64) * self.seq_len
            last = np.minimum(starts + self.seq_len, self.num_tokens) - 1
            yield 1 + np.searchsorted(ends, last, side="right") - np.searchsorted(ends, starts, side="right")

    def _row(self, index: int) -> Batch:
        """One packed row, arrays [T]."""
        epoch, row = divmod(index, self.rows_per_epoch)
        order, ends, rows = self._epoch(epoch)
        start = int(rows[row]) * self.seq_len
        stop = min(start + self.seq_len, self.num_tokens)
        tokens, targets = np.zeros(self.seq_len, np.int32), np.zeros(self.seq_len, np.int32)
        positions, segments = np.full(self.seq_len, -1, np.int32), np.zeros(self.seq_len, np.int32)
        mask = np.zeros(self.seq_len, bool)
        place, segment = int(np.searchsorted(ends, start, side="right")), 0
        while start < stop:
            document, segment = order[place], segment + 1
            part = min(int(ends[place]), stop) - start
            at = int(self.corpus.starts[document]) + int(self._lengths[document]) - (int(ends[place]) - start)
            known = min(part, int(ends[place]) - start - 1)  # the document's last token has no target
            out = slice(part_start := start - int(rows[row]) * self.seq_len, part_start + part)
            tokens[out] = self.corpus.ids[at : at + part]
            targets[part_start : part_start + known] = self.corpus.ids[at + 1 : at + 1 + known]
            mask[part_start : part_start + known] = True
            positions[out], segments[out] = np.arange(part), segment
            start, place = start + part, place + 1
        return Batch(tokens, targets, positions, mask, segments)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Order of an epoch's documents, their ends in tokens in that order, and order of its rows."""
        known = self._epochs  # replaced, never changed: another thread may ask for other epochs meanwhile
        if epoch not in known:
            order = self._order("dataset.documents", epoch, len(self._lengths))
            rows = self._order("dataset.rows", epoch, self.rows_per_epoch)
            kept = list(known)[-1:]  # a batch may span two epochs
            ends = np.cumsum(self._lengths[order])
            known = self._epochs = {e: known[e] for e in kept} | {epoch: (order, ends, rows)}
        return known[epoch]

    def _order(self, site: str, epoch: int, count: int) -> Int32[np.ndarray, " count"]:
        """Permutation of an epoch, drawn from Philox; 0, 1, .. without shuffling."""
        if not self.shuffle:
            return np.arange(count, dtype=np.int32)
        words = philox.words(self.seed, step=epoch, site=site, rows=np.zeros(1), num_elements=count)[0]
        return np.argsort(words, kind="stable").astype(np.int32)
