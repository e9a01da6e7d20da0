"""Contents of the report, gathered once from records and the run's folder (S file)."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench import outputs
from jaxbench.bench import agreement, labels, summary
from jaxbench.bench.arms import arm_table
from jaxbench.bench.suite import Suite
from jaxbench.bench.summary import Row
from jaxbench.measure.records import LAUNCH_DONE, LOOK, Record, Workload


class View(NamedTuple):
    """Everything that tables, page, picture, CSV and scalars are made from."""

    rows: list[Row]
    records: list[Record]
    arms: list[str]  # in the suite's order, those with any record
    baseline: str
    parity: dict[str, dict[str, Any]]  # arm -> the parity record's detail
    environment: dict[str, Any]
    suite: Suite
    config_id: str
    agreement: list[str]  # one sentence per workload
    drift: float  # share by which the control loop's time changed
    looks: tuple[int, ...]  # launches that each report of the run was of, this one last; empty = not known

    @property
    def model(self) -> str:
        """Display name of the model."""
        return "SmolLM2-135M-Instruct" if self.suite.model == "default" else self.suite.model


class TpuRow(NamedTuple):
    """One program on one slice: the figures by metric without the `tpu_` prefix, and their details."""

    topology: str
    label: str
    short: str
    figures: dict[str, float]
    details: dict[str, dict[str, Any]]
    problem: str  # why there are no figures


def gather(records: Sequence[Record], suite: Suite, workdir: Path) -> View:
    """Return the view of a finished or interrupted run."""
    rows = summary.rows(records, suite.verdicts)
    try:
        environment = outputs.read_json(workdir / "environment.json")
    except (OSError, ValueError):
        environment = {}
    return View(
        rows=rows,
        records=list(records),
        arms=[name for name in suite.arms if any(row.arm == name for row in rows)],
        baseline=suite.verdicts.baseline,
        parity={record.arm: record.detail for record in records if record.metric == "parity" and record.detail},
        environment=environment if isinstance(environment, dict) else {},
        suite=suite,
        config_id=next((record.config_id for record in records if record.config_id), ""),
        agreement=agreement.notes(records),
        drift=summary.control_drift(records),
        looks=next((tuple(r.detail["launches"]) for r in records if r.metric == LOOK), ()),
    )


def find(view: View, metrics: Sequence[str]) -> list[Row]:
    """Return the rows of these metrics, ordered by metric, then workload, then arm."""
    order = {name: index for index, name in enumerate(view.arms)}
    places = {group: index for index, group in enumerate(by_workload(view.rows))}
    return sorted(
        (row for row in view.rows if row.metric in metrics and row.arm in order),
        key=lambda row: (metrics.index(row.metric), places[row.metric, row.workload], order[row.arm]),
    )


def by_workload(rows: Sequence[Row]) -> dict[tuple[str, Workload], list[Row]]:
    """Group rows by metric and workload, in their order."""
    groups: dict[tuple[str, Workload], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.metric, row.workload), []).append(row)
    return groups


def tpu_rows(view: View) -> list[TpuRow]:
    """Return one row for each program compiled for a slice, and one for each slice that failed."""
    groups: dict[tuple, TpuRow] = {}
    for record in view.records:
        if not record.metric.startswith("tpu") or (record.metric == "tpu" and record.status == "ok"):
            continue
        label = labels.full(record.workload)
        short = f"{record.workload.kind} {labels.short(record.workload)}".removeprefix("none").strip()
        row = groups.setdefault((record.device, label), TpuRow(record.device, label, short, {}, {}, record.reason))
        name = record.metric.removeprefix("tpu_")
        row.details[name] = record.detail
        if record.value is not None:
            row.figures[name] = record.value
    return list(groups.values())


def against_fastest(view: View) -> list[tuple[float, Row, Row]]:
    """Return Flax's ratio to the fastest PyTorch arm of each speed row with both rows, the worst ratio first.

    Ratios are of medians and have no interval: which arm is fastest is chosen after the fact, in PyTorch's favour.
    Arms with narrower weights, or with jaxbench's own kernels, are left out.
    """
    own = {row[:2]: row for row in view.rows if row.arm == "flax" and row.metric in summary.SPEED and row.value}
    found: dict[tuple[str, Workload], tuple[float, Row, Row]] = {}
    for row in view.rows:
        arm = arm_table.ARMS.get(row.arm)
        if arm is None or arm.library != "PyTorch" or arm.has_own_weights or arm_table.is_native(row.arm):
            continue
        if (flax := own.get(row[:2])) is not None and row.value:
            ratio = flax.value / row.value if summary.COMPARED[row.metric] else row.value / flax.value
            found[row[:2]] = min(found.get(row[:2], (float("inf"), flax, row)), (ratio, flax, row), key=lambda x: x[0])
    return sorted(found.values(), key=lambda each: each[0])


def behind_notes(view: View) -> list[str]:
    """Return one sentence with the speed rows in which a PyTorch arm is faster than Flax, the worst first, if any."""
    rows = [
        f"{ratio:.2f} of {labels.arm(rival.arm)} in {labels.heading(rival.metric, rival.workload)}"
        for ratio, _, rival in against_fastest(view) if ratio < 1
    ]  # fmt: skip
    return [f"Flax is behind the fastest PyTorch arm (ratios of medians, no verdicts): {'; '.join(rows)}"] * bool(rows)


def verdict_counts(view: View) -> dict[str, int]:
    """Count the speed rows in which jaxbench's own arms were faster, slower or undecided versus the baseline."""
    own = arm_table.names("is_judged")
    counts = collections.Counter(row.verdict for row in view.rows if row.metric in summary.SPEED and row.arm in own)
    return {verdict: counts[verdict] for verdict in ("faster", "slower", "undecided")}


