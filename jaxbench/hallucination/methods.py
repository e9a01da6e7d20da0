"""Detectors on external and parametric scores alone, by the source document's techniques (S file).

- redeep: ReDeEP's regression of top_n heads against top_k layers, searched over its grid (11);
- mutual_information: a regression on the heads and layers with the most mutual information with the label (13);
- ensemble: the mean log-odds of several regressions, each on random heads (12).

Numbers in brackets are the document's techniques. Each method is fitted to responses, and to sentences to score those.
Thresholds have the highest F1 on the precision-recall curve (14) of out-of-fold scores, by fits that did not see the
response's source. Every method is linear, so that a detector of this kind is saved and applied like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from scipy import special

from jaxbench.hallucination import linear, metrics, score_regression, stored_scores
from jaxbench.hallucination.detector import Detector, Inputs, Labels, Member
from jaxbench.hallucination.linear import Linear
from jaxbench.hallucination.score_regression import GRID, Point, Units

Array = np.ndarray
METHODS = ("redeep", "mutual_information", "ensemble")
FAMILIES = ("external", "parametric")
NUM_SELECTED = 32  # columns that mutual information or random choice keeps
NUM_MEMBERS = 5  # regressions of an ensemble
PLATT_STRENGTH = 1.0  # inverse regularisation of the regression on ReDeEP's score, one column
FLAT = 1e-3  # slope of an uninformative score: log-odds per standard deviation


class Choice(NamedTuple):
    """Options of the methods; each method reads its own."""

    grid: Mapping[str, tuple] = GRID  # redeep: values of top_n, top_k, alpha and m, one of each = no search
    num_columns: int = NUM_SELECTED  # mutual_information: heads and layers; ensemble: heads per member
    num_members: int = NUM_MEMBERS  # ensemble


class Seen(NamedTuple):
    """Units to fit to: responses or sentences."""

    external: Float[Array, "U heads"]
    parametric: Float[Array, "U layers"]
    label: Bool[Array, " U"]
    source: Shaped[Array, " U"]
    response: Int[Array, " U"]  # index of the unit's response

    @property
    def columns(self) -> Array:
        """All columns [U, heads + layers]."""
        return np.concatenate([self.external, self.parametric], axis=1)


def informative(x: Array, labels: Array, count: int) -> Array:
    """Return the columns with the most mutual information with the labels, the highest first."""
    from sklearn.feature_selection import mutual_info_classif

    found = mutual_info_classif(x, labels, random_state=0)
    return np.argsort(-found, kind="stable")[:count]


def random_columns(num: int, count: int, *, seed: int) -> Array:
    """Draw the columns of one ensemble member, without replacement; all of them if there are at most `count`."""
    return np.random.default_rng(seed).choice(num, min(count, num), replace=False)


def check(inputs: Inputs, choice: Choice) -> None:
    """Check the grid's entries of a single value: there are enough heads and layers, and weights are finite.

    Raises:
      ValueError: there are too few heads or layers, or a weight is not finite.
    """
    units = Units(*(inputs.whole[name] for name in FAMILIES), np.zeros(0), np.zeros(0))
    point = {name: values[0] for name, values in choice.grid.items() if len(values) == 1}
    stored_scores.check_point(units, Point(**({"top_n": 1, "top_k": 1} | point)))


def fit(
    inputs: Inputs, labels: Labels, *, method: str, choice: Choice = Choice(), inner_folds: int = 5, seed: int = 0
) -> Detector:
    """Fit a detector to labelled responses by one of METHODS.

    Raises:
      ValueError: as `check`; too few sources, one class only, or a score that is not finite.
    """
    check(inputs, choice)
    inputs, labels = inputs._replace(tokens=(), tuned=()), labels._replace(tokens=())
    fold = linear.folds(labels.source, inner_folds, seed=seed)
    linear.check_folds(labels.response, labels.source, fold)
    scores, parts = np.zeros(len(fold)), np.zeros(len(labels.part))
    for i in range(inner_folds):
        test, train = np.flatnonzero(fold == i), np.flatnonzero(fold != i)
        mine, taken = labels.take(train, inputs), inputs.take(test)
        fitted = [_fitted(each, method, choice) for each in _seen(inputs.take(train), mine)]
        scores[test] = mean(fitted[0]).logit(_columns(taken.whole))
        parts[np.isin(inputs.response, test)] = mean(fitted[1]).logit(_columns(taken.parts))
    found, thresholds = [], []
    for seen, said in zip(_seen(inputs, labels), (scores, parts)):
        members = _fitted(seen, method, choice)
        if method == "redeep":  # its score is not log-odds
            weighing = _rising(said, seen.label)
            members, said = [_weighed(each, weighing) for each in members], weighing.logit(said[:, None])
        found.append(members)
        thresholds.append(metrics.best_threshold(seen.label, special.expit(said)))
    return _detector(found[0], mean(found[1]), *thresholds)


def _detector(responses: list[Linear], sentences: Linear, threshold: float, part_threshold: float) -> Detector:
    """Build a detector whose log-odds of a response are the mean of its members' that score responses."""
    fitted = {f"response {i}": each for i, each in enumerate(responses)} | {"sentence": sentences}
    members = {name: Member(FAMILIES, name == "sentence", 0.0) for name in fitted}
    weights = np.array([1 / len(responses)] * len(responses) + [0.0] * 3)  # 0 for the sentence member's three columns
    stack = Linear(np.zeros(len(weights)), np.ones(len(weights)), weights, np.array(0.0))
    return Detector(members, fitted, stack, threshold, part_threshold)


