"""Where in a text the mark is: windows with corrected p-values, and WinMax (S file).

Windows run over the scored positions of a text, so that their scores have the null distributions of statistics.py.
Axis letters: N texts, T tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.watermark.reference import Evidence, count

SIZES = (25, 50, 100, 200, 400)  # scored positions in a window
STRIDE = 8  # windows of one size start every size / STRIDE positions
LEVEL = 0.01  # corrected p-value that a span must reach
SIMULATED_BATCH = 2**22  # simulated positions at a time


class Span(NamedTuple):
    """Tokens start..end-1 of a text that carry the mark, as far as the test can tell."""

    start: int
    end: int
    p_value: float  # exact p of its strongest window, times the number of windows of the text and of payloads
    num_scored: int


class Localization(NamedTuple):
    """The spans of one text, and the p-value of `some window is marked`."""

    p_value: float
    spans: tuple[Span, ...]
    num_windows: int


class WinMax(NamedTuple):
    """The largest z-score of any window, one entry for each text [N]."""

    statistic: np.ndarray  # float64
    p_value: np.ndarray  # (1 + simulated nulls that reach it) / (1 + nulls)
    start: np.ndarray  # int64, first token of that window
    end: np.ndarray  # int64, the token behind its last one


def localize(
    scheme: Any,
    evidence: Evidence,
    *,
    vocab_size: int,
    sizes: Sequence[int] = SIZES,
    level: float = LEVEL,
    num_payloads: int = 1,
) -> list[Localization]:
    """Marked spans of each text: windows whose exact p, times the number of windows, is at most `level`.

    Where the evidence is that of the likeliest of `num_payloads` messages, p is multiplied by their number, too.
    Spans are disjoint, and neighbours are one span. The whole text counts as a window, so that a text marked from
    end to end loses little. Valid because the number of windows depends on the number of scored positions only.

    Raises:
      ValueError: no window size, or one below 1; a level outside (0, 1).
    """
    if not sizes or min(sizes) < 1 or not 0 < level < 1:
        raise ValueError(
            f"localize: sizes={tuple(sizes)} at level={level}, wanted sizes of at least 1 and 0 < level < 1"
        )
    statistic = scheme.statistic(vocab_size)
    scores = statistic.token_scores(evidence)
    found = []
    for row in range(len(scores)):
        places = np.flatnonzero(evidence.scored[row])
        starts, ends = _windows(len(places), sizes)
        if not len(starts):
            found.append(Localization(1.0, (), 0))
            continue
        running = np.concatenate([[0], np.cumsum(scores[row, places])])
        totals, numbers = running[ends] - running[starts], ends - starts
        p_values = statistic.tail(totals, numbers).upper
        p_values = np.minimum(1.0, p_values * (len(starts) * num_payloads))
        found.append(Localization(float(p_values.min()), _spans(places, starts, ends, p_values, level), len(starts)))
    return found


def winmax(
    scheme: Any,
    evidence: Evidence,
    *,
    vocab_size: int,
    sizes: Sequence[int] = SIZES,
    num_draws: int = 9999,
    seed: int = 0,
) -> WinMax:
    """Each text's largest window z-score (Kirchenbauer et al. 2023, arXiv:2306.04634, section 5) with a valid p.

    The null is simulated for the text's number of scored positions, with the scheme's exact distribution of one score.
    The smallest p-value is 1 / (1 + num_draws).
    """
    summed = scheme.statistic(vocab_size)
    scores, number = summed.token_scores(evidence), count(evidence.scored)
    mean, variance = summed.moments()
    statistic, p_value = np.zeros(len(scores)), np.ones(len(scores))
    start, end = np.zeros(len(scores), np.int64), np.zeros(len(scores), np.int64)
    for row in np.flatnonzero(number):
        places = np.flatnonzero(evidence.scored[row])
        firsts, lasts = _windows(len(places), sizes)
        z = _window_z((scores[row, places][None] - mean) / np.sqrt(variance), firsts, lasts)[0]
        best = int(np.argmax(z))
        null = _winmax_null(scheme, len(places), tuple(sizes), num_draws, seed, vocab_size)
        statistic[row] = z[best]
        p_value[row] = (1 + len(null) - np.searchsorted(null, z[best], side="left")) / (1 + len(null))
        start[row], end[row] = places[firsts[best]], places[lasts[best] - 1] + 1
    return WinMax(statistic, p_value, start, end)


def _windows(number: int, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of all windows over `number` scored positions: each size that fits, and the whole."""
    starts, ends = [], []
    for size in sorted({min(size, number) for size in (*sizes, number)} - {0}):
        first = np.arange(0, number - size + 1, max(1, size // STRIDE))
        first = np.union1d(first, [number - size])  # the last tokens too
        starts.append(first)
        ends.append(first + size)
    none = np.zeros(0, np.int64)
    return (np.concatenate(starts), np.concatenate(ends)) if starts else (none, none)


def _spans(places, starts, ends, p_values, level: float) -> tuple[Span, ...]:
    """Disjoint spans: the strongest window first, then those that touch none before; neighbours are joined."""
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


def _window_z(standard: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """z-score of every window [R W] of standardised scores [R n]."""
    running = np.concatenate([np.zeros((len(standard), 1)), np.cumsum(standard, axis=1)], axis=1)
    return (running[:, ends] - running[:, starts]) / np.sqrt(ends - starts)


@functools.lru_cache(maxsize=512)
def _winmax_null(
    scheme: Any, number: int, sizes: tuple[int, ...], num_draws: int, seed: int, vocab_size: int
) -> np.ndarray:
    """Sorted maxima of num_draws texts that do not depend on the key."""
    generator = np.random.Generator(np.random.Philox(key=[seed, number]))
    statistic = scheme.statistic(vocab_size)
    mean, variance = statistic.moments()
    starts, ends = _windows(number, sizes)
    found = []
    step = max(1, SIMULATED_BATCH // number)
    for done in range(0, num_draws, step):
        scores = statistic.null_scores(generator, (min(step, num_draws - done), number))
        found.append(_window_z((scores - mean) / np.sqrt(variance), starts, ends).max(axis=1))
    return np.sort(np.concatenate(found))
