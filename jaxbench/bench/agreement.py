"""Check whether the arms of a comparison generate the same output: first differences, near ties, messages (S file).

In float32 two programs that compute the same function may round a logit differently, and where the two best tokens are
that close either is right. So the first difference of a row is excused if both arms' tokens at that step are less than
ten times the measured error of the logits below the best one. The error itself must be small enough to be rounding, or
a wrong program would excuse itself.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxbench.bench import labels
from jaxbench.bench.arms import arm_table
from jaxbench.measure.records import Record

# Relative, between arms' losses of a step; autocast and all-bfloat16 activations round at different places.
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
# Largest relative 2-norm of two arms' float32 logit difference that counts as rounding. On a CPU 2e-7 (tiny model) is
# seen. The same on every device: no arm computes float32 products in a narrower type (run.fair_settings).
LOGIT_TOLERANCE = 1e-4
TIE_FACTOR = 10.0  # a token less than this many errors below the best ties with it


def differences(reference: list[list], other: list[list], *, tolerance: float = 0.0) -> list[list[int]]:
    """Return [row, step] of the first unequal token of each row (loss: relative difference above `tolerance`)."""
    found = []
    for row, (left, right) in enumerate(zip(reference, other, strict=False)):
        # written so that a NaN loss counts as different
        unequal = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if not abs(a - b) <= tolerance * abs(a))
        step = next(unequal, None if len(left) == len(right) else min(len(left), len(right)))
        found += [] if step is None else [[row, step]]
    return found if len(reference) == len(other) else [*found, [min(len(reference), len(other)), 0]]


def deciding_difference(
    reference: list[list], other: list[list], places: Sequence[Sequence[int]],
    logits_at: Callable[[int, int], Sequence[Sequence[float]] | None] | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the first of some differences that is no near tie, else the first: its place, tokens and `near_tie`.

    places: see `differences`. logits_at: of both arms at a place; None, it or its result = no difference is excused.
    """
    excused: list[dict[str, Any]] = []
    for row, step in places:
        detail: dict[str, Any] = {"first_difference": [row, step]}
        if row >= min(len(reference), len(other)) or step >= min(len(reference[row]), len(other[row])):
            return detail
        tokens = reference[row][step], other[row][step]
        detail |= {"token": tokens[1], "reference_token": tokens[0]}
        logits = None if logits_at is None else logits_at(row, step)
        if logits is None:
            return detail
        detail |= near_tie(*logits, tokens=tokens)
        if not detail["near_tie"]:
            return detail
        excused.append(detail)
    return excused[0]


def digest(tokens: list[list]) -> str:
    """Return a short sha256 of an arm's output."""
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12]


def near_tie(reference: Sequence[float], other: Sequence[float], *, tokens: tuple[int, int]) -> dict[str, float | bool]:
    """Compare two arms' logits [V] at the step at which their tokens first differ; tokens: those that they gave.

    Returns the reference's top-two margin, how far the worse of the tokens is below the reference's best, the largest
    difference of a logit, the relative 2-norm of the difference, and `near_tie`: both tokens are less than TIE_FACTOR
    errors below the best, and the error is small enough to be rounding.
    """
    left, right = np.asarray(reference, np.float64), np.asarray(other, np.float64)
    second, first = np.sort(left)[-2:]
    below = max(float(first - left[token]) if 0 <= token < left.size else float("inf") for token in tokens)
    error = float(np.abs(left - right).max())
    relative = float(np.linalg.norm(left - right) / np.linalg.norm(left))
    is_tie = relative <= LOGIT_TOLERANCE and below < TIE_FACTOR * error
    detail = {"margin": float(first - second), "token_margin": below, "logit_error": error}
    return detail | {"logit_error_relative": relative, "near_tie": bool(is_tie)}


def failures(records: Sequence[Record]) -> list[str]:
    """Return one sentence for each float32 output that differs from the reference's by more than near ties."""
    return [
        f"tokens: {_describe_difference(record)}"
        for record in records
        if record.metric == "tokens"
        and record.value == 0.0
        and record.workload.dtype == "float32"
        and record.arm not in arm_table.names("has_own_weights")
        and not record.detail.get("near_tie")
    ]


def notes(records: Sequence[Record]) -> list[str]:
    """Return one sentence per workload: every arm gave the same output, or which arms differ, and where."""
    groups: dict[str, dict[str, Record]] = defaultdict(dict)
    for record in records:
        if record.metric == "tokens" and record.status == "ok":
            groups[record.workload.label()][record.arm] = record  # of the last launch
    sentences = []
    for label, arms in groups.items():
        if len(arms) < 2:
            continue
        parting = [_describe_difference(record) for record in arms.values() if record.value == 0.0]
        equal = ", ".join(labels.arm(name) for name, record in arms.items() if record.value != 0.0)
        sentences += [f"{label}: equal on {equal}" if not parting else f"{label}: differs: {'; '.join(parting)}"]
    return sentences


def _describe_difference(record: Record) -> str:
    """Say where an arm's output differs from the reference's (see launch.py); prompt and step count from 0."""
    detail = record.detail
    (row, step), reference = detail["first_difference"], detail["reference"]
    place = f"{record.arm} from {reference} on {record.workload.label()}"
    if record.workload.kind == "train":
        own, other = (_number(detail[name], ".6g") for name in ("loss", "reference_loss"))
        which = f"loss after {step} update{'s' * (step > 1)}" if step else "first loss"
        return f"{place}: {which} {own}, {reference}'s {other}"
    text = f"{place} at prompt {row} step {step}"
    if "token" in detail:
        text += f": token {detail['token']}, {reference}'s {detail['reference_token']}"
    if "margin" in detail:
        kind = "a near tie" if detail["near_tie"] else "no tie"
        margin, error = (_number(detail[name], ".1e") for name in ("margin", "logit_error"))
        text += f" ({kind}: top-two margin {margin}, logits differ by {error}"
        if (below := detail.get("token_margin")) and below != detail["margin"]:
            text += f", the worse token is {_number(below, '.1e')} below the best"
        text += ")"
    return text


def _number(value: float | None, form: str) -> str:
    """Format a number of a record, in which null represents NaN or infinity."""
    return "no number" if value is None or not np.isfinite(value) else f"{value:{form}}"
