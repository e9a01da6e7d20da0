"""Scores and p-values from evidence, in float64: the one place of every backend (S file).

Under the null hypothesis the text does not depend on the key, so the words of distinct PRF inputs are independent and
uniform. tails.py has the distributions. A discrete score has three p-values: the exact one, P(X >= x); mid-p, which
takes half of P(X = x); and a randomised one, exactly uniform under the null, whose random number is Philox keyed by the
text, so that it is the same in every run. N is the number of texts.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from jaxbench import philox
from jaxbench.watermark import definition, tails
from jaxbench.watermark.config import context_length

IDENTITY_SEED = 0x6A61786265  # any fixed number: the multipliers of the text's hash
BAYESIAN_STEPS_PER_NAT = 64  # log-odds are rounded to this lattice, which makes their null exact
# P(two draws differ) before each layer of a tournament: the mean over 2,000 positions of the default text under the
# default model at temperature 1, simulated with definition.tournament.
TWO_LEAVES = (
    *(0.728, 0.712, 0.696, 0.683, 0.667, 0.653, 0.634, 0.620, 0.603, 0.583, 0.566, 0.550, 0.534, 0.518, 0.503),
    *(0.487, 0.476, 0.460, 0.446, 0.433, 0.420, 0.407, 0.396, 0.383, 0.372, 0.361, 0.350, 0.338, 0.327, 0.313),
)


class Detections(NamedTuple):
    """One entry for each text [N]."""

    statistic: np.ndarray  # float64: green tokens, summed Gumbel score, mean of the bits, log-likelihood ratio in nats
    num_scored: np.ndarray  # int64: positions with distinct PRF inputs
    num_green: np.ndarray  # int64, -1 where the scheme has no green tokens
    payload: np.ndarray  # int64: the message that was found, or looked for; -1 where the scheme carries none
    score: np.ndarray  # float64: (statistic - mean) / standard deviation under the null, 0 without scored positions
    p_value: np.ndarray  # float64: exact, never below 2.2e-308
    mid_p: np.ndarray
    randomized_p: np.ndarray
    reason: np.ndarray  # object: why p is 1 although nothing was tested, "" otherwise


def score(
    scheme: Any,
    evidence: definition.Evidence,
    *,
    vocab_size: int,
    identity: np.ndarray | None = None,
    dual_key_method: str = "exact",
) -> Detections:
    """Return scores and p-values of evidence about N texts.

    Args:
      identity: uint64 [N], what the randomised p-value's random number is keyed by; unset: the scored words.
      dual_key_method: "exact", or "vllm" for the moment-matched gamma of vLLM's detector.

    Raises:
      ValueError: the vocabulary does not fit a unigram list, or an unknown method.
    """
    number, total = count(evidence.scored), _totals(scheme, evidence)
    tail = tail_of(scheme, total, number, vocab_size=vocab_size, dual_key_method=dual_key_method)
    if scheme.scheme == "gumbel":
        p_values = (tail.upper,) * 3
    else:
        identity = text_identity(evidence.words, evidence.scored) if identity is None else identity
        equal = tail.upper - tail.above
        p_values = tail.upper, tail.above + 0.5 * equal, tail.above + randomizer(identity) * equal
    mean, variance = token_moments(scheme, vocab_size=vocab_size)
    variance = number * variance
    if scheme.scheme == "unigram":  # drawn without replacement
        variance = variance * (vocab_size - number) / max(1, vocab_size - 1)
    green = total if scheme.scheme not in ("gumbel", "synthid") else np.full(len(number), -1, np.int64)
    z = _standard(total - number * mean, variance)
    return _detections(scheme, _statistic(scheme, total, number), number, green, z, *p_values)


def count(mask: np.ndarray) -> np.ndarray:
    """Return the number of True in each row of [N T], int64 [N]."""
    return np.bitwise_count(np.packbits(mask, axis=1)).sum(axis=1, dtype=np.int64)


def text_identity(words: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return a hash of the words (or tokens) [N T] under the mask, with their places: uint64 [N]."""
    multipliers = _multipliers(1 << max(0, words.shape[1] - 1).bit_length())[: words.shape[1]]
    values = np.where(mask, words.astype(np.uint64) + np.uint64(1), np.uint64(0))
    return (values * multipliers).sum(axis=1, dtype=np.uint64)


