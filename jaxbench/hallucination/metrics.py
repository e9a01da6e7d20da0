"""Metrics of how well scores separate hallucinated responses from the others, with intervals over sources (S file).

Labels are booleans, or 1 and 0; a higher score means more suspicion. AUC pooled over tasks rewards knowing the task,
and AUC pooled over generators knowing the generator. `macro` is the mean over tasks; `stratified` compares only pairs
within a cell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxbench.measure.ranking import auc, booleans

Array = np.ndarray


class Interval(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def macro_auc(labels: Array, scores: Array, tasks: Array) -> float:
    """Mean AUC of the tasks that have both classes."""
    found = [auc(labels[tasks == task], scores[tasks == task]) for task in np.unique(tasks)]
    return float(np.nanmean(found)) if not np.all(np.isnan(found)) else float("nan")


def stratified_auc(labels: Array, scores: Array, cells: Array) -> float:
    """AUC over pairs of a positive and a negative within one cell; every such pair has the same weight.

    Raises:
      ValueError: as `auc`.
    """
    labels = booleans(labels)
    total = won = 0.0
    for cell in np.unique(cells):
        mine = labels[cells == cell]
        pairs = float(np.sum(mine)) * float(np.sum(~mine))
        if pairs:
            total += pairs
            won += pairs * auc(mine, scores[cells == cell])
    return won / total if total else float("nan")


def average_precision(labels: Array, scores: Array) -> float:
    """Area under the precision-recall curve, as a sum over its steps."""
    precision, recall, _ = precision_recall(labels, scores)
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))


def precision_recall(labels: Array, scores: Array, weights: Array | None = None) -> tuple[Array, Array, Array]:
    """Precision, recall and threshold, for all distinct thresholds, highest first; a score at its threshold is flagged.

    weights: of each example; None = 1.
    """
    weights = np.ones(len(labels)) if weights is None else weights
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.diff(scores[order], append=-np.inf))
    hits = np.cumsum((labels * weights)[order])[ends]
    flagged = np.maximum(np.cumsum(weights[order])[ends], 1e-12)
    return hits / flagged, hits / max(float(np.sum(labels * weights)), 1e-12), scores[order][ends]


def best_threshold(labels: Array, scores: Array, weights: Array | None = None) -> float:
    """Threshold with the highest F1, halfway to the next lower score."""
    precision, recall, thresholds = precision_recall(labels, scores, weights)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    best = int(np.argmax(f1))
    below = thresholds[best + 1] if best + 1 < len(thresholds) else thresholds[best]
    middle = (thresholds[best] + below) / 2
    return float(middle if middle > below else thresholds[best])  # of neighbouring floats, the middle is one of them


def f1(labels: Array, flagged: Array) -> tuple[float, float, float]:
    """F1, precision and recall of flags."""
    hits = float(np.sum(labels & flagged))
    precision, recall = hits / max(int(np.sum(flagged)), 1), hits / max(int(np.sum(labels)), 1)
    return 2 * precision * recall / max(precision + recall, 1e-12), precision, recall


def correlation(labels: Array, scores: Array) -> float:
    """Pearson's correlation of scores and labels; NaN if either is the same throughout."""
    if np.ptp(scores) == 0 or labels.all() or not labels.any():
        return float("nan")
    return float(np.corrcoef(labels.astype(float), scores)[0, 1])


def brier(labels: Array, probability: Array) -> float:
    """Mean squared error of probabilities, 0 to 1."""
    from sklearn.metrics import brier_score_loss

    return float(brier_score_loss(labels, probability))


def reliability(labels: Array, probability: Array, *, bins: int = 10) -> dict[str, list[float]]:
    """Reliability curve over bins with equally many rows: mean probability ("said"), share of positives ("share")."""
    from sklearn.calibration import calibration_curve

    share, said = calibration_curve(labels, probability, n_bins=bins, strategy="quantile")
    return {"said": said.tolist(), "share": share.tolist()}


def bootstrap(
    statistics: Sequence[Callable[[Array], float]], clusters: Array, *, draws: int = 2000, seed: int = 0
) -> list[Interval]:
    """Bootstrap statistics (functions of row indices): values, with percentile intervals over resampled clusters.

    All statistics see the same draws, so that a difference of two is paired. A statistic that is NaN in every draw, as
    the AUC within cells is if no cell has both classes, has NaN as the ends of its interval.
    """
    names, inverse = np.unique(clusters, return_inverse=True)
    members = [np.flatnonzero(inverse == i) for i in range(len(names))]
    random = np.random.default_rng(seed)
    found = np.array(
        [
            [statistic(rows) for statistic in statistics]
            for rows in (
                np.concatenate([members[i] for i in random.integers(0, len(names), len(names))]) for _ in range(draws)
            )
        ]
    )
    every = np.arange(len(clusters))
    ends = np.full((2, len(statistics)), np.nan)
    known = ~np.isnan(found).all(0)  # numpy warns about the others
    ends[:, known] = np.nanpercentile(found[:, known], [2.5, 97.5], axis=0)
    return [Interval(statistic(every), *map(float, each)) for statistic, each in zip(statistics, ends.T)]
