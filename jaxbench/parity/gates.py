"""Gates of a parity run; each turns arrays of two backends into pass or fail, with the worst tensor (S file).

P1 float64 equality, P2 error ratios of float32 and bfloat16, P3 precision of products, measured, P4 first divergence
and blame, P5 weight conversion, P6 shared randomness, P7 training curves, P8 cached decoding, P9 mutation score
(mutation.py), P10 repeatability, P11 outside oracles (oracles/). Each Gate is one row of the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.parity import capture, distance

# Slack c of the ratio gate, in epsilons of the type: twice the largest measured excess of one backend's error over 1.5x
# the other's, over all cases (outputs 0.1 in float32 and 0.4 in bfloat16, gradients 2.0 and 0.2), but at least 1.
# Gradients of biases are sums of few cancelling terms, and the two backends add them in different orders.
SLACK_EPSILONS = {
    ("outputs", "float32"): 1.0,
    ("outputs", "bfloat16"): 1.0,
    ("gradients", "float32"): 4.0,
    ("gradients", "bfloat16"): 1.0,
}
CURVE_EPSILONS = 2.0  # rounding error of the loss itself, a mean of few terms
NOISE_BAND = 4.0  # a float32 curve may deviate from the reference by this multiple of the effect of one-ulp changes


class Gate(NamedTuple):
    """One check's outcome."""

    id: str  # P1 .. P11
    what: str
    passed: bool
    error: float  # largest error, in the unit of the limit
    limit: float
    where: str = ""  # first name over the limit, or the worst one
    note: str = ""


def from_comparison(gate_id: str, comparison: distance.Comparison, *, what: str | None = None) -> Gate:
    """Make the gate of one comparison; a failure names the first tensor over its tolerance."""
    shown = comparison.first_failure or comparison.worst
    error, limit, where = (shown.error, shown.tolerance, shown.name) if shown else (0.0, distance.TOLERANCE_FLOAT64, "")
    return Gate(gate_id, what or comparison.kind, comparison.passed, error, limit, where)


def from_ratio(comparison: distance.Comparison, *, what: str) -> Gate:
    """Gate P2 of one error-ratio comparison."""
    shown = comparison.first_failure or comparison.worst
    if shown is None:
        return Gate("P2", what, True, 0.0, 0.0)
    low, high = sorted((shown.error, shown.other_error))
    note = f"errors {shown.error:.1e} and {shown.other_error:.1e} against float64"
    return Gate("P2", what, comparison.passed, high, distance.ERROR_RATIO * low + shown.slack, shown.name, note)


def blame(local: Sequence[capture.LocalError], *, tolerance: float = distance.TOLERANCE_FLOAT64) -> Gate:
    """Gate P4: no module computes anything differently by itself."""
    culprit = capture.blame(local, tolerance=tolerance)
    shown = culprit or max(local, key=lambda entry: entry.error)
    what = "every module's own code, given the twin's inputs"
    return Gate("P4", what, culprit is None, shown.error, tolerance, f"{shown.module} ({shown.part})")


def conversion(side: Any, other: Any, params: Mapping[str, np.ndarray]) -> list[Gate]:
    """Gates P5: weights go params -> side -> other -> side unchanged, and wrong sets are refused."""
    original = side.get_params()
    differing = set(_differing(original, params))
    other.load_params(original)
    travelled = other.get_params()
    differing |= set(_differing(travelled, original))
    side.load_params(travelled)
    del travelled  # gigabytes with a real model in float64
    differing |= set(_differing(side.get_params(), original))
    trip = Gate(
        "P5", "weights: round trip", not differing, float(len(differing)), 0.0, ", ".join(sorted(differing)[:3])
    )
    accepted = [f"{each.name}: {case}" for each in (side, other) for case in _accepted(each, original)]
    strict = Gate("P5", "weights: strictness", not accepted, float(len(accepted)), 0.0, ", ".join(accepted))
    return [trip, strict]


