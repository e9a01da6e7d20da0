"""Scores by trained token classifiers: of tokens, of whole responses, and as spans of characters (S file).

The backend's model is imported by the name of its package.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy import special

from jaxbench.hallucination import metrics, token_inputs
from jaxbench.hallucination.token_inputs import Tokens, Trained

Array = np.ndarray
ROWS = 16  # responses per call
LARGEST = 8  # tokens, the highest, whose mean log-odds are one of a response's columns
FLOOR = 1e-3  # keeps the logarithm of a sum finite


def logits(
    trained: Sequence[Trained], tokens: Sequence[Tokens], *, package: str = "jaxbench"
) -> list[Float[Array, " T"]]:
    """Log-odds of each response's tokens, the mean over all classifiers, float64.

    package: whose module runs, JAX's or PyTorch's.
    """
    module = importlib.import_module(f"{package}.hallucination.token_classifier")
    order = np.argsort([len(each.columns) for each in tokens], kind="stable")
    num_rows = min(ROWS, 1 + ROWS * (len(tokens) > 1))  # a single response is not padded with rows
    found: list[Array] = [np.zeros(len(each.columns)) for each in tokens]
    for one in trained:
        score = module.scorer(one)
        for start in range(0, len(order), ROWS):
            rows = order[start : start + ROWS]
            arrays = token_inputs.padded([tokens[i].columns for i in rows], None, num_rows=num_rows)
            for said, i in zip(score(arrays), rows):
                found[i] += said[: len(found[i])] / len(trained)
    return found


def of_responses(logits: Sequence[Float[Array, " T"]]) -> Float[Array, "R 4"]:
    """Reduce log-odds to columns: log-sum-exp, log of the sum of -log(1 - p), mean of the LARGEST highest, mean."""
    rows = []
    for each in logits:
        any_wrong = -np.log1p(-np.minimum(special.expit(each), 1 - FLOOR)).sum()
        largest = np.sort(each)[-LARGEST:]
        rows.append([np.logaddexp.reduce(each), np.log(any_wrong + FLOOR), largest.mean(), each.mean()])
    return np.array(rows)


def threshold(tokens: Sequence[Tokens], labels: Sequence[Array], logits: Sequence[Array]) -> float:
    """Probability with the highest F1 over characters."""
    joined = [np.concatenate(each) for each in (labels, logits, [each.width for each in tokens])]
    return metrics.best_threshold(joined[0], special.expit(joined[1]), weights=joined[2])


def spans(offsets: Array, probability: Array, threshold: float, text: str) -> list[tuple[int, int]]:
    """Runs of tokens at or above a threshold as characters (start, end), without white space at their ends.

    A run has what is between its tokens: tokenizers with `trim_offsets` leave the space before a word out of its token.
    """
    found: list[tuple[int, int]] = []
    last = -2
    for i in np.flatnonzero(probability >= threshold).tolist():
        start, end = offsets[i].tolist()
        if found and (i == last + 1 or start <= found[-1][1]):
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
        last = i
    stripped = [(b - len(text[a:b].lstrip()), a + len(text[a:b].rstrip())) for a, b in found]
    return [(a, b) for a, b in stripped if a < b]
