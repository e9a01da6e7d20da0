"""The table: medians over launches, ratios oriented so that above one is better, verdicts, failures with reasons."""

import math

import numpy as np
import pytest
from scipy import stats

from jaxbench.bench import labels, summary
from jaxbench.bench.suite import Verdicts
from jaxbench.measure.records import Record, Workload

DECODE = Workload(kind="decode", dtype="float32", batch=1, prompt_tokens=8, new_tokens=4)


def rate(arm: str, values: list[float], *, metric: str = "decode_tokens_per_s", **fields) -> list[Record]:
    return [
        Record(
            metric=metric, value=value, unit="tokens/s", samples=(value,), arm=arm, workload=DECODE, launch=n, **fields
        )
        for n, value in enumerate(values, start=1)
    ]


def row(records: list[Record], arm: str, verdicts: Verdicts = Verdicts()) -> summary.Row:
    return next(r for r in summary.rows(records, verdicts) if r.arm == arm)


def test_twice_the_rate_in_every_launch_is_faster_with_ratio_two():
    found = row(rate("torch_eager", [10, 11, 10.5]) + rate("flax", [20, 22.1, 20.9]), "flax")
    assert found.verdict == "faster" and found.p_value < 0.01
    assert found.value == 20.9 and found.launches == (20, 22.1, 20.9)
    assert found.ratio[0] == pytest.approx(2.0, rel=0.01) and found.ratio[1] > 1.9


def test_times_and_bytes_are_oriented_so_that_less_is_better():
    records = rate("torch_eager", [2.0, 2.1, 1.9], metric="first_token_s")
    records += rate("flax", [1.0, 1.05, 0.95], metric="first_token_s")
    assert row(records, "flax").ratio[0] == pytest.approx(2.0)
    assert row(records, "flax").verdict == "faster"


def test_ratios_pair_launches_and_skip_those_without_a_baseline():
    base = rate("torch_eager", [10, 10, 10])
    base[1] = base[1].model_copy(update={"value": None, "samples": (), "status": "error", "reason": "died"})
    found = row(base + rate("flax", [20, 999, 20]), "flax")
    assert found.log_ratios == (pytest.approx(math.log(2)), pytest.approx(math.log(2)))


def test_the_baseline_and_unjudged_metrics_have_no_ratio():
    records = rate("torch_eager", [10, 11]) + rate("flax", [5e9, 5e9], metric="flops")
    assert row(records, "torch_eager").verdict == "baseline" and row(records, "torch_eager").ratio is None
    assert row(records, "flax").verdict == "" and row(records, "flax").ratio is None


def test_one_launch_is_undecided_with_infinite_bounds():
    found = row(rate("torch_eager", [10]) + rate("flax", [30]), "flax")
    assert found.verdict == "undecided" and found.ratio == (pytest.approx(3), 0.0, math.inf)
    assert found.decidable == math.inf


def test_undecided_rows_say_from_which_ratio_on_they_would_be_decided():
    found = row(rate("torch_eager", [10, 10, 10]) + rate("flax", [10.5, 12, 10.2]), "flax")
    assert found.verdict == "undecided" and found.decidable > found.ratio[0]
    again = row(
        rate("torch_eager", [10, 10, 10]) + rate("flax", [v * found.decidable for v in (10.5, 12, 10.2)]), "flax"
    )
    assert again.verdict == "faster"


def test_verdicts_hold_for_all_rates_together():
    """A p-value of 0.03 decides a row that stands alone, and not one of many."""
    records, logs = [], stats.t.ppf(1 - 0.015, 2) / math.sqrt(3) + np.array([-1.0, 0.0, 1.0])
    for n in range(5):
        workload = DECODE.model_copy(update={"batch": n + 1})
        values = np.exp(logs if n == 0 else logs - logs.mean())
        records += [r.model_copy(update={"workload": workload}) for r in rate("torch_eager", [1.0, 1.0, 1.0])]
        records += [r.model_copy(update={"workload": workload}) for r in rate("flax", values.tolist())]
    alone = summary.rows([r for r in records if r.workload.batch == 1], Verdicts())
    assert [r.verdict for r in alone] == ["baseline", "faster"]
    assert {r.verdict for r in summary.rows(records, Verdicts())} == {"baseline", "undecided"}


def test_rows_of_several_arms_count_their_common_baseline_once(monkeypatch):
    counted = []
    original = summary.moderation.intervals

    def intervals(rows, *, num_baselines, **options):
        counted.append((len(rows), num_baselines))
        return original(rows, num_baselines=num_baselines, **options)

    monkeypatch.setattr(summary.moderation, "intervals", intervals)
    records = []
    for metric in ("decode_tokens_per_s", "first_token_s"):
        for arm in ("torch_eager", "flax", "transformers"):
            records += rate(arm, [10, 11, 10.5], metric=metric)
    summary.rows(records, Verdicts())
    assert counted[0] == (4, 2)


def test_an_arm_whose_programs_equal_another_s_is_no_evidence_of_its_own():
    records = rate("torch_eager", [10, 11, 10.5]) + rate("flax", [20, 22.1, 20.9]) + rate("equinox", [20, 22.1, 20.9])
    for arm in ("flax", "equinox"):
        for metric, value in (("flops", 7.0), ("temp_bytes", 3.0), ("argument_bytes", 5.0)):
            records += rate(arm, [value], metric=metric)
    assert [row(records, arm).verdict for arm in ("flax", "equinox")] == ["faster", "same"]
    assert row(records, "equinox").ratio[0] == pytest.approx(2.0, rel=0.01) and row(records, "equinox").p_value is None
    other = [r.model_copy(update={"value": 8.0}) if (r.arm, r.metric) == ("equinox", "flops") else r for r in records]
    assert row(other, "equinox").verdict == "faster"


def test_a_failed_arm_keeps_its_reason_and_the_others_their_rows():
    failed = Record(metric="decode_tokens_per_s", arm="torch_compile", workload=DECODE, launch=1, status="skipped",
                    reason="no C++ compiler")  # fmt: skip
    records = [*rate("torch_eager", [10, 10]), failed, *rate("flax", [20, 21])]
    assert row(records, "torch_compile").value is None
    assert row(records, "torch_compile").reason == "no C++ compiler"
    assert row(records, "flax").verdict == "faster"


def test_share_of_roofline_is_the_median_over_launches():
    records = [r.model_copy(update={"detail": {"share_of_roofline": s}})
               for r, s in zip(rate("flax", [1, 2, 3]), (0.5, 0.7, 0.6))]  # fmt: skip
    assert row(records, "flax").share_of_roofline == 0.6


def test_percentiles_of_a_token_are_over_all_launches_and_only_where_they_have_a_bound():
    seconds = [n / 1e3 for n in range(1, 121)]
    records = [
        Record(metric="token_s", value=0.06, unit="s", samples=seconds, arm="flax", workload=DECODE, launch=n)
        for n in (1, 2, 3)
    ]
    assert [name for name, value in row(records, "flax").percentiles if value is not None] == ["p50", "p90", "p99"]
    few = row(records[:1], "flax")
    assert few.percentiles[2] == ("p99", None) and few.verdict == ""
    assert labels.percentiles(few.percentiles) == "p50 60.5 ms, p90 108 ms, p99 –"


def test_control_drift_compares_launches():
    records = [Record(metric="control_s", value=v, samples=(v,), launch=n) for n, v in ((1, 1.0), (2, 1.3))]
    assert summary.control_drift(records) == pytest.approx(0.3)
