"""Windows of a text, and windows that repeat themselves (S file)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxbench.pretrained import small_tokenizers
from jaxbench.text import packing

# Of the tokens of rows; the 64 windows of 256 tokens of the default text share 5 %.
MOST_SHARED = 0.1


class Windows(NamedTuple):
    """Windows of one text."""

    tokens: Int[np.ndarray, "N T"]
    bytes: list[int]  # of each window's tokens but the first, as UTF-8
    repeats: Int[np.ndarray, "N T"]  # the first half of each window, twice


def documents(path: str | None, *, second_half: bool) -> list[str]:
    """Documents of a file; for the default text, the first or the second half of its paragraphs."""
    if path is not None:
        return packing.load_text(path)
    paragraphs = [part for text in packing.load_text() for part in text.split("\n\n") if part.strip()]
    middle = len(paragraphs) // 2
    return ["\n\n".join(paragraphs[middle:] if second_half else paragraphs[:middle])]


def calibration(tokenizer: Any, path: str | None, rows: int, length: int) -> Int[np.ndarray, "B T"]:
    """Rows of calibration tokens.

    Raises:
      ValueError: the text is too short.
    """
    return rows_of(tokenizer, documents(path, second_half=False), rows, length)


def of_text(tokenizer: Any, path: str | None, count: int, length: int) -> Windows:
    """Take evenly spread windows of a text.

    Raises:
      ValueError: the text has fewer tokens than the windows, which would overlap for the most part.
    """
    texts = documents(path, second_half=True)
    if (size := count_tokens(tokenizer, texts, count * length)) < count * length:
        raise ValueError(
            f"prompts: the text has {size} tokens ({path or 'half of the default text'}), {count} windows of {length} "
            "were wanted; pass more text, or fewer windows"
        )
    tokens = rows_of(tokenizer, texts, count, length)
    lengths = small_tokenizers.byte_lengths(tokenizer)
    if lengths is None:
        sizes = [len(tokenizer.decode(row[1:].tolist()).encode()) for row in tokens]
    else:  # a window may begin or end inside a character, whose part decodes to the three bytes of U+FFFD
        sizes = lengths[tokens[:, 1:]].sum(axis=1).tolist()
    half = tokens[:, : length // 2]
    return Windows(tokens, sizes, np.concatenate([half, half], axis=1))


def rows_of(tokenizer: Any, texts: Sequence[str], count: int, length: int) -> Int[np.ndarray, "B T"]:
    """Take evenly spread rows of texts, each from a paragraph's start; from anywhere where that would not spread them.

    That is with too few paragraphs, and with paragraphs of such unlike lengths that rows would share more than
    MOST_SHARED of their tokens though the texts have enough for all.

    Raises:
      ValueError: the texts have fewer tokens than a row.
    """
    paragraphs = [part for text in texts for part in text.split("\n\n") if part.strip()]
    is_spread = len(paragraphs) >= count and (
        count_tokens(tokenizer, texts, count * length) < count * length
        or _shared(tokenizer, paragraphs, count, length) <= MOST_SHARED
    )
    ids = [] if is_spread else tokenizer.encode("\n\n".join(paragraphs))
    if len(ids) < length:  # enough paragraphs, or too little text: raised there
        return np.array(packing.real_prompts(tokenizer, [length] * count, paragraphs), np.int32)
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return np.array([ids[start : start + length] for start in starts], np.int32)


def _shared(tokenizer: Any, paragraphs: Sequence[str], count: int, length: int) -> float:
    """Share of the tokens of rows at evenly spread paragraphs that the next row has too."""
    starts = [i * len(paragraphs) // count for i in range(count + 1)]  # as packing.real_prompts has them
    found = (count_tokens(tokenizer, paragraphs[i:j], length) for i, j in zip(starts, starts[1:]))
    return sum(max(length - size, 0) for size in found) / (count * length)


def count_tokens(tokenizer: Any, texts: Sequence[str], enough: int) -> int:
    """Count the tokens of texts, up to `enough`."""
    count = 0
    for part in (part for text in texts for part in text.split("\n\n") if part.strip()):
        count += len(tokenizer.encode(part))
        if count >= enough:
            break
    return count


def digest(parts: Mapping[str, Any]) -> str:
    """Hash windows or rows by name: a resumed run must have the same texts."""
    content = {name: [np.asarray(array).tolist() for array in part] for name, part in parts.items()}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
