"""Moderated t-intervals: rows of a table share information about their variance (S file: numpy and scipy only).

Five launches give each row a variance with only four degrees of freedom: intervals become wide, and a row whose
launches happen to agree looks certain. The rows of one table are measured by the same processes on the same machine, so
their variances are modelled as draws from a scaled inverse chi-square distribution, fitted to all rows together. Each
row's variance becomes the average of its own and the common one, weighted by degrees of freedom.

Sources: Smyth 2004, Statistical Applications in Genetics and Molecular Biology 3(1):3 (the moderated t); Phipson, Lee,
Majewski, Alexander and Smyth 2016, Annals of Applied Statistics 10(2):946-963 (outlier rows keep their own variance).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import optimize, stats

from jaxbench.measure import verdicts
from jaxbench.measure.verdicts import Interval

MIN_ROWS = 6  # fewer rows say too little about how variances are distributed: each row then uses its own variance
TAILS = (0.05, 0.1)  # shares of the smallest and largest log variances that are winsorised, as in Phipson et al.
GRID = (np.arange(400) + 0.5) / 400  # probabilities whose quantiles represent a distribution
# Share of the fitted degrees of freedom that is used, and of those of all rows together, because the prior is itself
# estimated. Of 600 simulated tables of 13 or 39 rows and 5 launches, 3 to 8 % held a false verdict with all of the
# fitted ones, 3.5 to 5.7 % with this share.
CAUTION = 0.7
PRIOR_DFS = np.geomspace(0.2, 1e6, 200)  # candidate prior degrees of freedom; the last is effectively infinite


class Prior(NamedTuple):
    """Prior of a row's variance, estimated from all rows."""

    variance: float
    df: Float[np.ndarray, " R"]  # prior degrees of freedom of each row; 0 = the row uses its own variance alone


def intervals(
    log_ratios: Sequence[Sequence[float]],
    *,
    confidence: float = 0.95,
    margin: float = 0.0,
    num_baselines: int | None = None,
) -> list[Interval]:
    """Return the moderated t-interval of each row's log ratios (one per launch); infinite for a single launch.

    Args:
      margin: relative difference that does not count (0.05 = 5 %); it affects the p-value only.
      num_baselines: measurements that the rows are compared with, if several rows share one; None = each has its own.
        Rows that share one are not independent, so that together they have no more degrees of freedom than these.
    """
    plain = [verdicts.t_interval(logs, confidence=confidence, margin=margin) for logs in log_ratios]
    several = [i for i, logs in enumerate(log_ratios) if len(logs) > 1]
    variances = np.array([np.var(log_ratios[i], ddof=1) for i in several])
    dfs = np.array([len(log_ratios[i]) - 1 for i in several])
    prior = fit(variances, dfs)
    # No row has more than all rows have together, rows with a common baseline counted once.
    together = CAUTION * dfs.sum() * min(1.0, (num_baselines or len(log_ratios)) / max(1, len(log_ratios)))
    totals = np.maximum(dfs, np.minimum(dfs + prior.df, together))
    shares = (totals - dfs) / totals if len(several) else totals
    moderated = (1 - shares) * variances + shares * prior.variance
    for i, variance, df in zip(several, moderated, totals, strict=True):
        count = len(log_ratios[i])
        plain[i] = verdicts.interval(
            plain[i].mean, math.sqrt(variance / count), df, count, confidence=confidence, margin=margin
        )
    return plain


def fit(variances: Float[np.ndarray, " R"], dfs: Float[np.ndarray, " R"]) -> Prior:
    """Fit the common variance of the rows and its prior degrees of freedom for each row.

    The fit uses the rows with the most frequent degrees of freedom: it matches the mean and the variance of their
    winsorised log variances to those of the logarithm of an F distribution. A row that is unlikely under this
    distribution keeps its own variance.
    """
    alone = Prior(0.0, np.zeros(len(variances)))
    if len(variances) < MIN_ROWS or not (variances > 0).any():
        return alone
    df = float(np.bincount(dfs.astype(int)).argmax())
    floor = 1e-5 * float(np.median(variances[variances > 0]))  # no logarithm of 0
    usual = np.log(np.maximum(variances[dfs == df], floor))
    if len(usual) < MIN_ROWS:
        return alone
    low, high = (len(usual) * tail for tail in TAILS)
    ordered = np.sort(usual)
    winsorised = np.clip(ordered, ordered[math.floor(low)], ordered[len(usual) - 1 - math.floor(high)])
    mean, spread = float(winsorised.mean()), float(winsorised.var(ddof=1))
    means, spreads = _log_f_moments(df)  # spreads fall as the prior's degrees of freedom rise
    log_df = float(np.interp(-spread, -spreads, np.log(PRIOR_DFS)))
    prior_df = math.exp(log_df)
    variance = math.exp(mean - float(np.interp(log_df, np.log(PRIOR_DFS), means)))
    return Prior(variance, CAUTION * _prior_dfs(variances / variance, dfs, prior_df))


@functools.cache
def _log_f_moments(df: float) -> tuple[Float[np.ndarray, " D"], Float[np.ndarray, " D"]]:
    """Means and variances of the winsorised logarithm of F(df, d), for every d of PRIOR_DFS."""
    low, high = TAILS
    values = np.log(stats.f.ppf(np.clip(GRID, low, 1 - high), df, PRIOR_DFS[:, None]))
    return values.mean(axis=1), values.var(axis=1)


def _prior_dfs(
    ratios: Float[np.ndarray, " R"], dfs: Float[np.ndarray, " R"], prior_df: float
) -> Float[np.ndarray, " R"]:
    """Return prior degrees of freedom of each row, fewer where its variance is improbably large against the common one.

    A row's tail probability over the one expected at its rank is the probability that it is not an outlier. The most
    extreme row sets the prior degrees of freedom of a certain outlier: so few that its ratio would be the median.
    """
    log_tails = stats.f.logsf(ratios, dfs, prior_df)
    order = np.argsort(log_tails)  # the most extreme first
    ranks = np.empty(len(ratios))
    ranks[order] = np.arange(len(ratios)) + 0.5
    inside = np.minimum(1.0, np.exp(log_tails - np.log(ranks / len(ratios))))
    inside[order] = np.maximum.accumulate(inside[order])
    if inside.min() == 1.0:
        return np.full(len(ratios), prior_df)
    furthest = order[0]

    def excess(log_df: float) -> float:
        return float(stats.f.sf(ratios[furthest], dfs[furthest], math.exp(log_df))) - 0.5

    low, high = math.log(1e-3), math.log(prior_df)
    outlier_df = math.exp(optimize.brentq(excess, low, high)) if excess(low) > 0 > excess(high) else 0.0
    return inside * prior_df + (1 - inside) * outlier_df
