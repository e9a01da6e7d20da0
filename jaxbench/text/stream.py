"""Pieces of a UTF-8 file that need not fit in memory (S file)."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

SIZE = 1 << 20  # bytes of a piece


def check(path: Path) -> None:
    """Check that a file is a text.

    Raises:
      ValueError: it is no file, empty, or no UTF-8.
    """
    if not path.is_file():
        raise ValueError(f"--input={path} is no file")
    if not path.stat().st_size:
        raise ValueError(f"--input={path} is empty; wanted a text")
    for _ in read(path):
        pass


def read(path: Path, size: int = SIZE) -> Iterator[tuple[str, int]]:
    """Pieces of a file's text, and the bytes that each was read from.

    Raises:
      ValueError: bytes are no UTF-8; the message says where.
    """
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    with open(path, "rb") as file:
        while True:
            content = file.read(size)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                place = at - pending + error.start
                raise ValueError(f"{path} is no UTF-8 text: byte {place} ({error.reason})") from error
            if not content:
                if text:
                    yield text, 0
                return
            at += len(content)
            yield text, len(content)
