"""Windows of a text, and windows that repeat themselves (S file)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxbench.text import packing


class Windows(NamedTuple):
    """Windows of one text."""

    tokens: Int[np.ndarray, "N T"]
    bytes: list[int]  # of each window's tokens but the first, as UTF-8
    repeats: Int[np.ndarray, "N T"]  # the first half of each window, twice


def documents(path: str | None, *, second_half: bool) -> list[str]:
    """Documents of a file; of the default text the first half of its paragraphs, or the second."""
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
    return np.array(packing.real_prompts(tokenizer, [length] * rows, documents(path, second_half=False)), np.int32)


def of_text(tokenizer: Any, path: str | None, count: int, length: int) -> Windows:
    """Evenly spread windows of a text.

    Raises:
      ValueError: the text is too short.
    """
    tokens = np.array(packing.real_prompts(tokenizer, [length] * count, documents(path, second_half=True)), np.int32)
    sizes = [len(tokenizer.decode(row[1:].tolist()).encode()) for row in tokens]
    half = tokens[:, : length // 2]
    return Windows(tokens, sizes, np.concatenate([half, half], axis=1))
