"""Philox random numbers of one text under one attack, and the random replacement of matches (S file)."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from jaxbench import philox


class Draws:
    """The random numbers of one text under one attack; each call returns a fresh part of the stream."""

    def __init__(self, seed: int, *, step: int, site: str, row: int):
        philox.split_seed(seed)  # raises for a seed outside the range
        self._seed, self._step, self._site, self._row, self._calls = seed, step, site, row, 0

    def uniform(self, count: int) -> np.ndarray:
        """Draw `count` float64 uniforms in (0, 1)."""
        site = f"{self._site}/{self._calls}"
        self._calls += 1
        rows = np.array([self._row])
        return philox.uniform(philox.words(self._seed, step=self._step, site=site, rows=rows, num_elements=count)[0])

    def integers(self, count: int, limit: int) -> np.ndarray:
        """Draw `count` integers in [0, limit)."""
        return np.floor(self.uniform(count) * limit).astype(np.int64)


def replace_matches(
    pattern: str, text: str, strength: float, draws: Draws, replacement: Callable[..., str], *, num_picks: int = 1
) -> str:
    """Replace each match of a pattern, with probability `strength`, by replacement(match, *num_picks uniforms)."""
    count = len(re.findall(pattern, text))
    chosen = iter(draws.uniform(count) < strength)
    picks = iter(draws.uniform(num_picks * count).reshape(-1, num_picks))

    def edited(match: re.Match) -> str:
        own = next(picks)
        return replacement(match.group(), *own) if next(chosen) else match.group()

    return re.sub(pattern, edited, text)
