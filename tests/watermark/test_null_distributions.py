"""Exact tails against enumeration, high-precision sums and each other."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from jaxbench.watermark import null_distributions
from jaxbench.watermark.schemes import synthid


def upper(masses: dict[int, Fraction], x: int) -> tuple[float, float]:
    """Return P(X >= x) and P(X > x) of an enumerated distribution."""
    return float(sum(p for k, p in masses.items() if k >= x)), float(sum(p for k, p in masses.items() if k > x))


@given(st.integers(0, 12), st.integers(1, 7), st.integers(-1, 14))
def test_binomial_tail_equals_the_sum_of_its_masses(n, eighths, x):
    share = Fraction(eighths, 8)
    masses = {k: math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n + 1)}
    found = null_distributions.binomial(np.array([x]), np.array([n]), float(share))
    wanted = upper(masses, x)
    assert found.upper[0] == pytest.approx(max(wanted[0], null_distributions.FLOOR), rel=1e-13)
    assert found.above[0] == pytest.approx(wanted[1], rel=1e-13)


@given(st.integers(0, 9), st.integers(0, 12), st.integers(-1, 13))
def test_hypergeometric_tail_equals_the_sum_of_its_masses(successes, draws, x):
    population = 12
    masses = {
        k: Fraction(
            math.comb(successes, k) * math.comb(population - successes, draws - k), math.comb(population, draws)
        )
        for k in range(draws + 1)
        if draws - k <= population - successes and k <= successes
    }
    found = null_distributions.hypergeometric(
        np.array([x]), np.array([draws]), population=population, successes=successes
    )
    wanted = upper(masses, x)
    assert found.upper[0] == pytest.approx(max(wanted[0], null_distributions.FLOOR), rel=1e-12)
    assert found.above[0] == pytest.approx(wanted[1], rel=1e-12)


@pytest.mark.parametrize(("weights", "trials"), [((3, 2, 5), 3), ((1,), 8), ((10, 1), 4), ((2, 4), 3)])
def test_lattice_tail_equals_enumeration_of_all_bits(weights, trials):
    masses: dict[int, Fraction] = {}
    for bits in itertools.product((0, 1), repeat=len(weights) * trials):
        total = sum(weights[i % len(weights)] * bit for i, bit in enumerate(bits))
        masses[total] = masses.get(total, Fraction(0)) + Fraction(1, 2 ** len(bits))
    x = np.arange(-1, sum(weights) * trials + 2)
    found = null_distributions.lattice(x, np.full(len(x), trials), weights)
    wanted = np.array([upper(masses, int(k)) for k in x])
    np.testing.assert_allclose(found.upper, np.maximum(wanted[:, 0], null_distributions.FLOOR), atol=1e-15, rtol=0)
    np.testing.assert_allclose(found.above, wanted[:, 1], atol=1e-15, rtol=0)


def test_lattice_of_equal_weights_is_the_binomial_distribution():
    n = np.full(240, 100)
    x = np.arange(400, 640)
    one = null_distributions.lattice(x, n, (1,) * 10)
    other = null_distributions.binomial(x, n * 10, 0.5)
    exact = other.upper >= null_distributions.LATTICE_EXACT
    np.testing.assert_allclose(one.upper[exact], other.upper[exact], atol=1e-13, rtol=1e-12)
    assert (one.upper[exact] >= other.upper[exact] * (1 - 1e-12)).all()  # rounding errs on the valid side
    assert (~exact).sum() > 20
    assert (one.upper[~exact] >= other.upper[~exact]).all()  # the bound is valid
    assert (one.upper[~exact] <= null_distributions.LATTICE_EXACT).all()
    assert (np.diff(one.upper) <= 0).all()


def test_lattice_tail_of_a_long_text_is_exact_to_the_last_digits_that_count():
    n = np.full(60, 100_000)
    x = 500_000 + np.arange(0, 3000, 50)
    found = null_distributions.lattice(x, n, (1,) * 10).upper
    wanted = null_distributions.binomial(x, 10 * n, 0.5).upper
    np.testing.assert_allclose(found, wanted, atol=2e-14, rtol=0)
    assert (found[wanted < 1e-6] >= wanted[wanted < 1e-6]).all() and wanted.min() < 1e-8


def test_lattice_tails_of_texts_of_a_thousand_lengths_keep_no_distribution_of_each():
    n = np.arange(20, 5020, 5)
    weights = synthid.weights(30, "weighted")
    tracemalloc.start()
    null_distributions.lattice(n * sum(weights) // 2, n, weights)
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 2**21 and most < 2**27, (kept, most)


def test_chernoff_bound_is_above_the_tail_and_not_far():
    x = np.arange(560, 760, 20)
    exact = null_distributions.binomial(x, np.full(len(x), 1000), 0.5).upper
    ratio = null_distributions.chernoff(x, np.full(len(x), 100), (1,) * 10) / exact
    assert (ratio >= 1).all() and (ratio < 50).all()


@pytest.mark.parametrize(("n", "x"), [(1, 0.5), (3, 9.0), (200, 150.0), (200, 400.0)])
def test_gamma_tail_is_a_poisson_sum(n, x):
    wanted = float(mpmath.fsum(mpmath.exp(-x) * mpmath.mpf(x) ** k / mpmath.factorial(k) for k in range(n)))
    found = null_distributions.gamma(np.array([x]), np.array([n]))
    assert found.upper[0] == found.above[0] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("n", "x", "alpha"), [(1, 3.0, 0.1), (5, 9.0, 0.1), (4, 1.5, 0.3), (20, 40.0, 0.3), (6, 20.0, 0.9)]
)
def test_dual_gamma_tail_equals_its_integral(n, x, alpha):
    with mpmath.workdps(25):
        heavy, light = mpmath.mpf(1) - mpmath.mpf(alpha), mpmath.mpf(alpha)

        def density(g):
            return g ** (n - 1) * mpmath.exp(-g) / mpmath.factorial(n - 1)

        def integrand(g):
            return density(g) * mpmath.gammainc(n, (x - light * g) / heavy, mpmath.inf, regularized=True)

        top = x / light
        wanted = mpmath.quad(integrand, mpmath.linspace(0, top, 9)) + mpmath.gammainc(
            n, top, mpmath.inf, regularized=True
        )
    found = null_distributions.dual_gamma(np.array([x]), np.array([n]), alpha)
    assert found.upper[0] == pytest.approx(float(wanted), rel=1e-11)


def test_dual_gamma_has_its_limits_and_is_wider_than_vllms_approximation():
    x, n = np.array([30.0, 250.0]), np.array([20, 200])
    np.testing.assert_allclose(
        null_distributions.dual_gamma(x, n, 0.0).upper, null_distributions.gamma(x, n).upper, rtol=1e-14
    )
    np.testing.assert_allclose(
        null_distributions.dual_gamma(x, n, 0.5).upper, null_distributions.gamma(2 * x, 2 * n).upper, rtol=1e-13
    )
    np.testing.assert_allclose(
        null_distributions.dual_gamma(x, n, 0.5 + 1e-9).upper, null_distributions.gamma(2 * x, 2 * n).upper, rtol=1e-5
    )
    exact, vllm = null_distributions.dual_gamma(x, n, 0.1).upper, special.gammaincc(n / 0.82, x / 0.82)
    assert (vllm < exact).all() and (vllm > 0.5 * exact).all()  # equal mean and variance: slightly over-confident


def test_long_series_of_a_dual_tail_agrees_with_its_window():
    wide = null_distributions.dual_gamma(np.array([260.0]), np.array([200]), 0.02).upper[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(null_distributions, "SERIES_WINDOW", 10**9)
        whole = null_distributions.dual_gamma(np.array([260.0]), np.array([200]), 0.02).upper[0]
    assert wide == pytest.approx(whole, rel=1e-12)


def test_a_dual_tail_computes_no_incomplete_beta_function_for_each_term(monkeypatch):
    computed, betainc = [], special.betainc
    monkeypatch.setattr(special, "betainc", lambda *args: computed.append(np.size(args[0])) or betainc(*args))
    x = np.array([200.0, 700.0])
    found = null_distributions.dual_gamma(x, np.array([200, 200]), 0.1).upper
    assert sum(computed) <= 514, computed  # the second series is long: 512 places on the way to its peak
    mean, failure = x / 0.1, 1 - 0.1 / 0.9
    j = np.arange(400, 9000)[:, None]
    terms = np.exp(special.xlogy(j, mean) - mean - special.gammaln(j + 1.0)) * betainc(j - 399.0, 200.0, failure)
    np.testing.assert_allclose(found, special.gammaincc(400, mean) + terms.sum(axis=0), rtol=1e-10)


def test_no_tail_underflows_to_zero_and_no_trials_give_one():
    assert null_distributions.gamma(np.array([5000.0]), np.array([10])).upper[0] == null_distributions.FLOOR
    assert null_distributions.binomial(np.array([5000]), np.array([5000]), 0.25).upper[0] == null_distributions.FLOOR
    assert null_distributions.gamma(np.array([0.0]), np.array([0])).upper[0] == 1.0
    assert null_distributions.binomial(np.array([0]), np.array([0]), 0.25).upper[0] == 1.0
    assert null_distributions.lattice(np.array([0]), np.array([0]), (2, 1)).upper[0] == 1.0
    assert null_distributions.binomial(np.zeros(0, int), np.zeros(0, int), 0.25).upper.shape == (0,)
