"""Edits of whole texts: truncation, and copy-paste into human text (S file)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxbench.watermark.attack.random_draws import Draws
from jaxbench.watermark.attack.word_level import WORD


def truncate(text: str, strength: float, draws: Draws, *, side: str) -> str:
    """Cut off a share `strength` of the words (rounded) at the end, at the start, or on both sides of a window."""
    units = [space + word for space, word in WORD.findall(text)]
    kept = len(units) - round(strength * len(units))
    start = {"end": 0, "start": len(units) - kept}.get(side)
    if start is None:
        start = int(draws.integers(1, len(units) - kept + 1)[0])
    return "".join(units[start : start + kept])


def copy_paste(text: str, strength: float, draws: Draws, *, human: Sequence[str], spans: int) -> str:
    """Put the marked text, cut into `spans` pieces of whole words, at random places of human text.

    `strength` is the share of human words in the result. The carrier starts with a random human text and continues with
    the following ones, wrapping around after the last, until it has enough words.

    Raises:
      ValueError: there is no human text, or it has too few words.
    """
    marked = [space + word for space, word in WORD.findall(text)]
    wanted = round(len(marked) * strength / (1 - strength))
    if not wanted:
        return text
    carrier = _carrier(human, wanted, int(draws.integers(1, max(len(human), 1))[0]))
    pieces = min(spans, len(marked))
    cuts = np.linspace(0, len(marked), pieces + 1).round().astype(int)
    places = np.sort(draws.integers(pieces, wanted + 1))
    out: list[str] = []
    last = 0
    for i, place in enumerate([*places.tolist(), wanted]):
        out += carrier[last:place]
        out += marked[cuts[i] : cuts[i + 1]] if i < pieces else []
        last = place
    return out[0] + "".join(unit if unit[0].isspace() else " " + unit for unit in out[1:])


def _carrier(human: Sequence[str], wanted: int, first: int) -> list[str]:
    """Return words of human texts, each with the white space before it."""
    words: list[str] = []
    for i in range(len(human)):
        text = human[(first + i) % len(human)].strip()
        words += [(space or "\n\n" if words else space) + word for space, word in WORD.findall(text)]
        if len(words) >= wanted:
            return words[:wanted]
    raise ValueError(f"copy_paste: {len(human)} human texts have {len(words)} words, {wanted} are wanted")
