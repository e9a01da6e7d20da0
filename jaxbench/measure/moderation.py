"""Variances of many rows that lend each other strength, and the intervals that follow (S file: numpy and scipy only).

Five launches give each row a variance with four degrees of freedom, which by itself is little: intervals become wide,
and a row whose launches happen to agree looks certain. The rows of one table are measured by the same processes on the
same machine, so their variances are taken as draws from a scaled inverse chi-square distribution that all rows estimate
together. Each row's variance is then its own and the common one, weighed by degrees of freedom.

Sources: Smyth 2004, Statistical Applications in Genetics and Molecular Biology 3(1):3 (the moderated t); Phipson, Lee,
Majewski, Alexander and Smyth 2016, Annals of Applied Statistics 10(2):946-963 (rows far out keep their own variance).
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

LEAST_ROWS = 6  # fewer say too little about how variances are distributed: each row stands alone
TAILS = (0.05, 0.1)  # shares of the smallest and the largest log variances that are drawn in, as Phipson et al. have it
GRID = (np.arange(400) + 0.5) / 400  # probabilities at which a distribution's quantiles stand for it
# Share of the fitted degrees of freedom that are counted, for the prior is itself estimated. Of 600 simulated tables of
# 13 or 39 rows and 5 launches, 3 to 8 % held a false verdict with all of them, 3.5 to 5.7 % with this share.
CAUTION = 0.7
PRIOR_DFS = np.geomspace(0.2, 1e6, 200)  # degrees of freedom that a prior may be worth; the last is as good as infinite


class Prior(NamedTuple):
    """What all rows say of a row's variance."""

    variance: float
    df: Float[np.ndarray, " R"]  # degrees of freedom that it is worth to each row; 0 = a row that stands alone


def intervals(
    log_ratios: Sequence[Sequence[float]], *, confidence: float = 0.95, margin: float = 0.0
) -> list[Interval]:
    """Moderated t-interval of each row's log ratios, one a launch; rows of a single launch stay infinite.

    `margin` is the share of difference that does not count (0.05 = 5 %); it enters the p-value only.
    """
    plain = [verdicts.t_interval(logs, confidence=confidence, margin=margin) for logs in log_ratios]
    several = [i for i, logs in enumerate(log_ratios) if len(logs) > 1]
    variances = np.array([np.var(log_ratios[i], ddof=1) for i in several])
    dfs = np.array([len(log_ratios[i]) - 1 for i in several])
    prior = fit(variances, dfs)
    totals = np.minimum(dfs + prior.df, dfs.sum())  # no row knows more than all of them
    shares = (totals - dfs) / totals if len(several) else totals
    moderated = (1 - shares) * variances + shares * prior.variance
    for i, variance, df in zip(several, moderated, totals, strict=True):
        count = len(log_ratios[i])
        plain[i] = verdicts.interval(
            plain[i].mean, math.sqrt(variance / count), df, count, confidence=confidence, margin=margin
        )
    return plain


def fit(variances: Float[np.ndarray, " R"], dfs: Float[np.ndarray, " R"]) -> Prior:
    """Common variance of the rows, and how much it is worth to each.

    Fitted to the rows whose degrees of freedom are the most frequent; the mean and the variance of their winsorised log
    variances are those of the logarithm of an F distribution. A row that this distribution would hardly give keeps its
    own variance.
    """
    alone = Prior(0.0, np.zeros(len(variances)))
    if len(variances) < LEAST_ROWS or not (variances > 0).any():
        return alone
    df = float(np.bincount(dfs.astype(int)).argmax())
    floor = 1e-5 * float(np.median(variances[variances > 0]))  # no logarithm of 0
    usual = np.log(np.maximum(variances[dfs == df], floor))
    if len(usual) < LEAST_ROWS:
        return alone
    low, high = (len(usual) * tail for tail in TAILS)
    ordered = np.sort(usual)
    drawn_in = np.clip(ordered, ordered[math.floor(low)], ordered[len(usual) - 1 - math.floor(high)])
    mean, spread = float(drawn_in.mean()), float(drawn_in.var(ddof=1))
    means, spreads = _log_f_moments(df)  # spreads fall as the prior is worth more
    log_df = float(np.interp(-spread, -spreads, np.log(PRIOR_DFS)))
    prior_df = math.exp(log_df)
    variance = math.exp(mean - float(np.interp(log_df, np.log(PRIOR_DFS), means)))
    return Prior(variance, CAUTION * _worth(variances / variance, dfs, prior_df))


@functools.cache
def _log_f_moments(df: float) -> tuple[Float[np.ndarray, " D"], Float[np.ndarray, " D"]]:
    """Means and variances of the winsorised logarithm of F(df, d), for every d of PRIOR_DFS."""
    low, high = TAILS
    values = np.log(stats.f.ppf(np.clip(GRID, low, 1 - high), df, PRIOR_DFS[:, None]))
    return values.mean(axis=1), values.var(axis=1)


def _worth(ratios: Float[np.ndarray, " R"], dfs: Float[np.ndarray, " R"], prior_df: float) -> Float[np.ndarray, " R"]:
    """Prior degrees of freedom of each row, fewer where its variance over the common one is too large to be a draw.

    A row's tail probability over the one expected of its rank is the probability that it is no outlier; the furthest
    row fixes what the prior is worth to a sure outlier: so little that its ratio would be the median.
    """
    log_tails = stats.f.logsf(ratios, dfs, prior_df)
    order = np.argsort(log_tails)  # the furthest first
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
