"""From records to rows of the result table: medians over launches, ratios with intervals, verdicts (S file)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from jaxbench.bench.suite import Verdicts
from jaxbench.measure import verdicts
from jaxbench.measure.records import SUITE_ARM, Record, Workload

# Metrics that are compared between arms: name -> whether more is better. Others are shown, never judged.
COMPARED = {
    "prefill_tokens_per_s": True,
    "first_token_s": False,
    "decode_tokens_per_s": True,
    "train_tokens_per_s": True,
    "load_s": False,
    "compile_cold_s": False,
    "compile_warm_s": False,
    "peak_memory_bytes": False,
}
NOT_ROWS = ("tokens", "parity", "profile")  # records of an arm that are no measurement
# Rows that "not slower than torch_ref" is about: compile time has no counterpart in eager code.
SPEED = ("prefill_tokens_per_s", "first_token_s", "decode_tokens_per_s", "train_tokens_per_s")


class Row(NamedTuple):
    """One line of the table: a metric of an arm on a workload, over all launches."""

    metric: str
    workload: Workload
    arm: str
    value: float | None  # median over launches of the launch medians; None when every launch failed or was skipped
    unit: str
    launches: tuple[float, ...]  # launch medians, in order
    share_of_roofline: float | None  # 0..1, of the rate the machine allows; None where there is no bound
    reason: str  # why there is no value
    verdict: str  # faster, slower, undecided, baseline, or "" (not compared)
    ratio: tuple[float, float, float] | None = None  # (point, low, high) to the baseline, > 1 is better; None = none
    log_ratios: tuple[float, ...] = ()  # one a launch, > 0 is better
    holm: bool = False  # the verdict also holds after Holm's correction over the whole table
    launches_needed: int | None = None  # an undecided row: those that would decide it, None = unknown or more than 200


def rows(records: Sequence[Record], rules: Verdicts) -> list[Row]:
    """Rows of the table in the order of the records, with Holm's correction over all compared ones."""
    groups: dict[tuple[str, Workload, str], dict[int, Record]] = defaultdict(dict)
    for record in records:
        if record.arm != SUITE_ARM and record.metric not in NOT_ROWS:
            groups[record.metric, record.workload, record.arm][record.launch] = record
    table, p_values = [], {}
    for (metric, workload, arm), launches in groups.items():
        base = groups.get((metric, workload, rules.baseline), {})
        row, p_value = _row(metric, workload, arm, launches, base, rules)
        if p_value is not None:
            p_values[len(table)] = p_value
        table.append(row)
    kept = verdicts.holm(list(p_values.values())) <= 1 - rules.confidence
    for index, holds in zip(p_values, kept, strict=True):
        table[index] = table[index]._replace(holm=bool(holds) and table[index].verdict != "undecided")
    return table


def control_drift(records: Sequence[Record]) -> float:
    """Share by which the control loop moved between launches (0.1 = 10 %)."""
    control = [record.samples for record in records if record.metric == "control_s" and record.samples]
    return verdicts.drift(control)


def _row(metric, workload, arm, launches: dict[int, Record], base: dict[int, Record], rules: Verdicts):
    """One row and its p-value (None when it is not compared)."""
    good = {n: r for n, r in sorted(launches.items()) if r.status == "ok" and r.value is not None}
    values = tuple(record.value for record in good.values())
    shares = [r.detail["share_of_roofline"] for r in good.values() if r.detail.get("share_of_roofline") is not None]
    last = list(launches.values())[-1]
    row = Row(
        metric=metric,
        workload=workload,
        arm=arm,
        value=verdicts.median(values) if values else None,
        unit=last.unit,
        launches=values,
        share_of_roofline=verdicts.median(shares) if shares else None,
        reason="" if values else last.reason,
        verdict="baseline" if arm == rules.baseline and metric in COMPARED else "",
    )
    if metric not in COMPARED or arm == rules.baseline:
        return row, None
    pairs = [(good[n], base[n]) for n in good if n in base and base[n].value and base[n].status == "ok"]
    pairs = [(a, b) for a, b in pairs if a.value > 0 and b.value > 0]
    if not pairs:
        return row, None
    better = COMPARED[metric]
    logs = tuple(
        verdicts.log_ratio(a.samples or [a.value], b.samples or [b.value], higher_is_better=better) for a, b in pairs
    )
    interval = verdicts.t_interval(logs, confidence=rules.confidence, margin=rules.margin)
    decided = verdicts.verdict(interval, margin=rules.margin)
    needed = None
    if decided == "undecided":
        needed = verdicts.launches_needed(logs, confidence=rules.confidence, margin=rules.margin)
    return row._replace(
        ratio=tuple(value if math.isfinite(value) else math.inf for value in interval.ratio()),
        log_ratios=logs,
        verdict=decided,
        launches_needed=needed,
    ), interval.p_value
