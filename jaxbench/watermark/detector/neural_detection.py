"""A trained detector's p-value of one text, to be read beside the exact test's.

The p-value is conformal (Vovk et al. 2005, chapter 2): with n null scores, of held-out human passages of the text's
length under random keys, it is (1 + number of null scores >= the text's) / (n + 1), so that it cannot be below
1 / (n + 1). It promises its level on average over texts and keys; the exact test promises it for every text, and to any
level. The passages are those that train-detector kept for this (`calibration.npy`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxbench import prompts
from jaxbench.watermark import config
from jaxbench.watermark.detector import features, neural, training_data
from jaxbench.watermark.reference import Evidence
from jaxbench.watermark.schemes.contract import Scheme

NUM_NULL = 4000
SCORING_ROWS = 64  # texts of one call, which fit the cache; fewer are filled up


class Scorer:
    """A trained detector with its compiled program."""

    def __init__(self, shape: features.NeuralConfig, params: Mapping[str, np.ndarray]):
        self.model = neural.build(shape, params)
        self._graph, self._state = nnx.split(self.model)
        self._program = jax.jit(self._predict)

    def _predict(self, state: Any, batch: neural.Batch) -> Any:
        return neural.predict(nnx.merge(self._graph, state), batch)

    def __call__(self, arrays: features.Arrays) -> np.ndarray:
        """Logits [N] (float64) of texts, SCORING_ROWS at a time."""
        arrays, found = arrays._replace(evidence=arrays.evidence.astype(np.float32)), [np.zeros(0)]
        for start in range(0, len(arrays.tokens), SCORING_ROWS):
            parts = [field[start : start + SCORING_ROWS] for field in arrays]
            count = len(parts[0])
            batch = neural.Batch(*(prompts.fill_rows(part, count, SCORING_ROWS) for part in parts))
            found.append(np.asarray(self._program(self._state, batch), np.float64)[:count])
        return np.concatenate(found)


def conformal_p(scores: np.ndarray, null: np.ndarray) -> np.ndarray:
    """(1 + #{null >= score}) / (n + 1) of each score [N] against n null scores."""
    ordered = np.sort(null)
    return (1.0 + len(ordered) - np.searchsorted(ordered, scores, side="left")) / (len(ordered) + 1.0)


def null_scores(
    scorer: Scorer, scheme: Scheme, human: np.ndarray, *, length: int, count: int, vocab_size: int, seed: int
) -> np.ndarray:
    """Scores [count] of human passages [N T], cut to a length, under random keys of a scheme."""
    random = np.random.default_rng((seed, length))
    pool = training_data.human_pool(scheme, human, vocab_size=vocab_size)
    return scorer(training_data.null_arrays(pool, np.arange(count) % len(human), length, random))


class NeuralVerdict(NamedTuple):
    """What the neural detector says of one text."""

    p_value: float  # >= 1 / (num_null + 1)
    num_null: int  # null scores it is ranked among
    num_tokens: int  # tokens that were read: at most as many as the human passages have


class NeuralTest:
    """A detector that train-detector wrote, with the human passages that calibrate it."""

    def __init__(self, folder: str | Path, *, vocab_size: int):
        """Read the detector.

        Raises:
          ValueError: a file is missing or damaged, or the detector was trained on another vocabulary.
        """
        shape, params, record = features.load(folder)
        if record.get("vocab_size") != vocab_size:
            trained = record.get("vocab_size")
            raise ValueError(f"detector: {folder} was trained on a vocabulary of {trained}, the text has {vocab_size}")
        self._vocab_size, self._scorer = vocab_size, Scorer(shape, params)
        self._human = features.load_calibration(folder)

    def check(self, scheme: Scheme) -> None:
        """Raise where the detector cannot judge a scheme.

        Raises:
          ValueError: the scheme carries a payload: evidence of the likeliest of many messages is not that of one key.
        """
        if config.num_payloads(scheme) > 1:
            raise ValueError(f"neural: scheme {scheme.scheme} has payload_bits={scheme.payload_bits}, wanted 0")

    def __call__(self, scheme: Scheme, tokens: np.ndarray, evidence: Evidence) -> NeuralVerdict:
        """Judge a text (ids [T]) by the evidence [1 T] that a Detector found under its key; errors as `check`."""
        self.check(scheme)
        length = min(len(tokens), self._human.shape[1])
        if not evidence.scored[0, :length].any():
            return NeuralVerdict(1.0, 0, length)
        value = features.evidence(scheme, evidence)[:, :length].astype(np.float32)
        row = (np.asarray(tokens[:length], np.int32)[None], value, evidence.scored[:, :length], np.zeros(1, np.float32))
        null = null_scores(
            self._scorer, scheme, self._human, length=length, count=NUM_NULL, vocab_size=self._vocab_size, seed=0
        )
        p = conformal_p(self._scorer(features.Arrays(*row)), null)
        return NeuralVerdict(float(p[0]), NUM_NULL, length)
