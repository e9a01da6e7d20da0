"""Moderated intervals: fitted priors, calibration and outliers, all simulated at fixed seeds."""

import math

import numpy as np
import pytest

from jaxbench.measure import moderation, verdicts


def launches(generator, *, rows, df, sd=0.06, num_launches=5):
    """Log ratios of rows whose variances are draws of a scaled inverse chi-square distribution."""
    variances = sd**2 * df / generator.chisquare(df, rows)
    return generator.normal(0, np.sqrt(variances)[:, None], (rows, num_launches))


@pytest.mark.parametrize("df", [4, 16])
def test_the_prior_of_many_rows_is_the_one_they_were_drawn_from(df):
    logs = launches(np.random.default_rng(df), rows=4000, df=df)
    prior = moderation.fit(logs.var(axis=1, ddof=1), np.full(4000, 4))
    assert np.median(prior.df) == pytest.approx(moderation.CAUTION * df, rel=0.15)
    assert prior.variance == pytest.approx(0.06**2, rel=0.05)


def test_rows_of_one_variance_share_all_their_degrees_of_freedom():
    logs = np.random.default_rng(0).normal(0, 0.06, (26, 5))
    found = moderation.intervals(list(logs))
    assert np.median([interval.df for interval in found]) > 40  # of 104
    errors = [interval.error for interval in found]
    assert max(errors) / min(errors) < 2.5 < np.ptp(np.log(logs.std(axis=1))) * 2.5


@pytest.mark.parametrize(("rows", "df"), [(13, 6), (39, 12)])
def test_false_alarms_of_single_rows_and_of_whole_tables(rows, df):
    generator = np.random.default_rng(rows)
    p_values, tables = [], []
    for _ in range(300):
        found = moderation.intervals(list(launches(generator, rows=rows, df=df)))
        p_values += [interval.p_value for interval in found]
        tables.append(any(row.verdict != "undecided" for row in verdicts.judge(found)))
    assert np.mean(np.array(p_values) < 0.05) == pytest.approx(0.05, abs=0.01)
    assert np.mean(tables) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)


def test_tables_of_two_launches_whose_rows_share_a_baseline_count_it_once():
    """Four arms beside one baseline on 13 workloads: as if each row had its own, false verdicts were frequent."""
    generator = np.random.default_rng(7)
    shared, alone = [], []
    for _ in range(200):
        sds = 0.05 * np.exp(generator.normal(0, 0.6, (13, 5, 1)))
        noise = sds * generator.normal(size=(13, 5, 2))
        logs = list((noise[:, 1:] - noise[:, :1]).reshape(52, 2))
        for found, num_baselines in ((shared, 13), (alone, None)):
            judged = verdicts.judge(moderation.intervals(logs, num_baselines=num_baselines))
            found.append(any(row.verdict != "undecided" for row in judged))
    assert np.mean(shared) < 0.7 * np.mean(alone) and np.mean(shared) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)


def test_rows_of_one_baseline_alone_have_no_more_degrees_of_freedom_than_it():
    logs = list(np.random.default_rng(3).normal(0, 0.06, (8, 5)))
    found = moderation.intervals(logs, num_baselines=1)
    assert [interval.df for interval in found] == [4.0] * 8
    assert moderation.intervals(logs, num_baselines=8) == moderation.intervals(logs)


def test_a_quarter_is_found_in_five_launches_of_eight_percent_where_rows_alone_find_half():
    generator = np.random.default_rng(5)
    shared, alone = [], []
    for _ in range(100):
        logs = list(launches(generator, rows=39, df=12, sd=0.08) + math.log(1.25))
        shared += [row.verdict == "faster" for row in verdicts.judge(moderation.intervals(logs))]
        alone += [row.verdict == "faster" for row in verdicts.judge([verdicts.t_interval(row) for row in logs])]
    assert np.mean(shared) > 0.97 and np.mean(alone) < 0.6


def test_a_row_far_out_keeps_its_own_variance_and_the_others_do_not_pay_for_it():
    generator = np.random.default_rng(11)
    logs = generator.normal(0, 0.06, (26, 5))
    calm = moderation.intervals(list(logs))
    logs[0] *= 12
    found = moderation.intervals(list(logs))
    own = verdicts.t_interval(logs[0])
    assert found[0].error > 0.7 * own.error and found[0].df < 12
    assert found[1].error == pytest.approx(calm[1].error, rel=0.1)


def test_few_rows_stand_alone():
    logs = [[0.1, 0.2, 0.3], [0.0, 0.1, 0.05]]
    for shared, alone in zip(moderation.intervals(logs), map(verdicts.t_interval, logs), strict=True):
        assert shared == pytest.approx(alone, rel=1e-12)
    assert moderation.intervals([]) == []


def test_rows_of_one_launch_stay_without_bounds_and_constant_rows_break_nothing():
    generator = np.random.default_rng(2)
    logs = [*generator.normal(0, 0.05, (8, 5)).tolist(), [0.3], [0.2] * 5]
    found = moderation.intervals(logs)
    assert (found[8].low, found[8].high, found[8].p_value) == (-math.inf, math.inf, 1.0)
    assert math.isfinite(found[9].error) and found[9].error > 0  # others say that five equal launches are luck
    assert all(interval.error == 0 for interval in moderation.intervals([[0.1, 0.1]] * 8))
