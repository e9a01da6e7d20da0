"""Change points: found where a level changes, quiet on noise and outliers, exact where nothing is noise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxbench.regress.change_points import LEAST, ChangePoint, change_points


def noise(seed, count, spread=0.05):
    return np.exp(np.random.default_rng(seed).normal(0, spread, count))


@pytest.mark.parametrize("count", [20, 50, 200])
def test_independent_noise_has_one_in_less_than_one_of_twenty(count):
    assert np.mean([bool(change_points(noise(seed, count))) for seed in range(200)]) <= 0.03


def test_a_level_that_rises_by_three_spreads_is_found_where_it_does():
    for seed in range(20):
        values = noise(seed, 50)
        values[30:] *= 1.15
        [found] = change_points(values)
        assert abs(found.index - 30) <= 2 and 1.05 < found.after / found.before < 1.3


def test_one_outlier_is_no_change():
    for seed in range(20):
        values = noise(seed, 50)
        values[25] *= 3
        assert change_points(values) == []


def test_counts_change_where_they_change():
    assert change_points([100.0, 100.0, 100.0, 104.0, 104.0]) == [ChangePoint(3, 100.0, 104.0)]
    assert change_points([7.0] * 30) == []


def test_a_series_that_is_too_short_or_not_positive_has_none():
    assert change_points([]) == change_points([1.0]) == []
    assert change_points(noise(0, 2 * LEAST - 1)) == []
    assert change_points([1.0, 0.0, 2.0] * 10) == change_points([1.0, float("nan")] * 10) == []


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1e6))
def test_the_unit_of_a_series_does_not_matter(seed, factor):
    values = noise(seed, 40)
    values[20:] *= 1.5
    assert [each.index for each in change_points(values)] == [each.index for each in change_points(values * factor)]
