"""Upper tails of the null distributions of watermark scores, in float64 (S file).

The public functions are vectorised and, except `chernoff`, return Tail(upper, above): P(X >= x) and P(X > x), which are
equal for a continuous X. `upper` is never below FLOOR: where float64 underflows, FLOOR is an upper bound, so that a
p-value stays valid.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from scipy import special

FLOOR = float(np.finfo(np.float64).tiny)
LATTICE_EXACT = 1e-10  # smaller tails suffer from the Fourier sum's rounding and use a Chernoff bound
LATTICE_WIDTH = 19.0  # standard deviations that the Fourier grid spans; the mass beyond is below 1e-17
LATTICE_TERM = 1e-20  # smaller values of the characteristic function change no tail in float64
LATTICE_BLOCK = 2**20  # terms computed at once
ROUNDING = 5e-16  # of a tail by a Fourier sum
SERIES_WINDOW = 4096  # a longer series is summed only around its peak
FACTORIALS = 2**20  # logarithms of smaller factorials are kept


class Tail(NamedTuple):
    """P(X >= x) and P(X > x), float64 [N]."""

    upper: np.ndarray
    above: np.ndarray


def binomial(count: np.ndarray, trials: np.ndarray, probability: float) -> Tail:
    """Tail of Binomial(trials [N], probability) at count [N]: regularised incomplete beta functions."""

    def upper(x: np.ndarray, n: np.ndarray) -> np.ndarray:
        inside = np.clip(x, 1, np.maximum(n, 1))
        value = special.betainc(inside, np.maximum(n, inside) - inside + 1.0, probability)
        return np.where(x <= 0, 1.0, np.where(x > n, 0.0, value))

    def pair(x: np.ndarray, n: np.ndarray) -> Tail:
        return Tail(upper(x, n), upper(x + 1, n))

    return _floored(_on_unique(pair, count, trials))


def hypergeometric(count: np.ndarray, draws: np.ndarray, *, population: int, successes: int) -> Tail:
    """Tail of the number of successes in draws [N] without replacement, at count [N]."""

    def upper(x: np.ndarray, number: int) -> np.ndarray:
        return _hypergeometric_table(number, population, successes)[np.clip(x, 0, number + 1)]

    return _floored(_on_unique(functools.partial(_number_by_number, upper), count, draws))


def gamma(total: np.ndarray, number: np.ndarray) -> Tail:
    """Tail of the sum of number [N] standard exponentials at total [N]; number = 0 gives 1."""
    value = np.where(number > 0, special.gammaincc(np.maximum(number, 1), np.maximum(total, 0.0)), 1.0)
    return _floored(Tail(value, value))


def dual_gamma(total: np.ndarray, number: np.ndarray, alpha: float) -> Tail:
    """Tail of (1 - alpha) A + alpha B at total [N]; A, B are independent sums of number [N] exponentials.

    The sum with the larger weight is a negative-binomial mixture of gammas with the smaller one's scale, so the tail is
    P(Poisson(x / light) < 2 number + NegativeBinomial(number, light / heavy)), a series of positive terms. vLLM's
    detector uses one gamma with equal mean and variance instead, which is slightly over-confident.
    """
    light, heavy = sorted((alpha, 1.0 - alpha))
    if light == 0.0:
        return gamma(total, number)
    n, x = np.maximum(number, 1), np.maximum(total, 0.0)
    value = np.array([_mixture_tail(float(a), int(b), light, heavy) for a, b in zip(x, n)])
    value = np.where(number > 0, value, 1.0)
    return _floored(Tail(value, value))


def lattice(total: np.ndarray, trials: np.ndarray, weights: tuple[int, ...]) -> Tail:
    """Tail of sum_i weights[i] Binomial(trials, 1/2), all independent, at total [N] (integers).

    Exact by a Fourier sum down to LATTICE_EXACT; below, the smaller of LATTICE_EXACT and the Chernoff bound
    min_s exp(-s x) E[exp(s X)], which is valid but too large by a factor of about 10.
    """

    def pair(x: np.ndarray, n: np.ndarray) -> Tail:
        upper, above = _lattice_upper(x, n, weights), _lattice_upper(x + 1, n, weights)
        most = n * sum(weights)
        deep = (upper < LATTICE_EXACT) & (x <= most)
        if deep.any():
            upper[deep] = above[deep] = np.minimum(chernoff(x[deep], n[deep], weights), LATTICE_EXACT)
        above[x >= most] = 0.0
        return Tail(upper, above)

    return _floored(_on_unique(pair, total, trials))


def chernoff(total: np.ndarray, trials: np.ndarray, weights: tuple[int, ...]) -> np.ndarray:
    """min_s exp(-s x) E[exp(s X)] >= P(X >= x) of the lattice sum, for x [N] above the mean (1 elsewhere)."""
    scaled = np.array(weights, np.float64) / max(weights)
    x = total.astype(np.float64) / max(weights)
    low, high = np.zeros(len(x)), np.full(len(x), 64.0)
    for _ in range(50):  # bisect for the slope; any s gives a valid bound
        s = 0.5 * (low + high)
        slope = trials * (special.expit(s[:, None] * scaled) * scaled).sum(axis=1)
        low, high = np.where(slope < x, s, low), np.where(slope < x, high, s)
    s = low
    exponent = trials * (np.logaddexp(0.0, s[:, None] * scaled) - np.log(2.0)).sum(axis=1) - s * x
    return np.exp(np.minimum(exponent, 0.0))


def _floored(tail: Tail) -> Tail:
    return Tail(np.clip(tail.upper, FLOOR, 1.0), np.clip(tail.above, 0.0, 1.0))


def _on_unique(function, x: np.ndarray, n: np.ndarray) -> Tail:
    """Compute a tail for distinct pairs (x, n) only: a corpus has few of them."""
    x, n = np.asarray(x, np.int64), np.asarray(n, np.int64)
    if not len(x):
        return Tail(np.zeros(0), np.zeros(0))
    least = x.min()
    span = x.max() - least + 1
    codes, back = np.unique(n * span + (x - least), return_inverse=True)
    found = function(codes % span + least, codes // span)
    return Tail(found.upper[back], found.above[back])


def _number_by_number(upper, x: np.ndarray, n: np.ndarray) -> Tail:
    """Tail of an integer variable from upper(x, number) = P(X >= x), which takes one number n at a time."""
    found = np.empty((2, len(x)))
    for number in np.unique(n):
        rows = n == number
        found[:, rows] = upper(x[rows], int(number)), upper(x[rows] + 1, int(number))
    return Tail(*found)


@functools.lru_cache(maxsize=4096)
def _hypergeometric_table(draws: int, population: int, successes: int) -> np.ndarray:
    """P(X >= x) for x = 0..draws + 1, from the exact ratios of neighbouring probabilities."""
    low, high = max(0, draws - (population - successes)), min(draws, successes)
    k = np.arange(low, high, dtype=np.float64)
    ratio = (successes - k) * (draws - k) / ((k + 1) * (population - successes - draws + k + 1))
    logs = np.concatenate([[0.0], np.cumsum(np.log(ratio))])
    mass = np.exp(logs - logs.max())
    upper = np.cumsum(mass[::-1])[::-1] / mass.sum()
    table = np.zeros(draws + 2)
    table[: low + 1] = 1.0
    table[low : high + 1] = upper
    return table


def _mixture_tail(x: float, n: int, light: float, heavy: float) -> float:
    """P(heavy A + light B > x): the terms j < 2n have a closed form, the others are summed, if many around the peak."""
    mean, failure = x / light, 1.0 - light / heavy
    last = int(mean + 12.0 * np.sqrt(mean) + 60.0)

    def poisson(j: np.ndarray) -> np.ndarray:
        return np.exp(special.xlogy(j, mean) - mean - _log_factorial(j))

    def at_least(m: np.ndarray | int) -> np.ndarray:  # P(NegativeBinomial >= m)
        return special.betainc(m, float(n), failure)

    start, stop = 2 * n, max(last, 2 * n)
    if stop - start > SERIES_WINDOW:  # terms are log-concave, their peak no wider than a Poisson's
        grid = np.linspace(start, stop, 512).astype(np.int64)
        peak, gap = grid[int(np.argmax(poisson(grid) * at_least(grid - 2.0 * n + 1.0)))], (stop - start) / 500
        reach = gap + 12.0 * np.sqrt(peak)
        start, stop = max(start, int(peak - reach)), min(stop, int(peak + reach))
    j = np.arange(start, stop + 1)
    m = j[:-1] - 2 * n + 1  # a sum of masses that runs is cheaper than an incomplete beta function for each term
    masses = special.xlogy(m, failure) + n * np.log1p(-failure) + _log_factorial(m + n - 1) - _log_factorial(m)
    masses = np.exp(masses - special.gammaln(n))
    above = np.append(np.cumsum(masses[::-1])[::-1], 0.0) + at_least(stop - 2.0 * n + 1.0)
    return float(min(1.0, special.gammaincc(2 * n, mean) + (poisson(j) * above).sum()))


def _log_factorial(k: np.ndarray) -> np.ndarray:
    """log k! of ascending whole numbers; from a table, unless they are large."""
    if not len(k) or k[-1] >= FACTORIALS:
        return special.gammaln(k + 1.0)
    return _log_factorials(max(10, int(k[-1]).bit_length()))[k]


@functools.cache
def _log_factorials(bits: int) -> np.ndarray:
    return special.gammaln(np.arange(1.0, 2.0**bits + 1.0))


# Sums of weighted fair bits on an integer lattice


@functools.lru_cache(maxsize=64)
def _frequencies(weights: tuple[int, ...], least: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """Return a grid's size M, the k that count, and sign and log of prod_i cos(pi weights[i] k / M) of each k.

    The grid serves from `least` to 2 `least` - 1 trials: it holds the whole lattice, or LATTICE_WIDTH standard
    deviations. Of its M / 2 frequencies a few dozen count for long texts; the others are below LATTICE_TERM.
    """
    most = 2 * least - 1
    spread = LATTICE_WIDTH * 0.5 * np.sqrt(most * sum(w * w for w in weights))
    size = int(min(most * sum(weights) + 3, spread + 2 * max(weights) + 64)) | 1  # odd: no frequency is its own mirror
    k = np.arange(1, size // 2 + 1)
    sign, log = np.ones(len(k)), np.zeros(len(k))
    for weight in sorted(weights, reverse=True):
        angle = (np.pi / size) * (weight * k % (2 * size))
        with np.errstate(divide="ignore"):
            log = log + 0.5 * np.log1p(-np.minimum(np.square(np.sin(angle)), 1.0))  # keeps digits where cos is near 1
        sign = sign * np.sign(np.cos(angle))
        kept = log * least >= np.log(LATTICE_TERM)  # further factors only make it smaller
        k, sign, log = k[kept], sign[kept], log[kept]
    return size, k, sign, log


def _lattice_upper(x: np.ndarray, trials: np.ndarray, weights: tuple[int, ...]) -> np.ndarray:
    """P(X >= x) for trials [N] >= 0; ROUNDING is added, so that what float64 loses does not make it too small.

    X has the mean m and a symmetric distribution, so 1 - 2 P(X >= x) = P(|X - m| < d), d = x - 1/2 - m: a sum of the
    lattice's masses, each a Fourier sum over the characteristic function, of which the inner sums have a closed form.
    """
    total = trials * sum(weights)
    upper = np.where((x > total) | (trials == 0), (x <= 0) * 1.0, 1.0)
    inside = np.flatnonzero((x > 0) & (x <= total))
    least = 1 << np.floor(np.log2(trials[inside])).astype(np.int64)
    for number in np.unique(least):
        size, k, sign, log = _frequencies(weights, int(number))
        rows = inside[least == number]
        for part in np.array_split(rows, -(-len(rows) * max(1, len(k)) // LATTICE_BLOCK)):
            d2 = (2 * x[part] - 1 - total[part])[:, None]  # twice d
            power = np.where(trials[part, None] % 2, sign, 1.0) * np.exp(trials[part, None] * log)
            terms = power * np.sin((np.pi / size) * (k * d2 % (2 * size)))
            within = (d2[:, 0] + 2.0 * (terms / np.sin((np.pi / size) * k)).sum(axis=1)) / size
            tail = np.minimum(np.maximum(0.5 - 0.5 * within, 0.0) + ROUNDING, 1.0)
            upper[part] = np.where(np.abs(d2[:, 0]) < size, tail, d2[:, 0] < 0)  # beyond the grid: 0 or 1
    return upper
