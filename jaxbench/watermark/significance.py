"""Scores and p-values from evidence, in float64, for all backends (S file).

Under the null hypothesis the text does not depend on the key, so the words of distinct PRF inputs are independent and
uniform. A scheme defines the sum (Statistic in schemes/contract.py); null_distributions.py has the tails. A discrete
score has three p-values: the exact one, P(X >= x); mid-p, which counts half of P(X = x); and a randomised one, exactly
uniform under the null, whose random number is Philox with a hash of the text's evidence as counter, so that it is the
same in every run. N is the number of texts.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32, UInt64

from jaxbench import philox
from jaxbench.watermark import null_distributions
from jaxbench.watermark.reference import Evidence, count
from jaxbench.watermark.schemes.contract import Scheme

IDENTITY_SEED = 0x6A61786265  # arbitrary but fixed: gives the multipliers of the text hash


class Detections(NamedTuple):
    """One entry for each text [N]."""

    statistic: Float[np.ndarray, " N"]  # the sum, in the unit that the literature reports (Statistic.reported)
    num_scored: Int[np.ndarray, " N"]  # positions with distinct PRF inputs
    num_green: Int[np.ndarray, " N"]  # -1 if the scheme has no green tokens
    payload: Int[np.ndarray, " N"]  # the likeliest message, or the one looked for; -1: no message, or no scored token
    score: Float[np.ndarray, " N"]  # (statistic - mean) / standard deviation under the null, 0 without scored positions
    p_value: Float[np.ndarray, " N"]  # exact, never below 2.2e-308
    mid_p: Float[np.ndarray, " N"]
    randomized_p: Float[np.ndarray, " N"]
    reason: np.ndarray  # object: why p is 1 although nothing was tested, "" otherwise


def score(
    scheme: Scheme,
    evidence: Evidence,
    *,
    vocab_size: int,
) -> Detections:
    """Return scores and p-values of the evidence of N texts.

    The scored words, or the evidence's `inputs` if it has them, determine the random number of the randomised p-value:
    with words that say only green or red, each pattern of a short text would always get the same number.

    Raises:
      ValueError: the vocabulary does not fit a unigram list.
    """
    statistic = scheme.statistic(vocab_size)
    num_scored, total = count(evidence.scored), statistic.total(evidence)
    tail = statistic.tail(total, num_scored)
    if statistic.is_continuous:
        p_values = (tail.upper,) * 3
    else:
        named_by = evidence.words if evidence.inputs is None else evidence.inputs
        equal, uniform = tail.upper - tail.above, randomizer(text_identity(named_by, evidence.scored))
        p_values = tail.upper, tail.above + 0.5 * equal, tail.above + uniform * equal
    deviation, variance = total - num_scored * statistic.moments()[0], statistic.variance(num_scored)
    z = np.where(variance > 0, deviation / np.sqrt(np.where(variance > 0, variance, 1.0)), 0.0)
    none = np.full(len(num_scored), -1, np.int64)
    green = total if statistic.counts_green else none
    too_short = num_scored == 0
    p_values = [np.where(too_short, 1.0, p) for p in p_values]
    reported = statistic.reported(total, num_scored).astype(np.float64)
    reasons, length = np.full(len(num_scored), "", object), scheme.context_length
    needed = f"{length} tokens before it" if length else "a token"
    reasons[too_short] = f"too short: {scheme.scheme} scores a position that has {needed} and lies behind the prompt"
    return Detections(reported, num_scored, green, none, z, *p_values, reasons)


def text_identity(words: UInt32[np.ndarray, "N T"], mask: Bool[np.ndarray, "N T"]) -> UInt64[np.ndarray, " N"]:
    """Hash the words (or tokens) under the mask, with their places."""
    multipliers = _multipliers(1 << max(0, words.shape[1] - 1).bit_length())[: words.shape[1]]
    values = np.where(mask, words.astype(np.uint64) + np.uint64(1), np.uint64(0))
    return (values * multipliers).sum(axis=1, dtype=np.uint64)


def randomizer(identity: UInt64[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Return a uniform number in (0, 1) for each identity: Philox with the identity as counter."""
    low, high = identity & np.uint64(philox.MASK32), identity >> np.uint64(32)
    site = philox.site_id("watermark/randomized-p")
    return philox.uniform(philox.philox4x32((low, high, 0, site), philox.split_seed(0))[0])


# Families of tests


def any_of(p_value: Float[np.ndarray, "*shape"], family: int) -> Float[np.ndarray, "*shape"]:
    """Return 1 - (1 - p)^family: the p-value of the smallest of `family` independent p-values (Sidak 1967)."""
    p = np.asarray(p_value, np.float64)
    with np.errstate(divide="ignore"):
        return np.clip(-np.expm1(family * np.log1p(-p)), null_distributions.FLOOR, 1.0)


def bonferroni(p_values: Float[np.ndarray, "*shape K"]) -> Float[np.ndarray, "*shape K"]:
    """Multiply each p-value of a family of K tests by K: valid under any dependence."""
    p = np.asarray(p_values, np.float64)
    return np.minimum(1.0, p * p.shape[-1])


@functools.lru_cache(maxsize=32)
def _multipliers(size: int) -> np.ndarray:
    words = philox.words(IDENTITY_SEED, step=0, site="watermark/identity", rows=np.zeros(1), num_elements=2 * size)[0]
    return ((words[0::2].astype(np.uint64) << np.uint64(32)) | words[1::2]) | np.uint64(1)
