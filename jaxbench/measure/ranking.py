"""Area under the ROC curve: how well scores separate two classes (S file)."""

from __future__ import annotations

import numpy as np
from scipy import stats


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the probability that a positive scores above a negative (ties count half); NaN if a class is missing.

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
    """Return labels as booleans: integer labels would index rows 0 and 1 instead of selecting the positives."""
    labels = np.asarray(labels)
    bad = labels[(labels != 0) & (labels != 1)]
    if bad.size:
        raise ValueError(f"auc: labels hold {bad.flat[0]}, wanted True and False, or 1 and 0")
    return labels.astype(bool)
