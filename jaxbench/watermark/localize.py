"""Localise the mark in a text: windows with corrected p-values (S file).

Windows run over a text's scored positions only, so that their scores have the null distributions of significance.py.
Axis letters: N texts, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxbench.watermark.reference import Evidence
from jaxbench.watermark.schemes.contract import Scheme

SIZES = (25, 50, 100, 200, 400)  # scored positions in a window
STRIDE = 8  # windows of one size start every size / STRIDE positions
LEVEL = 0.01  # corrected p-value that a span must reach


class Span(NamedTuple):
    """Tokens start..end-1 of a text, which the test finds to be marked."""

    start: int
    end: int
    p_value: float  # exact p of its strongest window, times the text's number of windows and the number of payloads
    num_scored: int


class Localization(NamedTuple):
    """The spans of one text, and the p-value of `some window is marked`."""

    p_value: float
    spans: tuple[Span, ...]


def localize(
    scheme: Scheme,
    evidence: Evidence,
    *,
    vocab_size: int,
    sizes: Sequence[int] = SIZES,
    level: float = LEVEL,
    num_payloads: int = 1,
) -> list[Localization]:
    """Return the marked spans of each text: windows whose exact p, times the number of windows, is at most `level`.

    If the evidence is that of the likeliest of `num_payloads` messages, p is also multiplied by their number. Spans
    are disjoint; adjacent ones are merged. The whole text counts as a window, so that a text marked from end to end
    loses little power. The correction is valid because the number of windows depends only on the number of scored
    positions.

    Raises:
      ValueError: no window size, or one below 1; a level outside (0, 1).
    """
    if not sizes or min(sizes) < 1 or not 0 < level < 1:
        raise ValueError(
            f"localize: sizes={tuple(sizes)} at level={level}, wanted sizes of at least 1 and 0 < level < 1"
        )
    statistic = scheme.statistic(vocab_size)
    scores = statistic.token_scores(evidence)
    spans = []
    for row in range(len(scores)):
        places = np.flatnonzero(evidence.scored[row])
        if not len(places):
            spans.append(Localization(1.0, ()))
            continue
        starts, ends = _windows(len(places), sizes)
        running = np.concatenate([[0], np.cumsum(scores[row, places])])
        totals, numbers = running[ends] - running[starts], ends - starts
        p_values = statistic.tail(totals, numbers).upper
        p_values = np.minimum(1.0, p_values * (len(starts) * num_payloads))
        spans.append(Localization(float(p_values.min()), _spans(places, starts, ends, p_values, level)))
    return spans


def _windows(number: int, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and ends of all windows over `number` scored positions: each size that fits, and the whole."""
    starts, ends = [], []
    for size in sorted({min(size, number) for size in (*sizes, number)}):
        first = np.arange(0, number - size + 1, max(1, size // STRIDE))
        first = np.union1d(first, [number - size])  # so that a window reaches the last tokens
        starts.append(first)
        ends.append(first + size)
    return np.concatenate(starts), np.concatenate(ends)


def _spans(places, starts, ends, p_values, level: float) -> tuple[Span, ...]:
    """Take disjoint windows greedily, the strongest first, and merge adjacent ones into spans."""
    taken = np.ones(int(ends.max()), np.float64)  # p-value of the window that holds each scored position, 1 = none
    for window in np.argsort(p_values, kind="stable"):
        inside = taken[starts[window] : ends[window]]
        if p_values[window] > level:
            break
        if inside.min() > level:
            inside[:] = p_values[window]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (taken <= level).astype(np.int8), [0]])))
    return tuple(
        Span(int(places[first]), int(places[last - 1]) + 1, float(taken[first:last].min()), int(last - first))
        for first, last in edges.reshape(-1, 2)
    )