def _differing(values: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> list[str]:
    """Names on only one side, or whose arrays differ after a cast to the first side's type."""
    shared = values.keys() & reference.keys()
    unequal = [name for name in shared if not np.array_equal(values[name], reference[name].astype(values[name].dtype))]
    return sorted(unequal) + sorted(values.keys() ^ reference.keys())


def _accepted(side: Any, params: Mapping[str, np.ndarray]) -> list[str]:
    """Kinds of wrong parameters that a side loads without an error: missing, unused, misshapen."""
    first, *_ = params
    wrong = {
        "missing": {name: value for name, value in params.items() if name != first},
        "unused": dict(params) | {"no_such.kernel": np.zeros(1)},
        "misshapen": dict(params) | {first: np.zeros((*params[first].shape, 1))},
    }
    accepted = []
    for case, values in wrong.items():
        try:
            side.load_params(values)
            accepted.append(case)
        except ValueError as error:
            if ("no_such.kernel" if case == "unused" else first) not in str(error):
                accepted.append(f"{case} (unnamed)")
    return accepted


def sampling(tokens: Mapping[str, np.ndarray]) -> Gate:
    """Gate P6: two backends sample the same tokens, compared exactly; [B new tokens] int32 by backend."""
    (name, first), (other, second) = tokens.items()
    if first.shape != second.shape:
        return Gate("P6", "sampled tokens", False, float("inf"), 0.0, f"{name} {first.shape}, {other} {second.shape}")
    differing = np.argwhere(first != second)
    where = f"row {differing[0][0]}, step {differing[0][1]}" if len(differing) else ""
    return Gate("P6", "sampled tokens", not len(differing), float(len(differing)), 0.0, where, f"{first.size} tokens")


def training_noise(
    losses: np.ndarray, other: np.ndarray, perturbed: Sequence[np.ndarray], *, reference: np.ndarray, dtype: str
) -> Gate:
    """Gate P7: two training curves differ by no more than one-ulp changes of the initial weights move one of them.

    The band is NOISE_BAND times the largest gap so far, plus the rounding error of the loss itself.

    Args:
      losses: of every step, nats per token, by the tested backend.
      other: the same by the other backend.
      perturbed: curves of `other` from weights moved by one unit in the last place.
      reference: curve that the rounding error is relative to.
      dtype: of the steps.
    """
    spread = np.max([np.abs(curve - other) for curve in perturbed], axis=0)
    band = NOISE_BAND * np.maximum.accumulate(spread)
    band = band + CURVE_EPSILONS * distance.MACHINE_EPSILON[dtype] * np.abs(reference)
    share = np.abs(losses - other) / band
    step = int(np.argmax(share))
    note = f"gap {abs(losses[step] - other[step]):.1e}, band {band[step]:.1e} nats"
    what = f"training curve, {dtype}: gap within noise"
    return Gate("P7", what, bool(np.all(share <= 1.0)), float(share[step]), 1.0, f"step {step}", note)


def decoding(
    side: capture.Decoding, other: capture.Decoding, *, names: tuple[str, str], tolerance: float
) -> list[Gate]:
    """Gates P8: cached decoding equals the full forward pass on each backend, and both backends agree."""
    rows = []
    for name, result in zip(names, (side, other), strict=True):
        rows.append(_by_position(f"{name}: cached decode = full call", result.incremental, result.full, tolerance))
    rows.append(_by_position("cached decode, both backends", side.incremental, other.incremental, tolerance))
    return rows


def _by_position(what: str, values: np.ndarray, reference: np.ndarray, tolerance: float) -> Gate:
    """Gate P8 of logits [B T V], position by position."""
    steps = range(reference.shape[1])
    by_step = {f"position {t}": reference[:, t] for t in steps}
    result = distance.compare({f"position {t}": values[:, t] for t in steps}, by_step, kind=what, tolerance=tolerance)
    return from_comparison("P8", result)


def repeatability(
    first: capture.Trace, second: capture.Trace, *, name: str
) -> tuple[Gate, dict[str, dict[str, float]]]:
    """Gate P10, and a backend's repeat errors by kind and tensor, by which tolerances are widened.

    The gate fails only if the repeat error would hide a bug: above the float64 tolerance.
    """
    widen: dict[str, dict[str, float]] = {}
    for kind in ("outputs", "output_gradients", "gradients"):
        values, reference = getattr(second, kind), getattr(first, kind)
        if reference:
            entries = distance.compare(values, reference, kind=kind).entries
            widen[kind] = {entry.name: entry.error for entry in entries}
    errors = {f"{kind} {tensor}": error for kind, tensors in widen.items() for tensor, error in tensors.items()}
    where = max(errors, key=errors.__getitem__)
    passed = errors[where] <= distance.TOLERANCE_FLOAT64
    note = "bit for bit" if errors[where] == 0.0 else "tolerances widened by each tensor's repeat error"
    limit = distance.TOLERANCE_FLOAT64
    return Gate(
        "P10", f"{name} repeats itself", passed, errors[where], limit, where if errors[where] else "", note
    ), widen


def oracle(
    what: str,
    values: Mapping[str, Any],
    reference: Mapping[str, Any],
    *,
    source: str,
    tolerance: float = distance.TOLERANCE_FLOAT64,
) -> Gate:
    """Gate P11: values equal, by name, those of an independent source, written by no code here; `source` names it."""
    odd = sorted(values.keys() ^ reference.keys())
    if odd:
        return Gate("P11", what, False, float(len(odd)), 0.0, ", ".join(odd[:3]), f"only on one side; {source}")
    gate = from_comparison("P11", distance.compare(values, reference, kind=what, tolerance=tolerance))
    return gate._replace(note=source)


def chance(what: str, p_values: Mapping[str, float], *, source: str, digits: float = 6.0) -> Gate:
    """Gate P11: no test statistic is as rare as one in 10**digits draws by chance; the error is -log10(p).

    A statistic that is undefined (p is NaN), such as that of values that are not finite, fails.
    """
    errors = {name: float("inf") if np.isnan(p) else -float(np.log10(max(p, 1e-300))) for name, p in p_values.items()}
    where = max(errors, key=errors.__getitem__)
    return Gate("P11", what, errors[where] <= digits, errors[where], digits, where, source)