def missing(view: View) -> list[Row]:
    """Return the rows without a value: skipped or failed, with their reason."""
    return [row for row in view.rows if row.value is None and row.reason]


def lost_launches(view: View) -> list[str]:
    """Return sentences: the launches without a rate that the arm has in others, which its intervals thus leave out."""
    finished = {record.launch for record in view.records if record.metric == LAUNCH_DONE}
    reasons: dict[tuple[str, int], str] = {}
    for record in view.records:
        if record.status != "ok":
            reasons.setdefault((record.arm, record.launch), record.reason)
    lost: dict[tuple[str, int], list[Row]] = {}
    for row in find(view, summary.SPEED):
        most = view.suite.rounds.fewer.get(row.arm, max(finished, default=0))
        for launch in sorted(finished - set(row.numbers)) if row.value is not None else ():
            if launch <= most:
                lost.setdefault((row.arm, launch), []).append(row)
    return [
        f"{labels.arm(arm)}, launch {launch} lacks {labels.heading(rows[0].metric, rows[0].workload)}"
        + (f", and {len(rows) - 1} more" if len(rows) > 1 else "")
        + f", so that its rows are of fewer launches ({reasons.get((arm, launch), 'no reason is recorded')})"
        for (arm, launch), rows in lost.items()
    ]


def look_notes(view: View) -> list[str]:
    """Return a sentence on verdicts of a run to which launches were added after a report; none if this is the first."""
    if len(view.looks) < 2:
        return []
    before, now = ", ".join(map(str, view.looks[:-1])), view.looks[-1]
    share = 100 * (1 - view.suite.verdicts.confidence)
    several = min(share * len(view.looks), 100.0)
    return [
        f"launches were added after a report: the run was reported after {before} launches, and now after {now}. "
        "Verdicts hold for a number of launches that was fixed before. If the added ones depended on what a report "
        f"said, the chance of a false verdict in any of {len(view.looks)} reports is up to {several:.0f} %, not "
        f"{share:.0f} %"
    ]


