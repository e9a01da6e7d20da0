"""Rates, areas and lengths against scipy and against their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxbench.watermark.study import detectability

P = st.lists(st.sampled_from([1e-9, 1e-4, 0.01, 0.2, 0.5, 1.0]), min_size=1, max_size=30)


@given(marked=P, human=P)
def test_auroc_is_the_share_of_pairs_in_the_right_order(marked, human):
    wins = np.mean([(a < b) + 0.5 * (a == b) for a in marked for b in human])
    assert detectability.auroc(marked, human) == pytest.approx(wins)


@given(marked=P, human=P)
def test_the_area_under_the_roc_is_the_auroc(marked, human):
    false, true = detectability.roc(marked, human)
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(true, false) == pytest.approx(detectability.auroc(marked, human))


@given(marked=P, human=P)
def test_the_roc_reaches_the_rates_at_each_level(marked, human):
    false, true = (np.array(part) for part in detectability.roc(marked, human))
    for level in (1e-3, 0.05):
        x, y = detectability.detected(human, level).value, detectability.detected(marked, level).value
        assert true[false <= x].max() >= y and false[true >= y].min() <= x


@given(successes=st.integers(0, 40), extra=st.integers(1, 40))
def test_the_interval_ends_where_a_normal_test_just_keeps_the_rate(successes, extra):
    """Wilson's interval: the ends solve (share - end)^2 = z^2 end (1 - end) / count."""
    count = successes + extra
    found = detectability.rate(successes, count)
    for end in (found.low, found.high):
        assert (found.value - end) ** 2 == pytest.approx(
            stats.norm.isf(0.025) ** 2 * end * (1 - end) / count, abs=1e-12
        )
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_nothing_has_no_rate_and_no_area():
    assert math.isnan(detectability.rate(0, 0).value) and detectability.rate(0, 0)[1:] == (0, 1, 0)
    assert math.isnan(detectability.auroc([], [0.5])) and math.isnan(detectability.auroc([0.5], []))


def test_the_level_itself_counts_as_found():
    assert detectability.detected([0.01, 0.0100001, 1e-9], 0.01).value == pytest.approx(2 / 3)


@given(p=P, distinct=st.integers(1, 40))
def test_texts_of_few_prompts_have_the_interval_of_as_many_texts_and_their_own_rate(p, distinct):
    alone, found = detectability.detected(p, 0.01), detectability.detected(p, 0.01, distinct=distinct)
    assert (found.value, found.count) == (alone.value, len(p)) and found.low <= alone.low <= alone.high <= found.high
    many = detectability.detected(p * 50, 0.01, distinct=len(p))
    assert many[:3] == pytest.approx(alone[:3]) and many.count == 50 * len(p)
    assert detectability.rates(p, [0.01], distinct=distinct)["0.01"] == found._asdict()


def test_tokens_needed_is_the_median_of_the_first_length_found():
    p = np.array([[0.5, 1e-4, 1e-4], [0.5, 0.5, 1e-4], [1e-4, 0.5, 0.5], [0.5, np.nan, np.nan]])
    assert detectability.tokens_needed([25, 50, 100], p, 1e-3) == 50
    assert detectability.tokens_needed([25, 50, 100], p[[1, 3, 3]], 1e-3) == math.inf
    assert detectability.tokens_needed([25], np.empty((0, 1)), 1e-3) == math.inf