def randomizer(identity: np.ndarray) -> np.ndarray:
    """Return the uniform in (0, 1) that belongs to each identity [N]: Philox with the identity as its counter."""
    low, high = identity & np.uint64(philox.MASK32), identity >> np.uint64(32)
    site = philox.site_id("watermark/randomized-p")
    return philox.uniform(philox.philox4x32((low, high, 0, site), philox.split_seed(0))[0])


def evidence_uniforms(scheme: Any, words: np.ndarray) -> np.ndarray:
    """Return 1 - u (exact in float64) of gumbel words, u as the scheme's function defines it."""
    k = (words >> np.uint32(8)).astype(np.float64)
    if scheme.prf == "vllm":
        return (2.0**24 - k) / (2.0**24 + 1.0)
    return (2.0**24 - 0.5 - k) * 2.0**-24


# Families of tests


def any_of(p_value: np.ndarray, family: int) -> np.ndarray:
    """Return 1 - (1 - p)^family: the p-value of the smallest of `family` independent ones (Sidak 1967)."""
    p = np.asarray(p_value, np.float64)
    with np.errstate(divide="ignore"):
        return np.clip(-np.expm1(family * np.log1p(-p)), tails.FLOOR, 1.0)


def bonferroni(p_values: np.ndarray) -> np.ndarray:
    """Return the p-values [.. K] of a family of K tests, each times K: valid under any dependence."""
    p = np.asarray(p_values, np.float64)
    return np.minimum(1.0, p * p.shape[-1])


# One function a kind of evidence


def green_share(scheme: Any, vocab_size: int) -> float:
    """Return the exact probability of a green token under the null."""
    if scheme.scheme == "kgw":
        return definition.green_threshold(scheme.gamma) / 2**32
    if scheme.scheme == "dip":
        return 0.5
    gamma = scheme.greenlist_ratio if scheme.scheme == "kgw_transformers" else scheme.gamma
    return int(gamma * vocab_size) / vocab_size