def undecided(view: View) -> list[Row]:
    """Return the compared rows whose verdict is "undecided"."""
    return [row for row in view.rows if row.verdict == "undecided"]


def product_notes(view: View) -> list[str]:
    """Return sentences: which arms used plain products for single rows, in how many launches; none if all packed."""
    taken: dict[tuple[str, str], dict[int, str]] = {}  # by launch
    for record in view.records:
        if "single_row" in record.detail:
            launches = taken.setdefault((record.arm, record.workload.dtype), {})
            launches[record.launch] = record.detail["single_row"]
    return [
        f"{labels.arm(arm)}, {dtype}: single rows took plain products in {plain} of {len(launches)} launches"
        for (arm, dtype), launches in taken.items()
        if (plain := list(launches.values()).count("plain"))
    ]


def program_notes(view: View) -> list[str]:
    """Return sentences: how many FLOPs and bytes figures two of jaxbench's own arms share exactly, and which differ."""
    values: dict[tuple, dict[str, float]] = {}
    for row in view.rows:
        if row.metric in ("flops", "temp_bytes") and row.value is not None:
            values.setdefault((row.metric, row.workload), {})[row.arm] = row.value
    notes = []
    for own in itertools.combinations(arm_table.names("is_judged"), 2):
        pairs = {key: [arms[arm] for arm in own] for key, arms in values.items() if arms.keys() >= set(own)}
        if not pairs:
            continue
        (first, second), same = map(str.capitalize, own), sum(a == b for a, b in pairs.values())
        notes.append(
            f"{first} and {second} compile to programs of equal FLOPs and temp bytes: {same} of {len(pairs)} figures "
            "agree"
        )
        notes += [
            f"{labels.METRICS[metric]}, {labels.full(workload)}: {first} {a:.0f}, {second} {b:.0f}"
            for (metric, workload), (a, b) in pairs.items()
            if a != b
        ]
    return notes


def headline(view: View) -> list[tuple[str, str, str]]:
    """Return up to five (figure, what, remark).

    Flax's decode (else train) rate, its ratio to HF, its worst one to PyTorch's fastest arm, parity, verdicts.
    """
    cards = []
    decode = [row for row in view.rows if row.metric == "decode_tokens_per_s" and row.arm == "flax" and row.value]
    if decode:
        first = decode[0]
        shown = labels.full(first.workload, with_kind=False)
        cards.append((f"{labels.significant(first.value)} tokens/s", "Flax decode", shown))
        peer = next((r for r in view.rows if r[:2] == first[:2] and r.arm == "transformers" and r.value), None)
        if peer:
            cards.append((f"{first.value / peer.value:.2f}×", "Hugging Face generate", f"Flax decode, {shown}"))
    steps = [row for row in view.rows if row.metric == "train_tokens_per_s" and row.arm == "flax" and row.value]
    if steps and not decode:
        shown = labels.full(steps[0].workload, with_kind=False)
        cards.append((f"{labels.significant(steps[0].value)} tokens/s", "Flax train step", shown))
    if fastest := against_fastest(view):
        ratio, _, rival = fastest[0]
        where = f"{labels.heading(rival.metric, rival.workload)}; {labels.arm(rival.arm)}"
        cards.append((f"{ratio:.2f}×", "PyTorch's fastest arm, worst row", where))
    if view.parity:
        passed = "passed" if all(detail.get("passed") for detail in view.parity.values()) else "FAILED"
        shown = f"{max(float(detail.get('worst', 'nan')) for detail in view.parity.values()):.1e}"
        cards.append((shown, f"float64 proof {passed}", "worst relative difference to PyTorch of any module"))
    counts = verdict_counts(view)
    if sum(counts.values()):
        text = f"{counts['faster']} / {counts['slower']} / {counts['undecided']}"
        cards.append((text, "faster / slower / undecided", f"JAX arms against {labels.arm(view.baseline)}"))
    return cards
