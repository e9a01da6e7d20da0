"""A trained detector's p-value of one text, to be read beside the exact test's.

The p-value is conformal (train_detector.py): the text's score is ranked among those of human passages of its length
under random keys, which train-detector kept for this (`calibration.npy`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxbench.watermark import config, features, train_detector
from jaxbench.watermark.reference import Evidence

NUM_NULL = 4000


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
        self._vocab_size, self._scorer = vocab_size, train_detector.Scorer(shape, params)
        self._human = features.load_calibration(folder)

    def check(self, scheme: Any) -> None:
        """Raise where the detector cannot judge a scheme.

        Raises:
          ValueError: the scheme carries a payload: evidence of the likeliest of many messages is not that of one key.
        """
        if config.num_payloads(scheme) > 1:
            raise ValueError(f"neural: scheme {scheme.scheme} has payload_bits={scheme.payload_bits}, wanted 0")

    def __call__(self, scheme: Any, tokens: np.ndarray, evidence: Evidence) -> NeuralVerdict:
        """Judge a text (ids [T]) by the evidence [1 T] that a Detector found under the key in question.

        Raises:
          ValueError: as check.
        """
        self.check(scheme)
        length = min(len(tokens), self._human.shape[1])
        if not evidence.scored[0, :length].any():
            return NeuralVerdict(1.0, 0, length)
        value = features.evidence(scheme, evidence)[:, :length].astype(np.float32)
        row = (np.asarray(tokens[:length], np.int32)[None], value, evidence.scored[:, :length], np.zeros(1, np.float32))
        null = train_detector.null_scores(
            self._scorer, scheme, self._human, length=length, count=NUM_NULL, vocab_size=self._vocab_size, seed=0
        )
        p = train_detector.conformal_p(self._scorer(features.Arrays(*row)), null)
        return NeuralVerdict(float(p[0]), NUM_NULL, length)