def synthid_weights(depth: int, kind: str) -> tuple[int, ...]:
    """Return the integer weight of each layer's bits: weighted (10 to 1, Dathathri et al. 2024) or bayesian."""
    if kind == "bayesian":
        odds = [math.log((2.0 + b) / (2.0 - b)) for b in TWO_LEAVES[:depth]]
        return tuple(max(1, round(BAYESIAN_STEPS_PER_NAT * value)) for value in odds)
    if kind == "mean" or depth == 1:
        return (1,) * depth
    whole = [10 * (depth - 1) - 9 * i for i in range(depth)]
    return tuple(w // math.gcd(*whole) for w in whole)


def token_scores(scheme: Any, evidence: definition.Evidence) -> np.ndarray:
    """Return what each position adds to the statistic [N T]: float64 for gumbel, else int64; 0 where not scored.

    1 for a green token; -log(1 - u) for gumbel; the weighted bits for synthid.
    """
    words, scored = evidence.words, evidence.scored
    if scheme.scheme == "gumbel":
        value = -np.log(evidence_uniforms(scheme, words))
        if evidence.second_words is not None:
            alpha = scheme.dual_key_alpha
            value = (1.0 - alpha) * value - alpha * np.log(evidence_uniforms(scheme, evidence.second_words))
        return np.where(scored, value, 0.0)
    if scheme.scheme == "synthid":
        weights = synthid_weights(scheme.depth, scheme.score)
        bits = ((words >> np.uint32(i)) & np.uint32(1) for i in range(scheme.depth))
        value = sum(weight * bit.astype(np.int64) for weight, bit in zip(weights, bits))
        return np.where(scored, value, 0)
    return (definition.is_green(scheme, words) & scored).astype(np.int64)


def token_moments(scheme: Any, *, vocab_size: int) -> tuple[float, float]:
    """Return the mean and the variance of one scored position's score under the null."""
    if scheme.scheme == "gumbel":
        alpha = scheme.dual_key_alpha
        return 1.0, (1.0 - alpha) ** 2 + alpha**2
    if scheme.scheme == "synthid":
        weights = synthid_weights(scheme.depth, scheme.score)
        return 0.5 * sum(weights), 0.25 * sum(w * w for w in weights)
    share = green_share(scheme, vocab_size)
    return share, share * (1.0 - share)


def tail_of(
    scheme: Any, total: np.ndarray, number: np.ndarray, *, vocab_size: int, dual_key_method: str = "exact"
) -> tails.Tail:
    """Return the tail of the sum of the scores of number [N] positions with distinct inputs, at total [N].

    Raises:
      ValueError: more distinct tokens than the vocabulary has (unigram), or an unknown method.
    """
    if scheme.scheme == "gumbel":
        if scheme.dual_key_alpha > 0:
            return tails.dual_gamma(total, number, scheme.dual_key_alpha, method=dual_key_method)
        return tails.gamma(total, number)
    if scheme.scheme == "synthid":
        if scheme.score == "mean":
            return tails.binomial(total, number * scheme.depth, 0.5)
        return tails.lattice(total, number, synthid_weights(scheme.depth, scheme.score))
    if scheme.scheme == "unigram":
        if number.max(initial=0) > vocab_size:
            raise ValueError(f"unigram: {number.max()} distinct tokens in a vocabulary of vocab_size={vocab_size}")
        return tails.hypergeometric(total, number, population=vocab_size, successes=int(scheme.gamma * vocab_size))
    return tails.binomial(total, number, green_share(scheme, vocab_size))


def _totals(scheme: Any, evidence: definition.Evidence) -> np.ndarray:
    """Return the sum of token_scores over each row [N], in less time."""
    words, scored = evidence.words, evidence.scored
    if scheme.scheme == "gumbel":
        total = _exponentials(scheme, words, scored)
        if evidence.second_words is None:
            return total
        alpha = scheme.dual_key_alpha
        return (1.0 - alpha) * total + alpha * _exponentials(scheme, evidence.second_words, scored)
    if scheme.scheme != "synthid":
        return count(definition.is_green(scheme, words) & scored)
    if scheme.score == "mean":
        bits = np.bitwise_count(words & np.uint32((1 << scheme.depth) - 1))
        return np.where(scored, bits, 0).sum(axis=1, dtype=np.int64)
    ones = (count(((words >> np.uint32(i)) & np.uint32(1)).astype(bool) & scored) for i in range(scheme.depth))
    return sum(weight * one for weight, one in zip(synthid_weights(scheme.depth, scheme.score), ones))


def _exponentials(scheme: Any, words: np.ndarray, scored: np.ndarray) -> np.ndarray:
    """Return the sum of -log(1 - u) over the scored positions [N]; eight factors share one logarithm (> 2**-208)."""
    values = np.where(scored, evidence_uniforms(scheme, words), 1.0)
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % 8)), constant_values=1.0)
    return -np.log(values.reshape(len(values), -1, 8).prod(axis=2)).sum(axis=1)


def _statistic(scheme: Any, total: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return the total in the unit that the field's literature reports."""
    if scheme.scheme != "synthid":
        return total.astype(np.float64)
    weights = synthid_weights(scheme.depth, scheme.score)
    if scheme.score == "bayesian":  # log P(bits | marked) / P(bits | not marked)
        constant = sum(math.log1p(-math.tanh(0.5 * w / BAYESIAN_STEPS_PER_NAT)) for w in weights)
        return total / BAYESIAN_STEPS_PER_NAT + number * constant
    return np.where(number > 0, total / np.maximum(1, number * sum(weights)), 0.0)


def _standard(deviation: np.ndarray, variance: np.ndarray) -> np.ndarray:
    return np.where(variance > 0, deviation / np.sqrt(np.where(variance > 0, variance, 1.0)), 0.0)


def _detections(scheme, statistic, number, green, z, p_value, mid_p, randomized_p) -> Detections:
    reason = np.full(len(number), "", object)
    empty = number == 0
    if empty.any():
        length = context_length(scheme)
        needed = f"{length} tokens before it" if length else "a token"
        reason[empty] = f"too short: {scheme.scheme} scores a position that has {needed} and lies behind the prompt"
    one = [np.where(empty, 1.0, p) for p in (p_value, mid_p, randomized_p)]
    none = np.full(len(number), -1, np.int64)
    return Detections(statistic.astype(np.float64), number, green, none, z, *one, reason)


@functools.lru_cache(maxsize=32)
def _multipliers(size: int) -> np.ndarray:
    words = philox.words(IDENTITY_SEED, step=0, site="watermark/identity", rows=np.zeros(1), num_elements=2 * size)[0]
    return ((words[0::2].astype(np.uint64) << np.uint64(32)) | words[1::2]) | np.uint64(1)
