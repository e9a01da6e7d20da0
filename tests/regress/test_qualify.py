"""Qualification: equal sides are quiet, what is far apart is found, and too few launches are refused."""

import numpy as np
import pytest

from jaxbench.regress import qualify
from jaxbench.regress.judge import Pair
from jaxbench.regress.suite import Suite

SUITE = Suite(cases=[{"name": "a", "workload": "generation"}], looks=[3, 5])
NAMES = ("a.tokens_per_s", "a.first_token_s", "a.load_s", "a.trace_s", "a.lower_s", "a.end_to_end_s", "a.token_p50_s")


def equal_sides(noise, count=30, seed=0):
    random = np.random.default_rng(seed)
    return {
        name: [Pair(*np.exp(noise * random.standard_normal(2)).tolist()) for _ in range(count)] for name in NAMES
    }  # fmt: skip


def test_a_quiet_machine_finds_a_fifth_and_says_nothing_of_equal_sides():
    found = qualify.measure(equal_sides(0.02), SUITE, num_drawn=60)
    assert found.real == (0, 6) and found.drawn.count == 0
    assert found.power[1.2].count == found.power[1.2].total == 60 and found.power[1.05].count == 0
    assert all(0.15 <= share < 0.2 for share in found.smallest.values())


def test_a_noisy_machine_finds_less_and_needs_more():
    quiet, noisy = (qualify.measure(equal_sides(noise), SUITE, num_drawn=60) for noise in (0.02, 0.3))
    assert noisy.power[1.2].count < 30 and noisy.drawn.count <= 6  # drawn from the same launches
    assert min(noisy.smallest.values()) > max(quiet.smallest.values())


def test_a_code_that_differs_is_no_equal_side():
    pairs = {name: [Pair(each.base, each.head * 1.5) for each in own] for name, own in equal_sides(0.02).items()}
    assert qualify.measure(pairs, SUITE, num_drawn=5).real == (6, 6)


def test_sixty_quiet_runs_are_needed_to_say_fewer_than_five_in_a_hundred():
    assert qualify.Share(0, 59).most < 0.05 < qualify.Share(0, 58).most
    assert "0.0 % (0 of 59; 95 %: at most 5.0)" == str(qualify.Share(0, 59))


def test_a_series_that_few_launches_have_is_left_out_and_said_and_costs_the_others_nothing():
    pairs, rare = equal_sides(0.02), equal_sides(0.3, count=4)["a.load_s"]
    whole = qualify.measure(pairs, SUITE, num_drawn=5)
    found = qualify.measure({"a.token_p99_s": rare, **pairs}, SUITE, num_drawn=5)
    assert found == whole._replace(left_out=["a.token_p99_s"]) and found.real.total == 6


def test_fewer_launches_than_a_run_has_are_refused():
    with pytest.raises(ValueError, match="qualify: 4 launches of both sides; wanted 5 at least"):
        qualify.measure(equal_sides(0.1, count=4), SUITE)
