"""How well scores tell two classes apart (S file)."""

from __future__ import annotations

import numpy as np
from scipy import stats


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Probability that a positive has the higher score, ties half; NaN where one class is missing.

    Raises:
      ValueError: a label is neither 0 nor 1.
    """
    labels = booleans(labels)
    positive = int(np.sum(labels))
    negative = len(labels) - positive
    if not positive or not negative:
        return float("nan")
    ranks = stats.rankdata(scores)
    return float((np.sum(ranks[labels]) - positive * (positive + 1) / 2) / (positive * negative))


def booleans(labels: np.ndarray) -> np.ndarray:
    """Labels as booleans: as whole numbers they would pick rows 0 and 1 in place of the positives."""
    labels = np.asarray(labels)
    bad = labels[(labels != 0) & (labels != 1)]
    if bad.size:
        raise ValueError(f"auc: labels hold {bad.flat[0]}, wanted True and False, or 1 and 0")
    return labels.astype(bool)
