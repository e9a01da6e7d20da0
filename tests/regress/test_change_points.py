"""Change points: found where a level changes, quiet on noise and outliers, exact where nothing is noise."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxbench.measure.process import PEERS
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
    assert change_points([100.0, 104.0], counted=True) == [ChangePoint(1, 100.0, 104.0)]
    assert change_points([100.0, 100.0, 100.0, 104.0, 104.0], counted=True) == [ChangePoint(3, 100.0, 104.0)]
    assert change_points([7.0] * 30) == change_points([7.0] * 30, counted=True) == []
    assert change_points([7.0] * 10 + [8.0] * 10) == [ChangePoint(10, 7.0, 8.0)]


def test_a_count_that_leaves_0_or_returns_to_it_changes_there():
    assert change_points([0.0, 0.0, 3.0, 3.0, 0.0], counted=True) == [
        ChangePoint(2, 0.0, 3.0),
        ChangePoint(4, 3.0, 0.0),
    ]
    assert change_points([0.0] * 30, counted=True) == change_points([0.0, float("nan")], counted=True) == []


@pytest.mark.parametrize("spread", [0.01, 0.03, 0.05, 0.07])
def test_rounded_values_have_none_by_chance_and_a_step_of_some_units_is_found(spread):
    found = []
    for seed in range(60):
        values = 12.3 + spread * np.random.default_rng(seed).standard_normal(50)
        found.append(bool(change_points(np.round(values, 1))))
        values[30:] += 0.6
        [step] = change_points(np.round(values, 1))
        assert abs(step.index - 30) <= 2
    assert np.mean(found) <= 0.03
    assert change_points([0.98] * 30 + [0.979] + [0.98] * 20) == []


def test_a_series_that_is_too_short_or_not_positive_has_none():
    assert change_points([]) == change_points([1.0]) == []
    assert change_points(noise(0, 2 * LEAST - 1)) == change_points([1.0, 2.0]) == []
    assert change_points([1.0, 0.0, 2.0] * 10) == change_points([1.0, float("nan")] * 10) == []


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1e6))
def test_the_unit_of_a_series_does_not_matter(seed, factor):
    values = noise(seed, 40)
    values[20:] *= 1.5
    assert [each.index for each in change_points(values)] == [each.index for each in change_points(values * factor)]


def steps(seed, rise):
    """Fifty runs whose level rises at one of them, and which."""
    at = int(np.random.default_rng(seed + 1000).integers(15, 36))
    values = noise(seed, 50)
    values[at:] *= rise
    return at, values.tolist()


def correlated(seed):
    """Fifty runs that a slow drift of the machine joins: each keeps half of the deviation before it."""
    steps, deviation = np.random.default_rng(seed).normal(0, 0.03, 50), np.zeros(50)
    for i in range(1, 50):
        deviation[i] = 0.5 * deviation[i - 1] + steps[i]
    return np.exp(deviation).tolist()


def by_otava(rows):
    command = [str(PEERS / "otava" / "bin" / "python"), str(Path(__file__).with_name("otava_worker.py"))]
    answer = subprocess.run(command, input=json.dumps(rows), capture_output=True, text=True, check=True, timeout=300)
    return json.loads(answer.stdout)


def by_us(rows):
    return [[each.index for each in change_points(values)] for values in rows]


@pytest.mark.skipif(not (PEERS / "otava").exists(), reason="apache-otava is not there: make peers")
@pytest.mark.parametrize("name", ["noise", "correlated noise", 1.1, 1.15, 1.2])
def test_apache_otava_finds_the_same_steps_and_says_no_less_of_noise(name):
    made = {"noise": lambda seed: noise(seed, 50).tolist(), "correlated noise": correlated}
    if name in made:
        rows = [made[name](seed) for seed in range(100)]
        ours, theirs = (sum(map(bool, find(rows))) for find in (by_us, by_otava))
        print(f"{name}: series of 100 with a change point: {ours}, apache-otava {theirs}")
        assert ours <= theirs
        return
    ats, rows = zip(*(steps(seed, name) for seed in range(100)))
    near, extra = [], []
    for find in (by_us, by_otava):
        found = find(rows)
        near.append(sum(any(abs(place - at) <= 2 for place in places) for places, at in zip(found, ats)))
        extra.append(sum(any(abs(place - at) > 2 for place in places) for places, at in zip(found, ats)))
    print(f"a step of {name}: found {near[0]}, another {extra[0]}; apache-otava {near[1]} and {extra[1]}")
    assert near[0] >= near[1] - 5 and extra[0] <= extra[1]
