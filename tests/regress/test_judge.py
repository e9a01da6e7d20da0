"""Verdicts over launches: what is worse is found, what is equal is not, and how many launches would tell."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench import outputs
from jaxbench.regress import judge, metrics, report
from jaxbench.regress.judge import Pair
from jaxbench.regress.suite import Suite

CASE = {"name": "decode", "workload": "generation"}
SUITE = Suite(cases=[CASE])
RATE, TIME, OPS = "decode.tokens_per_s", "decode.first_token_s", "decode.prefill.hlo_ops"


def launches(ratio, *, count=6, noise=0.01, seed=0):
    """Pairs whose head takes `ratio` times as long as the base, with an offset of each process."""
    random = np.random.default_rng(seed)
    return [Pair(math.exp(noise * a), ratio * math.exp(noise * b)) for a, b in random.standard_normal((count, 2))]


def one(series, pairs, suite=SUITE):
    [found] = judge.judge({series: pairs}, suite)
    return found


@pytest.mark.parametrize(
    "ratio, verdict, level",
    [(1.4, "regression", "critical"), (1.2, "regression", "warning"), (1.0, "no change", ""), (0.7, "improvement", "")],
)
def test_a_time_that_became_longer_is_a_regression(ratio, verdict, level):
    found = one(TIME, launches(ratio))
    assert (found.verdict, found.level) == (verdict, level)
    assert found.low <= found.worse <= found.high and found.worse == pytest.approx(ratio - 1, abs=0.05)


def test_a_rate_that_became_lower_is_a_regression_of_the_same_size():
    slower = [Pair(1 / pair.base, 1 / pair.head) for pair in launches(1.4)]
    rate, time = one(RATE, slower), one(TIME, launches(1.4))
    assert rate.verdict == "regression" and rate.worse == pytest.approx(time.worse)


def test_launches_that_disagree_are_undecided_and_more_of_them_are_asked_for():
    found = one(TIME, launches(1.1, noise=0.3, count=4))
    assert found.verdict == "undecided" and found.wanted_pairs > 4
    assert one(TIME, launches(1.1, count=1)).wanted_pairs == 2


@pytest.mark.parametrize("ratio", [1.2, 1.4, 1.05, 0.8])
def test_as_many_launches_as_are_asked_for_decide_and_half_of_them_do_not(ratio):
    def judged(count, others):
        spread = [Pair(1.0, ratio * math.exp(1.0 if i % 2 else -1.0)) for i in range(count)]
        quiet = {f"decode.a{i}.first_token_s": launches(1.0, count=count, seed=i) for i in range(others)}
        return judge.judge(quiet | {TIME: spread}, SUITE)[-1]

    for others in (0, 4):  # of its family, whose correction it pays
        found = judged(10, others)
        count = 2 * math.ceil(1.05 * found.wanted_pairs / 2)  # a sample's spread is a little wider for few launches
        assert found.verdict == "undecided" and 10 < count < judge.MOST_LAUNCHES
        assert judged(count, others).verdict != "undecided"
        assert judged(2 * (found.wanted_pairs // 4), others).verdict == "undecided"


@pytest.mark.parametrize("head, verdict", [(1001.0, "regression"), (1000.0, "no change"), (999.0, "improvement")])
def test_what_is_counted_is_judged_at_any_size(head, verdict):
    found = one(OPS, [Pair(1000.0, head)])
    assert found.verdict == verdict and found.level == ("warning" if verdict == "regression" else "")
    assert found.low == found.high


def test_a_count_that_was_zero_is_a_critical_regression():
    found = one("decode.recompilations", [Pair(0.0, 1.0)])
    assert found.level == "critical" and found.worse == math.inf
    assert one("decode.recompilations", [Pair(0.0, 0.0)]).verdict == "no change"


def test_what_is_measured_once_a_run_is_not_judged():
    assert judge.judge({"decode.compile_cold_s": [Pair(1.0, 3.0)]}, SUITE) == []


def test_a_primary_series_does_not_pay_for_all_others():
    """The same slow-down among fifteen series without one is found more often where it is primary."""
    others = {f"decode.a{i}.first_token_s": launches(1.0, count=3, noise=0.07, seed=i) for i in range(15)}
    found = {RATE: 0, TIME: 0}
    for seed in range(40):
        slower = launches(1.2, count=3, noise=0.07, seed=1000 + seed)
        for name in found:
            pairs = [Pair(1 / pair.base, 1 / pair.head) for pair in slower] if name == RATE else slower
            judged = judge.judge(others | {name: pairs}, SUITE)
            found[name] += next(each for each in judged if each.series == name).verdict == "regression"
    assert found[RATE] >= found[TIME] + 8, found
    shares = judge._shares_of_alpha({RATE: 0.01, TIME: 0.01, "decode.load_s": 0.02}, SUITE, 0.05)
    assert [shares[RATE], shares[TIME]] == pytest.approx([0.01 / 0.04, 0.02 / 0.01])
    assert judge._shares_of_alpha({TIME: 0.04}, SUITE, 0.05) == pytest.approx({TIME: 0.8})


@pytest.mark.parametrize("noise", [0.03, 0.08, 0.3])
def test_runs_of_equal_sides_are_quiet(noise):
    """Of 300 runs of all timed series without a difference, one of them primary, fewer than 5 % say anything."""
    names = [f"decode.{name}" for name, metric in metrics.METRICS.items() if metric.kind in ("timed", "memory")]
    loud = 0
    for seed in range(300):
        pairs = {name: launches(1.0, count=5, noise=noise, seed=100 * seed + i) for i, name in enumerate(names)}
        loud += any(each.verdict in ("regression", "improvement") for each in judge.judge(pairs, SUITE, num_looks=3))
    assert loud / 300 < 0.05


@given(head=st.floats(0.1, 10), base=st.floats(0.1, 10), higher=st.booleans())
def test_worsening_of_a_rate_is_that_of_its_time(head, base, higher):
    share = metrics.worsening(head, base, higher_is_better=higher)
    assert share == pytest.approx(
        metrics.worsening(1 / head, 1 / base, higher_is_better=not higher), rel=1e-6, abs=1e-9
    )
    assert (share > 0) == ((head < base) if higher else (head > base))


def test_margins_are_those_of_the_series_the_metric_or_the_kind():
    first = {"warning": 0.5, "critical": 0.6, "direction": "lower"}
    margins = {"decode.first_token_s": first, "memory": {"warning": 0.1, "critical": 0.2}}
    suite = Suite(cases=[CASE], margins=margins)
    assert suite.margin(TIME).warning == 0.5 and suite.margin(RATE).warning == 0.15
    assert suite.margin("decode.peak_memory_bytes").warning == 0.1
    assert one(TIME, launches(1.4), suite).verdict != "regression"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"cases": [CASE, CASE]}, "cases.name=decode is there twice"),
        ({"looks": [5, 3]}, r"looks=\[5, 3\]; wanted numbers of launches that rise"),
        ({"looks": [1]}, "2 at least"),
        ({"primary": ["decode.speed"]}, "primary=decode.speed; wanted CASE.METRIC"),
        ({"margins": {"speed": {"warning": 0.1, "critical": 0.2}}}, "margins.speed; wanted CASE.METRIC"),
        ({"margins": {"timed": {"warning": 0.3, "critical": 0.2}}}, "warning=0.3 is above critical=0.2"),
        (
            {"margins": {"tokens_per_s": {"warning": 0.1, "critical": 0.2, "direction": "lower"}}},
            "margins.tokens_per_s.direction=lower: higher is better",
        ),
        (
            {"margins": {"timed": {"warning": 0.1, "critical": 0.2, "direction": "lower"}}},
            "margins.timed.direction=lower: a kind has metrics of both directions",
        ),
    ],
)
def test_a_suite_that_contradicts_itself_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        Suite(**{"cases": [CASE]} | changes)


def test_a_series_of_no_known_metric_is_named():
    with pytest.raises(ValueError, match="metric 'speed' of 'decode.speed' is unknown; wanted one of tokens_per_s"):
        metrics.metric_of("decode.speed")


def test_a_sample_that_is_no_number_comes_back_as_none_of_its_file(tmp_path):
    import math

    from jaxbench import store
    from jaxbench.regress import pairs

    row = {"launch": 0, "side": "head", "series": "train.loss", "samples": [1.5, float("nan")]}
    store.append(tmp_path / "samples.jsonl", [row])
    (found,) = pairs.read(tmp_path / "samples.jsonl")
    assert found["samples"][0] == 1.5 and math.isnan(found["samples"][1])


@pytest.mark.parametrize("series", ["bits.bits_per_byte", "decode.tokens_per_s", "decode.step.flops"])
def test_a_value_that_is_not_finite_on_head_alone_is_a_critical_regression(series):
    def judged(base, head):
        [found] = judge.judge({series: [Pair(base, head)] * 3}, SUITE)
        return found

    nan = float("nan")
    broken, mended, same = judged(1.0, nan), judged(nan, 1.0), judged(nan, nan)
    assert (broken.verdict, broken.level) == ("regression", "critical") and report.interval(broken) == "not finite"
    assert mended.verdict == "improvement" and report.interval(mended) == "was not finite"
    assert same.verdict == "no change"
    again = report.findings_of({"findings": [outputs.finite(broken._asdict())]})[0]
    assert math.isnan(again.head) and again.worse == math.inf


@pytest.mark.parametrize(
    "pairs",
    [[Pair(0.0, 4096.0), Pair(0.0, 0.0), Pair(4096.0, 8192.0)], [Pair(4.0, 8.0), Pair(4.0, 8.0), Pair(0.0, 4.0)]],
)
def test_a_timed_series_with_a_zero_is_undecided_and_not_judged_as_a_count(pairs):
    """Peak memory above the imports may be 0 in one launch; medians alone would make chance a critical regression."""
    found = one("words.peak_memory_bytes", pairs)
    assert (found.verdict, found.level, found.low, found.high) == ("undecided", "", -1.0, math.inf)
    assert found.wanted_pairs == 4 and report.verdict(found) == "undecided (about 4 launches would tell)"
    assert one("words.peak_memory_bytes", [Pair(0.0, 0.0)] * 3).verdict == "no change"


@pytest.mark.parametrize("series", [TIME, OPS, "decode.bits_per_byte"])
def test_one_launch_of_head_that_is_not_finite_is_critical_however_the_median_is(series):
    found = one(series, [Pair(1.0, 1.0), Pair(1.0, 1.0), Pair(1.0, math.inf)])
    assert (found.verdict, found.level) == ("regression", "critical") and report.interval(found) == "not finite"
