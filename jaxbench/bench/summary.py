"""Turn records into rows of the result table: medians over launches, ratios with intervals, verdicts (S file).

All rates and first-token times of a table are one family: their variances are moderated together
(measure/moderation.py), and a verdict must hold after Holm's correction over all of them. Load and compile times are a
second family, memory is a third. Two arms whose compiled programs have equal counts are one piece of evidence: the
later one has a ratio and no verdict.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from jaxbench.bench.arms import arm_table
from jaxbench.bench.suite import Verdicts
from jaxbench.measure import moderation, verdicts
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
PROGRAM_COUNTS = ("flops", "temp_bytes", "argument_bytes")  # of a compiled program, exact
NOT_ROWS = ("tokens", "parity", "profile")  # records of an arm that are not measurements
# Rows that "not slower than torch_ref" refers to: compile time has no counterpart in eager code.
SPEED = ("prefill_tokens_per_s", "first_token_s", "decode_tokens_per_s", "train_tokens_per_s")
# Families of metrics whose rows share a variance prior and alpha, as their launches vary alike.
FAMILIES = (SPEED, ("load_s", "compile_cold_s", "compile_warm_s"), ("peak_memory_bytes",))


class Row(NamedTuple):
    """One line of the table: a metric of an arm on a workload, over all launches."""

    metric: str
    workload: Workload
    arm: str
    value: float | None  # median over launches of the launch medians; None when every launch failed or was skipped
    unit: str
    launches: tuple[float, ...]  # launch medians, in order
    share_of_roofline: float | None  # 0..1, of the machine's measured rate; None if there is no such bound
    reason: str  # why there is no value
    verdict: str  # faster, slower, undecided, baseline, same (as an arm of equal programs), or "" (not compared)
    ratio: tuple[float, float, float] | None = None  # (point, low, high) to the baseline, > 1 is better; None = none
    log_ratios: tuple[float, ...] = ()  # one per launch, > 0 is better
    percentiles: tuple[tuple[str, float | None], ...] = ()  # of token_s: (name, value), None = too few samples
    p_value: float | None = None  # after Holm's correction over the row's family; None = in no family
    decidable: float | None = None  # of an undecided row: the smallest ratio that its launches could have decided
    numbers: tuple[int, ...] = ()  # launch numbers, one per value of `launches`


def rows(records: Sequence[Record], rules: Verdicts) -> list[Row]:
    """Return the rows of the table in the order of the records, with the verdicts of each family."""
    groups: dict[tuple[str, Workload, str], dict[int, Record]] = defaultdict(dict)
    for record in records:
        if record.arm != SUITE_ARM and record.metric not in NOT_ROWS:
            groups[record.metric, record.workload, record.arm][record.launch] = record
    repeated = _repeated_programs(groups)
    table = []
    for (metric, workload, arm), launches in groups.items():
        base = groups.get((metric, workload, rules.baseline), {})
        row = _row(metric, workload, arm, launches, base, rules)
        table.append(row._replace(verdict="same") if (workload, arm) in repeated and row.log_ratios else row)
    for metrics in FAMILIES:
        family = [i for i, row in enumerate(table) if row.log_ratios and row.metric in metrics]
        for i, row in zip(family, _judged([table[i] for i in family], rules), strict=True):
            table[i] = row
    return table


def control_drift(records: Sequence[Record]) -> float:
    """Return the share by which the control loop's time changed between launches (0.1 = 10 %)."""
    control = [record.samples for record in records if record.metric == "control_s" and record.samples]
    return verdicts.drift(control)


def _row(metric, workload, arm, launches: dict[int, Record], base: dict[int, Record], rules: Verdicts) -> Row:
    """Make one row with its log ratios, without a verdict yet."""
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
        numbers=tuple(good),
    )
    if metric == "token_s":
        pooled = [sample for record in good.values() for sample in record.samples]
        return row._replace(percentiles=tuple(verdicts.percentiles(pooled, (0.5, 0.9, 0.99)).items()))
    if metric not in COMPARED or arm == rules.baseline:
        return row
    pairs = [(good[n], base[n]) for n in good if n in base and base[n].value and base[n].status == "ok"]
    better = COMPARED[metric]
    logs = tuple(
        verdicts.log_ratio(a.samples or [a.value], b.samples or [b.value], higher_is_better=better)
        for a, b in pairs
        if a.value > 0 and b.value > 0
    )
    return row._replace(log_ratios=logs)


def _repeated_programs(groups: dict[tuple[str, Workload, str], dict[int, Record]]) -> set[tuple[Workload, str]]:
    """Return (workload, arm) of jaxbench's own arms whose compiled FLOPs and bytes equal those of an earlier arm."""
    counts: dict[tuple[Workload, str], list[float]] = defaultdict(list)
    for (metric, workload, arm), launches in groups.items():
        if metric in PROGRAM_COUNTS and arm in arm_table.names("is_judged"):
            counts[workload, arm] += [record.value for record in launches.values() if record.value is not None][-1:]
    seen: dict[Workload, list[list[float]]] = defaultdict(list)
    repeated = set()
    for (workload, arm), figures in counts.items():
        if len(figures) == len(PROGRAM_COUNTS) and figures in seen[workload]:
            repeated.add((workload, arm))
        seen[workload].append(figures)
    return repeated


def _judged(family: list[Row], rules: Verdicts) -> list[Row]:
    """Return the rows of one family with ratio, verdict and the least ratio that could have been decided."""
    intervals = moderation.intervals(
        [row.log_ratios for row in family], confidence=rules.confidence, margin=rules.margin,
        num_baselines=len({(row.metric, row.workload) for row in family}),
    )  # fmt: skip
    counted = [i for i, row in enumerate(family) if row.verdict != "same"]
    judged = verdicts.judge([intervals[i] for i in counted], confidence=rules.confidence, margin=rules.margin)
    rows = [row._replace(ratio=interval.ratio()) for row, interval in zip(family, intervals, strict=True)]
    for i, (verdict, p_value, decidable) in zip(counted, judged, strict=True):
        left = {"decidable": decidable} if verdict == "undecided" else {}
        rows[i] = rows[i]._replace(verdict=verdict, p_value=p_value, **left)
    return rows