def _seen(inputs: Inputs, labels: Labels) -> tuple[Seen, Seen]:
    """Return responses and sentences as units."""
    every = np.arange(inputs.num_responses)
    return (
        Seen(*(inputs.whole[name] for name in FAMILIES), labels.response, labels.source, every),
        Seen(*(inputs.parts[name] for name in FAMILIES), labels.part, labels.source[inputs.response], inputs.response),
    )


def _columns(families: Mapping[str, Array]) -> Array:
    return np.concatenate([families[name] for name in FAMILIES], axis=1)


def _fitted(seen: Seen, method: str, choice: Choice) -> list[Linear]:
    """Fit a method's regressions over all heads' and layers' columns: one, or the members of an ensemble."""
    if method == "redeep":
        units = Units(seen.external, seen.parametric, seen.label, seen.response)
        point = score_regression.search(units, dict(choice.grid))[0]
        return [of_point(score_regression.fit(units, point), seen.external.shape[1], seen.parametric.shape[1])]
    if method == "mutual_information":
        return [_on(seen, informative(seen.columns, seen.label, choice.num_columns))]
    num_heads = seen.external.shape[1]
    return [_on(seen, random_columns(num_heads, choice.num_columns, seed=i)) for i in range(choice.num_members)]


def _on(seen: Seen, chosen: Array) -> Linear:
    """Fit a regression on some columns; the others get weight 0."""
    x = seen.columns[:, chosen]
    made = linear.fit(x, seen.label, strength=linear.choose(x, seen.label, seen.source))
    num = seen.external.shape[1] + seen.parametric.shape[1]
    mean, scale, weights = np.zeros(num), np.ones(num), np.zeros(num)
    mean[chosen], scale[chosen], weights[chosen] = made.mean, made.scale, made.weights
    return Linear(mean, scale, weights, made.intercept)


def of_point(fitted: score_regression.Fitted, num_heads: int, num_layers: int) -> Linear:
    """ReDeEP's score, m * parametric - alpha * external, as weights over all heads' and layers' columns."""
    weights, intercept = np.zeros(num_heads + num_layers), 0.0
    for columns, (low, high), weight in (
        (fitted.heads, fitted.external_range, -fitted.point.alpha),
        (num_heads + fitted.layers, fitted.parametric_range, fitted.point.m),
    ):
        if high > low:  # a constant sum is scaled to 0
            weights[columns] = weight / (high - low)
            intercept -= weight * low / (high - low)
    return Linear(np.zeros(len(weights)), np.ones(len(weights)), weights, np.array(intercept))


def mean(members: list[Linear]) -> Linear:
    """The regression whose log-odds are the mean of its members'."""
    weights = [each.weights / each.scale for each in members]
    intercepts = [each.intercept - mine @ each.mean for each, mine in zip(members, weights)]
    num = len(weights[0])
    return Linear(np.zeros(num), np.ones(num), np.mean(weights, axis=0), np.array(np.mean(intercepts)))


def _rising(scores: Array, labels: Array) -> Linear:
    """Fit a logistic regression of labels on a score, such that it keeps the score's order.

    If its slope is at most FLAT, the score is uninformative: every unit gets nearly the share of labelled units.
    """
    made = linear.fit(scores[:, None], labels, strength=PLATT_STRENGTH)
    if made.weights[0] > FLAT:
        return made
    share = labels.mean()
    return made._replace(weights=np.array([FLAT]), intercept=np.array(np.log(share / (1 - share))))


def _weighed(one: Linear, weighing: Linear) -> Linear:
    """Compose a regression, and a regression on its score, into one."""
    slope = weighing.weights[0] / weighing.scale[0]
    intercept = slope * (one.intercept - weighing.mean[0]) + weighing.intercept
    return one._replace(weights=slope * one.weights, intercept=np.array(intercept))
