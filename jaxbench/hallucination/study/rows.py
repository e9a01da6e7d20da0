"""The rows that are compared: priors, words, families of scores, the document's techniques, detectors (S file).

A row is a function of a table and two lists of responses: fitted on the first, it scores the second, and marks
characters of it if it can. All choices (columns, weights, regularisation, thresholds) are made on the first list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special, stats

from jaxbench.hallucination import detector, linear, methods, score_regression, token_scoring, unlabelled
from jaxbench.hallucination.detector import READER, Detector, Inputs, Labels, Member
from jaxbench.hallucination.score_regression import GRID, Point, Units
from jaxbench.hallucination.study.table import Table
from jaxbench.hallucination.token_inputs import Training
from jaxbench.hallucination.voting import Ensemble

Array = np.ndarray
Spans = list[tuple[int, int]]


class Scored(NamedTuple):
    """A row's scores of responses."""

    scores: Array  # [responses], larger = more likely hallucinated
    spans: list[Spans] | None = None  # characters that it marks in each; None = it marks none


class Row(NamedTuple):
    """One way to score responses."""

    name: str
    kind: str  # prior, no reader, one family, the document's, or fitted
    score: Callable[[Table, Array, Array], Array | Scored]
    needs_reader: bool = True

    def judge(self, table: Table, train: Array, test: Array) -> Scored:
        """Fit the row on some responses, and score others with it."""
        found = self.score(table, train, test)
        return found if isinstance(found, Scored) else Scored(found)


def _prior(column: str, table: Table, train: Array, test: Array) -> Array:
    """Share of hallucinated responses among those with the same key."""
    keys, labels = getattr(table, column), table.labels.response
    rates = {key: labels[train][keys[train] == key].mean() for key in np.unique(keys[train])}
    return np.array([rates.get(key, labels[train].mean()) for key in keys[test]])


def _novel_words(table: Table, train: Array, test: Array) -> Array:
    return table.inputs.whole["lexical"][test, 1]


def _regression(families: tuple[str, ...], table: Table, train: Array, test: Array) -> Array:
    x = np.concatenate([detector.prepared(table.inputs.whole, name) for name in families], axis=1)
    return _fitted(x, table, train, test)


def _fitted(x: Array, table: Table, train: Array, test: Array) -> Array:
    labels, source = table.labels.response[train], table.labels.source[train]
    strength = linear.choose(x[train], labels, source)
    return linear.fit(x[train], labels, strength=strength).logit(x[test])


def _units(table: Table, rows: Array) -> Units:
    whole = table.inputs.whole
    arguments = (whole["external"][rows], whole["parametric"][rows], table.labels.response[rows])
    return Units(*arguments, np.arange(len(rows)))


def _redeep(grid: dict[str, tuple] | None, table: Table, train: Array, test: Array) -> Array:
    """ReDeEP's regression of responses' mean scores, its columns ranked and its weights searched on the first list."""
    units = _units(table, train)
    point = Point() if grid is None else score_regression.search(units, grid)[0]
    return score_regression.response_scores(score_regression.fit(units, point), _units(table, test))


def _mutual_information(table: Table, train: Array, test: Array) -> Array:
    """Regression on the columns with the most mutual information with the label (the document's technique 13)."""
    x = np.concatenate([table.inputs.whole[name] for name in methods.FAMILIES], axis=1)
    chosen = methods.informative(x[train], table.labels.response[train], methods.NUM_SELECTED)
    return _fitted(x[:, chosen], table, train, test)


def _random_heads(table: Table, train: Array, test: Array) -> Array:
    """Mean probability by five regressions on random heads (the document's technique 12)."""
    x = table.inputs.whole["external"]
    total = np.zeros(len(test))
    for seed in range(methods.NUM_MEMBERS):
        heads = methods.random_columns(x.shape[1], methods.NUM_SELECTED, seed=seed)
        total += special.expit(_fitted(x[:, heads], table, train, test))
    return total / methods.NUM_MEMBERS


def _rank_ensemble(families: tuple[str, ...], table: Table, train: Array, test: Array) -> Array:
    """Sum of the ranks, among the second list, by regressions on one family each."""
    return sum(stats.rankdata(_regression((name,), table, train, test)) for name in families)


def _detector(members: dict[str, Member], table: Table, train: Array, test: Array) -> Array:
    return _fit_and_judge(members, table.inputs, table.labels, train, test)


def _fit_and_judge(members: dict[str, Member], inputs: Inputs, labels: Labels, train: Array, test: Array) -> Array:
    fitted = detector.fit(inputs.take(train), labels.take(train, inputs), members=members)
    return detector.judge(fitted, inputs.take(test)).probability


