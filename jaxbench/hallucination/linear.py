"""Logistic regression on standardised columns: fitted by scikit-learn, applied and saved without it (S file)."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxbench.hallucination import metrics

if TYPE_CHECKING:
    import threadpoolctl

Array = np.ndarray
CONSTANT = 1e-9  # deviation over mean up to which a column is constant: features are float16 or float32
STRENGTHS = (0.001, 0.01, 0.1, 1.0)  # inverse regularisation that `choose` tries


class Linear(NamedTuple):
    """A fitted regression."""

    mean: Array  # [columns]
    scale: Array  # [columns], 1 for a constant column
    weights: Array  # [columns], of standardised columns
    intercept: Array  # []

    def logit(self, x: Array) -> Array:
        """Log-odds of rows [rows, columns]."""
        return ((x - self.mean) / self.scale) @ self.weights + self.intercept


def standard(x: Array) -> tuple[Array, Array]:
    """Mean and deviation of each column; a column that is constant but for rounding has deviation 1.

    The mean of equal numbers is often another number in the last bit: by a deviation of that size, any other value that
    a new row has would be 1e14 deviations away.
    """
    mean, deviation = x.mean(0), x.std(0)
    return mean, np.where(deviation > CONSTANT * np.abs(mean), deviation, 1.0)


@functools.cache
def _libraries() -> threadpoolctl.ThreadpoolController:
    import sklearn.linear_model  # noqa: F401 - loads the libraries that are looked for
    import threadpoolctl

    return threadpoolctl.ThreadpoolController()


def one_blas_thread() -> AbstractContextManager:
    """Have numpy and scipy compute with one thread in the block, in all threads of this process.

    The solver's vectors are short: with two threads it spent most of its time waiting for one of them.
    """
    return _libraries().limit(limits=1, user_api="blas")


def fit(x: Array, labels: Array, *, strength: float) -> Linear:
    """Fit a regression of labels on columns.

    Raises:
      ValueError: a column is not finite, or one class is missing.
    """
    from sklearn.linear_model import LogisticRegression

    bad = ~np.isfinite(x).all(0)
    if bad.any():
        raise ValueError(f"fit: column {int(np.argmax(bad))} of {x.shape[1]} is not finite")
    if labels.all() or not labels.any():
        raise ValueError(f"fit: {int(labels.sum())} of {len(labels)} rows are labelled; wanted both classes")
    mean, scale = standard(x)
    with one_blas_thread():
        made = LogisticRegression(C=strength, max_iter=500).fit((x - mean) / scale, labels)
    return Linear(mean, scale, made.coef_[0], np.array(made.intercept_[0]))


def folds(groups: Array, count: int, *, seed: int) -> Array:
    """Assign a fold to each row, 0 to count - 1: whole groups are dealt out in a shuffled order.

    Raises:
      ValueError: there are fewer groups than folds.
    """
    names, inverse = np.unique(groups, return_inverse=True)
    if len(names) < count:
        raise ValueError(
            f"folds: {len(names)} sources cannot be split into {count} folds (those with the same context are one)"
        )
    return (np.random.default_rng(seed).permutation(len(names)) % count)[inverse]


def check_folds(labels: Array, groups: Array, fold: Array) -> None:
    """Check that both classes are left to fit to, whichever fold is held out.

    Raises:
      ValueError: all rows of a class are in one fold; the message says how many sources they are from.
    """
    for name, mine in (("labelled", labels), ("unlabelled", ~labels)):
        if len(np.unique(fold[mine])) < 2:
            have, every, count = len(np.unique(groups[mine])), len(np.unique(groups)), int(fold.max()) + 1
            raise ValueError(
                f"folds: {name} rows are of {have} of {every} sources, and one of {count} folds of sources "
                "holds them all; wanted both classes in more sources, so that both are left whichever fold is held out"
            )


def choose(x: Array, labels: Array, groups: Array, *, seed: int = 0, count: int = 3) -> float:
    """Choose the strength with the highest AUC on held-out groups; of equals, the strongest regularisation.

    Raises:
      ValueError: as folds and check_folds.
    """
    fold = folds(groups, count, seed=seed)
    check_folds(labels, groups, fold)
    found = []
    for strength in STRENGTHS:
        scores = np.zeros(len(labels))
        for i in range(count):
            scores[fold == i] = fit(x[fold != i], labels[fold != i], strength=strength).logit(x[fold == i])
        found.append(metrics.auc(labels, scores))
    return STRENGTHS[int(np.argmax(found))]
