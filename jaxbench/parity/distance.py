"""The distance between tensors, and the two gates built on it (S file: neither JAX nor PyTorch).

Every gate compares dictionaries {name: array} of one kind (module outputs, gradients, weights, ...) and keeps their
order, which is the order of computation. So the difference starts at the first name over the tolerance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

TOLERANCE_FLOAT64 = 1e-9  # relative; the twins reach 1e-13 (docs/lab_log.md), one operation in float32 gives 1e-8
HUGE = 1e150  # values whose squares overflow: equal on both sides, or infinitely far apart
MASK = 1e30  # values that stand for infinity, such as a mask's float32 minimum; they have a separate norm
TINY = 1e-140  # norms below which squares underflow: values are scaled up first
SCALE_UP = 2.0**600
GAP_BITS = 13  # values more than 2^13 times smaller than every larger one have a norm of their own
NEAR = 1e-2  # relative error above which the sizes inside a tensor are not told apart: it is far off anyway
# What rounding of larger values may leave in smaller ones: ROUNDINGS epsilons, and SPREAD times their own error, which
# counts as rounding up to ROUNDED.
ROUNDINGS, SPREAD, ROUNDED = 16.0, 4.0, 1e-13
EXPONENTS = 1100  # of float64, from -EXPONENTS to EXPONENTS
CHUNK = 1 << 20  # elements whose exponents are taken at once
FLOOR = 1e-3  # share of the kind's RMS norm under which a tensor counts as zero, such as the gradient of a key bias
# If the errors of a tensor of n elements are one draw, its slack is 1 + FEW_ELEMENTS / n times as large. The RMS of n
# normal errors of one epsilon each is, except for one draw in 10^4, below 3.9, 2.4, 1.7 and 1.3 epsilons (n = 1, 4, 16,
# 64) and above 0.0, 0.1, 0.4 and 0.7; so two exact twins differ by up to 3.9, 2.3, 1.0 and 0.3 epsilons beyond the
# ratio of 1.5. Where terms cancel, the errors are larger, and the ratio of two such RMS is chance: its logarithm has a
# standard deviation of 1 / sqrt(n) (exp(DRAW_SIGMAS / sqrt(n)) = 22, 4.7, 2.2 and 1.5, versus 636, 7.3, 2.3 and 1.5
# for the 99.9 % quantiles of sqrt(F(n, n)); the ratio of two scalars is Cauchy distributed and has no bound).
FEW_ELEMENTS = 4.0
DRAW_SIGMAS = 3.1
ERROR_RATIO = 1.5  # allowed ratio of two backends' errors; medians over positions are 1.0 to 1.3 (docs/lab_log.md)
MACHINE_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}


class Entry(NamedTuple):
    """Distance of one tensor from its reference."""

    name: str
    error: float  # relative 2-norm; inf where a value is not finite or a shape differs
    tolerance: float  # largest error that passes

    @property
    def passed(self) -> bool:
        """True if the error is within the tolerance."""
        return self.error <= self.tolerance

    @property
    def badness(self) -> float:
        """Sort key of the worst tensor: the error."""
        return self.error


class RatioEntry(NamedTuple):
    """Errors of two backends against one float64 reference."""

    name: str
    error: float  # of the first backend, relative 2-norm
    other_error: float  # of the second
    slack: float  # c * eps, absolute
    ratio: float = ERROR_RATIO  # largest allowed

    @property
    def limit(self) -> float:
        """Largest error that the smaller of the two allows."""
        return self.ratio * min(self.error, self.other_error) + self.slack

    @property
    def passed(self) -> bool:
        """True if neither error is more than the ratio times the other plus the slack; two infinite ones never pass."""
        largest = max(self.error, self.other_error)
        return bool(np.isfinite(largest) and largest <= self.limit)

    @property
    def badness(self) -> float:
        """Sort key of the worst tensor: its larger error over the limit that the smaller allows."""
        return max(self.error, self.other_error) / max(self.limit, np.finfo(float).tiny)


class Comparison(NamedTuple):
    """Every tensor of one kind, in the order of computation: distances, or errors of two backends."""

    kind: str
    entries: tuple[Entry, ...] | tuple[RatioEntry, ...]

    @property
    def passed(self) -> bool:
        """True if every tensor passes."""
        return all(entry.passed for entry in self.entries)

    @property
    def worst(self) -> Entry | RatioEntry | None:
        """The worst tensor; None if there are no tensors."""
        return max(self.entries, key=lambda entry: entry.badness, default=None)

    @property
    def first_failure(self) -> Entry | RatioEntry | None:
        """First tensor that does not pass; None if all pass."""
        return next((entry for entry in self.entries if not entry.passed), None)


def norm_floor(reference: Mapping[str, Any]) -> float:
    """Return the norm under which a tensor counts as zero: FLOOR times the root mean square of the tensors' 2-norms.

    Infinities, and values above MASK, are left out.
    """
    squares = [float(np.sum(np.square(_small(_wide(value))))) for value in reference.values()]
    return FLOOR * float(np.sqrt(np.mean(squares))) if squares else 0.0


def relative_error(value: Any, reference: Any, *, floor: float = 0.0) -> float:
    """Relative error ||value - reference|| / max(||reference||, floor); 0 for equal tensors, inf where undefined.

    Infinities (and values above HUGE) in the same places on both sides, such as those of a mask, are equal and left out
    of both norms; one on only one side, and NaN on either side, make the error infinite. Values above MASK on either
    side are compared among themselves, without the floor, so that they do not hide errors of other values.
    """
    return _error(value, reference, floor, _relative)


def error_by_size(value: Any, reference: Any, *, floor: float = 0.0) -> float:
    """Relative error, or that of a class of sizes if it is larger: large values do not hide errors of small ones.

    Classes are the values between gaps of GAP_BITS in their sizes, such as a mask of -1e9 and what it leaves, or
    columns in different units.
    """
    return _error(value, reference, floor, _by_size)


def _error(value: Any, reference: Any, floor: float, of_finite: Callable[..., float]) -> float:
    """Relative error, with `of_finite` for the values that are neither infinite nor masks."""
    wide, wide_reference = _wide(value), _wide(reference)
    if wide.shape != wide_reference.shape:
        return float("inf")
    if not (_is_below(wide, HUGE) and _is_below(wide_reference, HUGE)):
        kept = ~((wide == wide_reference) & (np.abs(wide_reference) > HUGE))
        wide, wide_reference = wide[kept], wide_reference[kept]
        if not (_is_below(wide, HUGE) and _is_below(wide_reference, HUGE)):
            return float("inf")
    if _is_below(wide, MASK) and _is_below(wide_reference, MASK):
        return of_finite(wide, wide_reference, floor)
    is_mask = (np.abs(wide) > MASK) | (np.abs(wide_reference) > MASK)
    masks = _relative(wide[is_mask], wide_reference[is_mask], 0.0)
    return max(masks, of_finite(wide[~is_mask], wide_reference[~is_mask], floor))


def _by_size(value: np.ndarray, reference: np.ndarray, floor: float) -> float:
    """Largest relative error of the whole and of each class of sizes; rounding of larger values is none of a class."""
    whole = _relative(value, reference, floor)
    limits = size_limits(value, reference) if 0.0 < whole < NEAR else []
    if not limits:
        return whole
    size, upper, noise, errors = np.maximum(np.abs(value), np.abs(reference)), np.inf, 0.0, [whole]
    for lower in (*limits, 0.0):
        is_here = (size >= lower) & (size < upper)
        mine, wanted, upper = value[is_here], reference[is_here], lower
        if np.linalg.norm(mine - wanted) > noise * np.sqrt(mine.size):
            errors.append(_relative(mine, wanted, floor))
        if not (mine.size > 1 and np.all(mine == wanted.flat[0]) and np.all(wanted == wanted.flat[0])):  # not a mask
            rounding = ROUNDINGS * MACHINE_EPSILON["float64"] + SPREAD * min(_relative(mine, wanted, 0.0), ROUNDED)
            noise = max(noise, rounding * float(size[is_here].max()))
    return max(errors)


def size_limits(*tensors: np.ndarray) -> list[float]:
    """Return the smallest sizes above gaps of more than GAP_BITS, descending; empty where all values are of one size.

    The size of an element is the largest absolute value that any of the tensors (finite, of one shape) has there.
    """
    is_used, flat = np.zeros(2 * EXPONENTS, bool), [x.reshape(-1) for x in tensors]
    for start in range(0, flat[0].size, CHUNK):
        size = functools.reduce(np.maximum, (np.abs(x[start : start + CHUNK]) for x in flat))
        is_used[np.frexp(size[size > 0.0])[1] + EXPONENTS] = True
    used = np.flatnonzero(is_used)
    above = used[1:][np.diff(used) > GAP_BITS]
    return [2.0 ** (int(exponent) - EXPONENTS - 1) for exponent in above[::-1]]  # frexp: 2^(e-1) <= size < 2^e


def _relative(value: np.ndarray, reference: np.ndarray, floor: float) -> float:
    apart, wanted, up = (value - reference).ravel(), reference.ravel(), 1.0
    difference, scale = float(np.linalg.norm(apart)), float(np.linalg.norm(wanted))
    if difference < TINY:
        if not apart.any():
            return 0.0
        up, difference = SCALE_UP, float(np.linalg.norm(apart * SCALE_UP))
        scale = scale * up if scale >= TINY else float(np.linalg.norm(wanted * up))
    scale = max(scale, floor * up)
    error = difference / scale if scale > 0.0 else float("inf")
    return error if np.isfinite(error) else float("inf")


def compare(
    values: Mapping[str, Any],
    reference: Mapping[str, Any],
    *,
    kind: str,
    tolerance: float = TOLERANCE_FLOAT64,
    widen: Mapping[str, float] | None = None,
    has_floor: bool = True,
) -> Comparison:
    """Compute distances of tensors of one kind from their references, by name, in the references' order.

    Args:
      values: by name.
      reference: the values that they are compared with.
      kind: name of the comparison.
      tolerance: largest error that passes.
      widen: added to a tensor's tolerance, its own repeat error; 0 for tensors not named.
      has_floor: a tensor much smaller than the others may hold noise of their size (gradients). False: every tensor is
        judged by itself, such as the outputs of a model, whose magnitudes are unrelated.

    Raises:
      ValueError: the names differ; the message lists them.
    """
    check_names(values, reference, kind=kind)
    floor = norm_floor(reference) if has_floor else 0.0
    entries = []
    for name, wanted in reference.items():
        allowed = tolerance + (widen or {}).get(name, 0.0)
        entries.append(Entry(name, error_by_size(values[name], wanted, floor=floor), allowed))
    return Comparison(kind, tuple(entries))


def compare_errors(
    values: Mapping[str, Any],
    other_values: Mapping[str, Any],
    reference: Mapping[str, Any],
    *,
    kind: str,
    dtype: str,
    slack_epsilons: float,
    is_single_draw: bool = False,
) -> Comparison:
    """Compare two backends' errors against a float64 reference: each at most ERROR_RATIO x the other + c * eps.

    A tensor that counts as zero (norm under the floor, such as the gradient of a key bias) holds only rounding errors
    of the tensors around it; its slack is c * eps of the kind's RMS norm. With is_single_draw every tensor is judged by
    itself, and one with few elements has more slack and a larger ratio, because its error is chance.

    Raises:
      ValueError: the names differ; the message lists them.
    """
    check_names(values, reference, kind=kind)
    check_names(other_values, reference, kind=kind)
    slack = slack_epsilons * MACHINE_EPSILON[dtype]
    floor = 0.0 if is_single_draw else norm_floor(reference)
    entries = []
    for name, wanted in reference.items():
        given = [each[name] for each in (values, other_values)]
        if is_single_draw:
            *given, wanted = _without_masks(*given, wanted)
        errors = (relative_error(value, wanted, floor=floor) for value in given)
        is_zero = float(np.linalg.norm(_small(_wide(wanted)))) < floor
        share, ratio = 1.0 / FLOOR if is_zero else 1.0, ERROR_RATIO
        if is_single_draw:
            size = max(np.size(wanted), 1)
            share, ratio = 1.0 + FEW_ELEMENTS / size, max(ERROR_RATIO, float(np.exp(DRAW_SIGMAS / np.sqrt(size))))
        entries.append(RatioEntry(name, *errors, share * slack, ratio))
    return Comparison(kind, tuple(entries))


def averaged(draws: Sequence[Comparison]) -> Comparison:
    """Geometric means of the errors of several draws (batches), tensor by tensor; kind and slack are the first's.

    If few terms enter a tensor, the rounding error of one batch's gradient is a single draw: two exact twins then
    differ by a factor of 1.6 from batch to batch (one standard deviation, gate kernels of a neural memory in
    bfloat16), in either direction. A systematic factor between two backends remains in the mean. Errors of 0 count as
    the slack.
    """
    entries = []
    for rows in zip(*(draw.entries for draw in draws), strict=True):
        errors = np.array([(row.error, row.other_error) for row in rows])
        means = np.exp(np.mean(np.log(np.where(errors > 0, errors, rows[0].slack)), axis=0))
        entries.append(RatioEntry(rows[0].name, *means.tolist(), rows[0].slack))
    return Comparison(draws[0].kind, tuple(entries))


def check_names(values: Mapping[str, Any], reference: Mapping[str, Any], *, kind: str) -> None:
    """Check that two dictionaries hold the same names.

    Raises:
      ValueError: they do not; the message lists what is missing and what is unexpected.
    """
    missing = sorted(reference.keys() - values.keys())
    unexpected = sorted(values.keys() - reference.keys())
    if missing or unexpected:
        raise ValueError(f"parity of {kind}: missing {missing}, unexpected {unexpected}")


def _without_masks(*tensors: Any) -> list[np.ndarray]:
    """Tensors as vectors, without values that stand for the same infinity in all; float64 compared them exactly.

    A mask's float32 minimum is infinity in bfloat16, or that type's own minimum.
    """
    wide = [widest(x) for x in tensors]
    if any(np.iscomplexobj(x) or x.shape != wide[0].shape for x in wide):
        return wide
    is_mask = functools.reduce(np.logical_and, (x > MASK for x in wide))
    is_mask |= functools.reduce(np.logical_and, (x < -MASK for x in wide))
    return [x[~is_mask] for x in wide] if is_mask.any() else wide


def _is_below(x: np.ndarray, limit: float) -> bool:
    """Return True if every absolute value is at most the limit; NaN is not."""
    return not x.size or bool(max(x.max(), -x.min()) <= limit)


def _small(x: np.ndarray) -> np.ndarray:
    """Values that enter a norm, as a vector: all but infinities and those above MASK; NaN is kept."""
    x = x.ravel()
    return x if _is_below(x, MASK) else x[~(np.abs(x) > MASK)]


def _wide(value: Any) -> np.ndarray:
    """Values in float64, complex ones as (real, imaginary) along an additional axis: the norms are the same."""
    x = widest(value)
    return np.stack((x.real, x.imag), axis=-1) if np.iscomplexobj(x) else x


def widest(value: Any) -> np.ndarray:
    """Values in float64, or in complex128."""
    x = np.asarray(value)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64, copy=False)
