"""Verdicts: intervals over launches, Holm, percentiles, drift; the false-alarm rate is simulated at a fixed seed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxbench.measure import verdicts

positive = st.floats(min_value=1e-3, max_value=1e3)


@given(st.lists(positive, min_size=1, max_size=5), st.lists(positive, min_size=1, max_size=5))
def test_log_ratio_changes_sign_with_the_arms_and_with_what_is_better(arm, base):
    forward = verdicts.log_ratio(arm, base, higher_is_better=True)
    assert forward == pytest.approx(-verdicts.log_ratio(base, arm, higher_is_better=True), abs=1e-12)
    assert forward == pytest.approx(-verdicts.log_ratio(arm, base, higher_is_better=False), abs=1e-12)


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=9), st.sampled_from([0.9, 0.95, 0.99]))
def test_t_interval_is_scipys_paired_interval(values, confidence):
    interval = verdicts.t_interval(values, confidence=confidence)
    if np.std(values) < 1e-9:
        return
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(confidence)
    assert interval.low == pytest.approx(low, rel=1e-6, abs=1e-9)
    assert interval.high == pytest.approx(high, rel=1e-6, abs=1e-9)
    assert interval.p_value == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue, rel=1e-6)


def test_one_launch_is_always_undecided():
    interval = verdicts.t_interval([math.log(10)])
    assert interval.ratio() == (pytest.approx(10), 0.0, math.inf)
    assert verdicts.judge([interval])[0] == ("undecided", 1.0, math.inf)


@pytest.mark.parametrize(
    ("values", "margin", "wanted"),
    [
        ([0.5, 0.52, 0.48], 0.0, "faster"),
        ([-0.5, -0.52, -0.48], 0.0, "slower"),
        ([0.5, -0.5, 0.1], 0.0, "undecided"),
        ([0.030, 0.031, 0.029], 0.0, "faster"),
        ([0.030, 0.031, 0.029], 0.05, "undecided"),
        ([-0.030, -0.031, -0.029], 0.05, "undecided"),
    ],
)
def test_a_verdict_needs_a_difference_beyond_the_margin(values, margin, wanted):
    interval = verdicts.t_interval(values, margin=margin)
    assert verdicts.judge([interval], margin=margin)[0].verdict == wanted


@given(st.floats(0.1, 10), st.lists(st.floats(-1, 1), min_size=2, max_size=6))
def test_shifting_every_launch_shifts_the_interval_by_as_much(shift, values):
    before, after = verdicts.t_interval(values), verdicts.t_interval([v + shift for v in values])
    assert after.mean - before.mean == pytest.approx(shift, abs=1e-9)
    assert after.high - after.low == pytest.approx(before.high - before.low, abs=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (0.00, 456864.72, False), (0.0, math.inf, False), (0.2, math.inf, False), (math.nan, math.nan, False),
        (0.09, 11.0, False), (0.11, 9.0, True), (0.95, 1.05, True), (1.2, 500.0, True), (0.001, 0.9, True),
    ],
)  # fmt: skip
def test_an_interval_that_allows_everything_says_nothing(low, high, says):
    assert verdicts.is_informative(low, high) == says


def test_ratios_too_large_for_a_float_are_infinite():
    assert verdicts.t_interval([0.0, 400.0]).ratio() == (pytest.approx(math.exp(200)), 0.0, math.inf)


def test_false_alarms_stay_near_the_nominal_rate_when_processes_differ():
    """Equal arms, process offsets of 10 %, round noise of 30 %: the launch design holds, pooling fails."""
    generator = np.random.default_rng(20261121)
    runs, launches, rounds = 2000, 3, 8
    alarms = pooled_alarms = 0
    for _ in range(runs):
        offsets = generator.normal(0, 0.10, (2, launches, 1))
        times = np.exp(offsets + generator.normal(0, 0.30, (2, launches, rounds)))
        logs = [verdicts.log_ratio(times[0, n], times[1, n], higher_is_better=False) for n in range(launches)]
        alarms += verdicts.judge([verdicts.t_interval(logs)])[0].verdict != "undecided"
        pooled_alarms += stats.ttest_ind(np.log(times[0]).ravel(), np.log(times[1]).ravel()).pvalue < 0.05
    assert alarms / runs == pytest.approx(0.05, abs=0.015)
    assert pooled_alarms / runs > 0.12  # the rule this design replaces


def test_a_real_difference_of_two_is_found_in_three_launches():
    generator = np.random.default_rng(7)
    found = 0
    for _ in range(300):
        logs = generator.normal(math.log(2), 0.07, 3)
        found += verdicts.judge([verdicts.t_interval(logs)])[0].verdict == "faster"
    assert found / 300 > 0.95


def test_holm_of_a_known_family():
    np.testing.assert_allclose(verdicts.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert verdicts.holm([]).tolist() == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_never_above_bonferroni_and_keeps_the_order(p_values):
    p = np.array([p_values])
    holm, bonferroni = verdicts.holm(p), np.minimum(1.0, p * p.shape[1])
    assert (holm <= bonferroni + 1e-15).all() and (holm >= p).all()
    order = np.argsort(p[0], kind="stable")
    assert (np.diff(holm[0][order]) >= 0).all()
    assert holm.min() == bonferroni.min()


def test_percentiles_appear_only_where_their_bound_exists():
    assert [verdicts.samples_for_percentile(share) for share in (0.9, 0.95, 0.99)] == [29, 59, 299]
    few = verdicts.percentiles(list(range(1, 31)))
    assert few == {"p50": 15.5, "p90": pytest.approx(27.1), "p95": None, "p99": None}
    assert verdicts.percentiles(list(range(299)))["p99"] == pytest.approx(295.02)


def test_a_ratio_that_is_called_decidable_is_decided_nine_times_in_ten():
    generator = np.random.default_rng(3)
    interval = verdicts.interval(0.0, 0.05 / math.sqrt(5), 4, 5)
    [judged] = verdicts.judge([interval])
    assert judged.verdict == "undecided" and 1.1 < judged.decidable < 1.25
    logs = generator.normal(math.log(judged.decidable), 0.05, (2000, 5))
    decided = [verdicts.judge([verdicts.t_interval(row)])[0].verdict == "faster" for row in logs]
    assert np.mean(decided) == pytest.approx(0.9, abs=0.03)


def test_a_family_is_decided_together_and_says_in_which_direction():
    intervals = [verdicts.interval(mean, 0.1, 10, 5) for mean in (1.0, -1.0, 0.25, 0.0)]
    judged = verdicts.judge(intervals)
    assert [row.verdict for row in judged] == ["faster", "slower", "undecided", "undecided"]
    assert [row.p_value for row in judged] == verdicts.holm([each.p_value for each in intervals]).tolist()
    assert verdicts.judge(intervals[2:3])[0].verdict == "faster"  # which alone it is
    assert verdicts.judge([]) == []


def test_drift_is_the_spread_of_launch_medians():
    assert verdicts.drift([[1.0, 1.0, 9.0], [1.2, 1.2, 1.2]]) == pytest.approx(0.2)
    assert verdicts.drift([]) == 0.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: verdicts.median([]),
        lambda: verdicts.log_ratio([0.0], [1.0], higher_is_better=True),
        lambda: verdicts.t_interval([]),
        lambda: verdicts.t_interval([math.nan, 1.0]),
        lambda: verdicts.t_interval([1.0], confidence=1.5),
        lambda: verdicts.samples_for_percentile(1.0),
    ],
)
def test_undefined_statistics_are_errors_with_values(call):
    with pytest.raises(ValueError, match=r"\d|nan|\[\]"):
        call()
