"""Files of texts in chunks, in which a bad line does not affect the rest (S file).

.jsonl has one object per line, .txt one text per line; both plain or .gz. Line numbers start at 1. A chunk's limits
depend on the file only, so that an interrupted run resumes where it stopped.
"""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

JSON_LINES = (".jsonl", ".jsonl.gz")  # in these files a line is an object, else a text
SUFFIXES = (*JSON_LINES, ".txt", ".txt.gz")
CHUNK_LINES, CHUNK_BYTES = 4096, 2**23  # a chunk ends at whichever comes first


class Chunk(NamedTuple):
    """Whole lines of one file: bytes offset..offset + size - 1 of a plain file, or the lines themselves."""

    path: str
    file: int  # index of the file in the list of inputs
    number: int  # of the chunk in the file, from 0
    first_line: int
    offset: int
    size: int
    data: bytes | None = None
    read_bytes: int = 0  # of the file on the disk, for the progress

    @property
    def name(self) -> str:
        """Name of its part files."""
        return f"{self.file:05d}-{self.number:07d}"


class Record(NamedTuple):
    """One usable line."""

    line: int
    id: str | None  # the object's own "id"
    content: str | list[int]  # text, or token ids
    prompt_tokens: int


class Bad(NamedTuple):
    """One line that cannot be used."""

    line: int
    problem: str


def find(pattern: str) -> list[str]:
    """Files that a path or a glob pattern names, sorted.

    Raises:
      ValueError: no such file, an unknown suffix, a name that is not UTF-8, or an empty file.
    """
    if Path(pattern).is_dir():
        raise ValueError(f"input: {pattern} is a folder; name its files, as in '{pattern.rstrip('/')}/*.jsonl'")
    names = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
    paths = [path for path in names if not Path(path).is_dir()]
    if not paths:
        raise ValueError(f"input: {pattern} names no file")
    for path in paths:
        if has_surrogate(path):
            raise ValueError(f"input: {path!a} has a name that is not UTF-8; rename it")
        if not path.endswith(SUFFIXES):
            raise ValueError(f"input: {path} has an unknown suffix, wanted one of {', '.join(SUFFIXES)}")
        if Path(path).stat().st_size == 0:
            raise ValueError(f"input: {path} is empty, 0 bytes")
    return paths


def chunks(path: str, file: int = 0) -> Iterator[Chunk]:
    """Yield the chunks of a file; those of a .gz file contain their lines.

    Raises:
      ValueError: the file is damaged; the message names the last line that could be read.
    """
    packed = path.endswith(".gz")
    held, lines, size, first, offset, index, seen = [], 0, 0, 1, 0, 0, 0
    with open(path, "rb") as raw:
        stream = gzip.GzipFile(fileobj=raw) if packed else raw
        while True:
            try:
                line = stream.readline()
            except (OSError, EOFError, zlib.error) as error:
                raise ValueError(f"input: {path} is damaged after line {first + lines - 1} ({error})") from error
            if lines and (not line or lines >= CHUNK_LINES or size + len(line) > CHUNK_BYTES):
                position = raw.tell() if packed else offset + size
                yield Chunk(path, file, index, first, offset, size, b"".join(held) if packed else None, position - seen)
                seen = position
                first, offset, index = first + lines, offset + size, index + 1
                held, lines, size = [], 0, 0
            if not line:
                return
            lines, size = lines + 1, size + len(line)
            if packed:
                held.append(line)


def read(chunk: Chunk, *, field: str = "text", prompt_field: str | None = None) -> tuple[list[Record], list[Bad]]:
    """Usable and bad lines of a chunk; blank lines are neither.

    Args:
      field: key of the text, or of a list of token ids, in an object.
      prompt_field: key of the number of tokens that are not scored, 0 if it is missing.
    """
    data = chunk.data
    if data is None:
        with open(chunk.path, "rb") as stream:
            stream.seek(chunk.offset)
            data = stream.read(chunk.size)
    records, bad = [], []
    is_json = chunk.path.endswith(JSON_LINES)
    lines = data.split(b"\n")
    for line_number, line in enumerate(lines, chunk.first_line):
        if line_number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8")
            records.append(_record(line_number, text, field, prompt_field) if is_json else _plain(line_number, text))
        except UnicodeDecodeError as error:
            bad.append(Bad(line_number, f"not UTF-8 (byte {line[error.start]:#04x} at {error.start})"))
        except ValueError as error:
            bad.append(Bad(line_number, str(error)))
        except RecursionError:
            bad.append(Bad(line_number, f"not JSON that can be read: {len(line):,} bytes nested too deeply"))
    return records, bad


def _plain(line_number: int, text: str) -> Record:
    return Record(line_number, None, text.removesuffix("\r"), 0)


def _record(line_number: int, text: str, field: str, prompt_field: str | None) -> Record:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(value, dict) or field not in value:
        raise ValueError(f"no key {field!r} in {_kind(value)}")
    content, prompt = value[field], value.get(prompt_field, 0) if prompt_field else 0
    if not (isinstance(content, str) or (isinstance(content, list) and all(_is_whole(one) for one in content))):
        raise ValueError(f"key {field!r} holds {_kind(content)}, wanted a text or a list of token ids")
    if isinstance(content, str) and has_surrogate(content):
        raise ValueError(f"key {field!r} holds a lone surrogate, which is no Unicode text")
    if not _is_whole(prompt):
        raise ValueError(f"key {prompt_field!r} holds {_kind(prompt)}, wanted a number of tokens")
    own = value.get("id")
    own = None if own is None else str(own)
    if own is not None and has_surrogate(own):
        raise ValueError(f"key 'id' holds a lone surrogate, which is no Unicode text: {own[:60]!a}")
    return Record(line_number, own, content, prompt)


def has_surrogate(text: str) -> bool:
    """True for a text with a lone surrogate, which JSON can contain but no Unicode encoding can represent."""
    try:
        text.encode("utf-8")  # like a search character by character, but a hundred times as fast
    except UnicodeEncodeError:
        return True
    return False


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _kind(value: Any) -> str:
    return f"an object of {len(value)} keys" if isinstance(value, dict) else f"a {type(value).__name__}"
