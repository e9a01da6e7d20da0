"""ReDeEP's score regression: few heads' external context scores against few layers' parametric scores (S file).

A unit is what scores are kept for (a chunk, or a whole response); a response's score is the mean over its units. Heads
and layers are ranked by how well each alone separates units, the best top_n and top_k are added up, and the score is
m * parametric - alpha * external, both scaled to 0..1.

Source: Sun et al. 2025, arXiv:2410.11414, section 3.3; alpha and m there are beta and alpha.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from scipy import stats

from jaxbench.hallucination import metrics

Array = np.ndarray


class Units(NamedTuple):
    """Scores of units."""

    external: Array  # [U, heads]
    parametric: Array  # [U, layers]
    label: Array  # [U] bool
    response: Array  # [U] index of the unit's response, from 0
    source: Array | None = None  # [U] index of its response's source, from 0; None = every response has its own


class Point(NamedTuple):
    """One point of the grid."""

    top_n: int = 3  # heads
    top_k: int = 4  # layers
    alpha: float = 0.6  # weight of the external score
    m: float = 1.0  # weight of the parametric one


# The source document's grid (its technique 11): 1,960 points.
GRID = {
    "top_n": tuple(range(1, 8)),
    "top_k": tuple(range(1, 8)),
    "alpha": (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6),
    "m": (0.5, 0.75, 1.0, 1.25, 1.5),
}


class Fitted(NamedTuple):
    """Columns and scales of a regression."""

    point: Point
    heads: Array  # columns of external, the best first
    layers: Array
    external_range: tuple[float, float]
    parametric_range: tuple[float, float]


def ranking(units: Units) -> tuple[Array, Array]:
    """Rank heads and layers by AUC over units, the best first; a high score of a head means no hallucination."""
    heads = [metrics.auc(~units.label, column) for column in units.external.T]
    layers = [metrics.auc(units.label, column) for column in units.parametric.T]
    return np.argsort(-np.array(heads), kind="stable"), np.argsort(-np.array(layers), kind="stable")


def fit(units: Units, point: Point, order: tuple[Array, Array] | None = None) -> Fitted:
    """Fit the regression of a point; order: the result of `ranking`, if it is known."""
    heads, layers = order or ranking(units)
    heads, layers = heads[: point.top_n], layers[: point.top_k]
    ranges = [_range(part.sum(1)) for part in (units.external[:, heads], units.parametric[:, layers])]
    return Fitted(point, heads, layers, *ranges)


def unit_scores(fitted: Fitted, units: Units) -> Array:
    """Compute the score of each unit [U]."""
    external = _scaled(units.external[:, fitted.heads].sum(1), fitted.external_range)
    parametric = _scaled(units.parametric[:, fitted.layers].sum(1), fitted.parametric_range)
    return fitted.point.m * parametric - fitted.point.alpha * external


def by_response(values: Array, response: Array) -> Array:
    """Mean of the units of each response."""
    count = np.bincount(response)
    return np.bincount(response, weights=values) / np.maximum(count, 1)


def response_labels(units: Units) -> Array:
    """True for each response that has a labelled unit."""
    return np.bincount(units.response, weights=units.label) > 0


def response_scores(fitted: Fitted, units: Units) -> Array:
    """Score of each response."""
    return by_response(unit_scores(fitted, units), units.response)


def search(units: Units, grid: dict[str, tuple] | None = None) -> tuple[Point, float]:
    """Return the grid point with the highest AUC of responses on these units (the first of equals), and that AUC."""
    grid = grid or GRID
    heads, layers = ranking(units)
    labels = response_labels(units)
    externals = {n: _means(units, units.external[:, heads[:n]]) for n in grid["top_n"]}
    parametrics = {k: _means(units, units.parametric[:, layers[:k]]) for k in grid["top_k"]}
    weights = list(itertools.product(grid["alpha"], grid["m"]))
    positive = int(labels.sum())
    best, best_auc = Point(), -1.0
    for n, k in itertools.product(grid["top_n"], grid["top_k"]):
        scores = np.stack([m * parametrics[k] - alpha * externals[n] for alpha, m in weights])
        ranks = stats.rankdata(scores, axis=1)[:, labels].sum(1)
        found = (ranks - positive * (positive + 1) / 2) / (positive * (len(labels) - positive))
        place = int(np.argmax(found))
        if found[place] > best_auc:
            best, best_auc = Point(n, k, *weights[place]), float(found[place])
    return best, best_auc


def _means(units: Units, columns: Array) -> Array:
    """Mean over each response's units of their scaled sums."""
    total = columns.sum(1)
    return by_response(_scaled(total, _range(total)), units.response)


def _range(values: Array) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def _scaled(values: Array, ends: tuple[float, float]) -> Array:
    low, high = ends
    return (values - low) / (high - low) if high > low else np.zeros_like(values)