def _with_tokens(table: Table, train: Array, test: Array) -> Scored:
    from jaxbench.hallucination import token_training

    fitted = token_training.fit_detector(table.inputs.take(train), table.labels.take(train, table.inputs))
    found = detector.judge(fitted, table.inputs.take(test))
    return Scored(found.probability, spans_of(table, test, fitted, found.tokens))


def spans_of(table: Table, test: Array, fitted: Detector | Ensemble, probabilities: Sequence[Array]) -> list[Spans]:
    """Return the character spans of responses that a detector marks."""
    return [
        token_scoring.spans(table.inputs.tokens[i].offsets, each, fitted.token_threshold, table.texts[i])
        for i, each in zip(test, probabilities, strict=True)
    ]


def _share(share: float, table: Table, train: Array, test: Array) -> Scored:
    """The detector, fitted to a share of the first list's sources."""
    names = np.unique(table.labels.source[train])
    kept = np.random.default_rng(0).permutation(names)[: max(1, round(share * len(names)))]
    return _with_tokens(table, train[np.isin(table.labels.source[train], kept)], test)


def _unlabelled(table: Table, train: Array, test: Array) -> Array:
    return detector.judge(unlabelled.fit(table.inputs.take(train), rate=0.5), table.inputs.take(test)).probability


def _tokens_alone(table: Table, train: Array, test: Array) -> Array:
    """Log-sum-exp of token log-odds by a classifier trained on the first list."""
    from jaxbench.hallucination import token_training

    tokens, labels = table.inputs.tokens, table.labels.tokens
    trained = token_training.fit([tokens[i].columns for i in train], [labels[i] for i in train], Training())
    return token_scoring.of_responses(token_scoring.logits([trained], [tokens[i] for i in test]))[:, 0]


def _with_task(table: Table, train: Array, test: Array) -> Array:
    """The detector without tokens, with the task as a further feature."""
    tasks = np.stack([table.task == task for task in np.unique(table.task)], axis=1).astype(np.float64)
    inputs = table.inputs._replace(
        whole={**table.inputs.whole, "task": tasks}, parts={**table.inputs.parts, "task": tasks[table.inputs.response]}
    )
    told = {name: member._replace(families=(*member.families, "task")) for name, member in READER.items()}
    return _fit_and_judge(told, inputs, table.labels, train, test)


LEXICAL = {name: member for name, member in READER.items() if name == "lexical"} | {
    "sentence": Member(("lexical", "place"), True, 1.0)
}
FAMILIES = ("lexical", "surprise", "external", "context_mass", "lookback", "states")
BASELINE = "regression on seven lexical counts"
ROWS = (
    Row("the task alone", "prior", functools.partial(_prior, "task"), False),
    Row("task and generator alone", "prior", functools.partial(_prior, "cell"), False),
    Row("number of novel words", "no reader", _novel_words, False),
    Row(BASELINE, "no reader", functools.partial(_regression, ("lexical",)), False),
    Row("lexical detector, sentences too", "no reader", functools.partial(_detector, LEXICAL), False),
    Row("parametric knowledge score", "one family", functools.partial(_regression, ("parametric",))),
    Row("external context score", "one family", functools.partial(_regression, ("external",))),
    Row("lookback ratio", "one family", functools.partial(_regression, ("lookback",))),
    Row("context attention", "one family", functools.partial(_regression, ("context_mass",))),
    Row("losses with and without the context", "one family", functools.partial(_regression, ("surprise",))),
    Row("hidden states", "one family", functools.partial(_regression, ("states",))),
    Row("ReDeEP, top_n 3, top_k 4, alpha 0.6", "the document's", functools.partial(_redeep, None)),
    Row("ReDeEP, grid of 1,960 points (11)", "the document's", functools.partial(_redeep, GRID)),
    Row("ensemble of random heads (12)", "the document's", _random_heads),
    Row("mutual information, 32 columns (13)", "the document's", _mutual_information),
    Row("no labels: fixed signs of four families", "no labels", _unlabelled),
    Row("ranks of six families", "fitted", functools.partial(_rank_ensemble, FAMILIES)),
    Row("the detector without tokens", "fitted", functools.partial(_detector, READER)),
    Row("the detector without tokens, told the task", "fitted", _with_task),
    Row("token classifier alone", "fitted", _tokens_alone),
    Row("the detector", "fitted", _with_tokens),
)  # fmt: skip
SHORT = tuple(row for row in ROWS if row.kind == "prior" or row.name in (BASELINE, "the detector"))
CURVE_KIND = "curve"
CURVE = tuple(
    Row(f"the detector, 1/{part} of the sources", CURVE_KIND, functools.partial(_share, 1 / part))
    for part in (16, 8, 4, 2)
)
