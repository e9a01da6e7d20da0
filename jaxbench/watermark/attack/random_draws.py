"""The random numbers of one text under one attack, out of Philox (S file)."""

from __future__ import annotations

import numpy as np

from jaxbench import philox


class Draws:
    """The random numbers of one text under one attack; each call gives a fresh part of the stream."""

    def __init__(self, seed: int, *, step: int, site: str, row: int):
        philox.split_seed(seed)  # a seed outside the range fails here
        self._seed, self._step, self._site, self._row, self._calls = seed, step, site, row, 0

    def uniform(self, count: int) -> np.ndarray:
        """`count` float64 uniforms in (0, 1)."""
        site = f"{self._site}/{self._calls}"
        self._calls += 1
        rows = np.array([self._row])
        return philox.uniform(philox.words(self._seed, step=self._step, site=site, rows=rows, num_elements=count)[0])

    def integers(self, count: int, limit: int) -> np.ndarray:
        """`count` integers in [0, limit)."""
        return np.floor(self.uniform(count) * limit).astype(np.int64)
