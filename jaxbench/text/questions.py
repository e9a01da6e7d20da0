"""Files of questions about passages: one JSON object per line, plain or compressed (S file)."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import NamedTuple

from jaxbench.text.lines import has_surrogate


class Asked(NamedTuple):
    """A question, the passage that it is about, and right answers."""

    context: str
    question: str
    answers: tuple[str, ...]  # empty = the passage does not say
    title: str  # of the article that the passage is from


def read(path: str | Path) -> list[Asked]:
    """Questions of a .jsonl or .jsonl.gz file.

    Raises:
      ValueError: the file is missing, damaged or empty, or a line is no object with the fields of Asked.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"questions: {path} is no file")
    content = path.read_bytes()
    try:
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        text = content.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"questions: {path} is damaged or no UTF-8 text ({error})") from error
    # split at newlines only: JSON strings may hold other line ends of Python's (U+2028)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"questions: {path} has none")
    return [_asked(line, f"{path} line {number}") for number, line in lines]


def _asked(line: str, place: str) -> Asked:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"questions: {place} is no JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"questions: {place} is a {type(row).__name__}, wanted an object")
    missing = [name for name in Asked._fields if name not in row]
    if missing:
        raise ValueError(f"questions: {place} has no {missing[0]!r}; wanted {', '.join(Asked._fields)}")
    texts = [row["context"], row["question"], row["title"]]
    if not (all(isinstance(each, str) for each in texts) and isinstance(row["answers"], list)):
        raise ValueError(f"questions: {place} has {texts}; wanted texts, and a list of answers")
    if wrong := [each for each in row["answers"] if not isinstance(each, str)]:
        raise ValueError(f"questions: {place} has the answer {str(wrong[0])[:60]}, wanted texts")
    if broken := [each for each in (*texts, *row["answers"]) if has_surrogate(each)]:
        raise ValueError(f"questions: {place} has a lone surrogate, which is no Unicode text: {broken[0][:60]!a}")
    return Asked(row["context"], row["question"], tuple(row["answers"]), row["title"])
