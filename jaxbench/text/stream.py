"""Read a UTF-8 file in pieces, so that it need not fit in memory (S file)."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from pathlib import Path

SIZE = 1 << 16  # bytes of a piece


def check(path: Path) -> str:
    """Check that a file is a text, and return its SHA-256.

    Raises:
      ValueError: it is no file, empty, or no UTF-8.
    """
    if not path.is_file():
        raise ValueError(f"--input={path} is no file")
    if not sum(len(text) for text, _ in read(path)):  # a byte order mark is none
        raise ValueError(f"--input={path} is empty, {path.stat().st_size} bytes; wanted a text")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(path: Path, size: int = SIZE, *, start: int = 0) -> Iterator[tuple[str, int]]:
    """Yield pieces of a file's text from byte `start` on, and the byte offset after each; a byte order mark is skipped.

    Raises:
      ValueError: bytes are no UTF-8; the message says where.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        at = start or (len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0)
        file.seek(at)
        while True:
            content = file.read(size)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                place = at - pending + error.start
                raise ValueError(f"{path} is no UTF-8 text: byte {place} ({error.reason})") from error
            if not content:
                return
            at += len(content)
            yield text, at - len(decoder.getstate()[0])
