"""Measure how well a detector separates marked from human text, from p-values alone (S file).

N is the number of texts. All rates come with Wilson's interval (1927), which keeps its coverage near 0 and 1. It takes
texts as independent draws. Texts that continue one prompt are not, so that `distinct` prompts count in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxbench.measure import ranking


class Rate(NamedTuple):
    """A share with its interval and the number of texts."""

    value: float
    low: float
    high: float
    count: int


def rate(successes: int, count: int, *, confidence: float = 0.95) -> Rate:
    """Return a share and Wilson's interval; for count = 0, nan and 0 to 1."""
    from scipy import stats

    if count == 0:
        return Rate(float("nan"), 0.0, 1.0, 0)
    low, high = stats.binomtest(successes, count).proportion_ci(confidence, method="wilson")
    return Rate(successes / count, float(low), float(high), count)


def detected(p_values: Sequence[float], fpr: float, *, distinct: int | None = None) -> Rate:
    """Return the share of texts with p <= fpr: power on marked texts, realised false-positive rate on human ones.

    distinct: independent draws that the texts amount to, for the interval; unset, or more than the texts: the texts.
    """
    p = np.asarray(p_values, np.float64)
    found = rate(int((p <= fpr).sum()), p.size)
    if distinct is None or distinct >= p.size:
        return found
    fewer = rate(round(found.value * distinct), distinct)
    return found._replace(low=min(fewer.low, found.low), high=max(fewer.high, found.high))


def rates(p_values: Sequence[float], fprs: Sequence[float], *, distinct: int | None = None) -> dict[str, dict]:
    """Return `detected` at every level, as JSON."""
    return {str(fpr): detected(p_values, fpr, distinct=distinct)._asdict() for fpr in fprs}


def auroc(marked: Sequence[float], human: Sequence[float]) -> float:
    """Return P(p of a marked text < p of a human text), ties as half (Mann and Whitney 1947); nan without texts."""
    p = np.concatenate([np.asarray(marked, np.float64), np.asarray(human, np.float64)])
    return ranking.auc(np.arange(len(p)) < len(marked), -p)


def roc(marked: Sequence[float], human: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return false- and true-positive rates as the threshold on p rises, one point per change, from (0, 0)."""
    marked, human = np.sort(np.asarray(marked, np.float64)), np.sort(np.asarray(human, np.float64))
    thresholds = np.unique(np.concatenate([marked, human]))
    false = np.searchsorted(human, thresholds, side="right") / max(human.size, 1)
    true = np.searchsorted(marked, thresholds, side="right") / max(marked.size, 1)
    keep = np.ones(len(thresholds), bool)
    if len(thresholds) > 2:  # points inside a straight run add nothing
        same = (np.diff(false)[:-1] == 0) & (np.diff(false)[1:] == 0)
        flat = (np.diff(true)[:-1] == 0) & (np.diff(true)[1:] == 0)
        keep[1:-1] = ~(same | flat)
    return [0.0, *false[keep].tolist()], [0.0, *true[keep].tolist()]


def tokens_needed(lengths: Sequence[int], p_values: np.ndarray, fpr: float) -> float:
    """Return the median over texts of the shortest length at which p <= fpr; inf if most texts are never found.

    Lengths ascend; p is nan for lengths that exceed the text.
    """
    p = np.asarray(p_values, np.float64).reshape(-1, len(lengths))
    if not p.size:
        return float("inf")
    hits = p <= fpr
    first = np.where(hits.any(axis=1), np.asarray(lengths, np.float64)[hits.argmax(axis=1)], np.inf)
    return float(np.sort(first)[(len(first) - 1) // 2])  # the lower median: never between a number and inf
