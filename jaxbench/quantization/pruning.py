"""Prune weights to zero: by magnitude or Wanda's score, unstructured or n:m (S file: neither JAX nor PyTorch).

    kept = pruning.smallest_fraction(pruning.scores(params), 0.5, scope="matrix")
    params = pruning.apply(params, kept)

Only kernels inside layers are pruned: embeddings, head, norms and biases stay, as in the papers named below. A mask is
a bool array of its kernel's shape, True = the weight stays. Shapes and storage do not change, so any program runs the
result like the dense model; structured.py makes models smaller instead. StepConfig.hold_zeros keeps the zeros in
training.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

SCOPES = ("matrix", "output", "global")
Masks = dict[str, Bool[np.ndarray, "I O"]]


class Count(NamedTuple):
    """How many weights are zero."""

    zeros: int
    weights: int  # of all kernels counted
    matrices: int

    @property
    def share(self) -> float:
        """Zeros over weights; 0 where there are none."""
        return self.zeros / self.weights if self.weights else 0.0


def prunable(names: Iterable[str]) -> list[str]:
    """Names of the kernels that pruning acts on: those inside layers."""
    return [name for name in names if re.fullmatch(r"layers\.\d+\..*\.kernel", name)]


def scores(
    params: Mapping[str, np.ndarray], input_norms: Mapping[str, Float[np.ndarray, " I"]] | None = None
) -> dict[str, Float[np.ndarray, "I O"]]:
    """Compute each weight's score, by kernel: |w|, or |w| times the norm of its input over a text.

    Args:
      input_norms: 2-norm over tokens of each input of each kernel (pruning_text.input_norms); None = magnitude.

    Raises:
      ValueError: norms of a kernel are missing, of another length, negative or not finite; or no kernel is prunable, or
        one has weights that are not finite.
    Source: Sun et al. 2023, arXiv:2306.11695, equation 1.
    """
    names = prunable(params)
    if not names:
        raise ValueError(f"pruning: none of {len(params)} parameters is a kernel inside a layer")
    found = {name: np.abs(params[name]) for name in names}
    for name, value in found.items():  # NaN is neither small nor large, and would be removed beyond what is asked
        if not np.isfinite(value).all():
            raise ValueError(f"pruning: {name} has NaN or infinite values, {np.isfinite(value).mean():.3%} are finite")
    if input_norms is None:
        return found
    for name in names:
        found[name] = found[name] * norms_of(input_norms, name, found[name].shape[0])[:, None]
    return found


def norms_of(input_norms: Mapping[str, np.ndarray], name: str, size: int) -> Float[np.ndarray, " I"]:
    """Return the norms of one kernel's inputs, checked.

    Raises:
      ValueError: they are missing, of another length, negative or not finite.
    """
    if name not in input_norms:
        raise ValueError(f"pruning: input norms of {name} are missing among {len(input_norms)}")
    norms = np.asarray(input_norms[name])
    if norms.shape != (size,):
        raise ValueError(f"pruning: input norms of {name} are {norms.shape}, wanted {(size,)}")
    if not (np.isfinite(norms).all() and (norms >= 0).all()):
        raise ValueError(f"pruning: input norms of {name} are from {norms.min()} to {norms.max()}, wanted finite, >= 0")
    return norms


def smallest_fraction(values: Mapping[str, Float[np.ndarray, "I O"]], fraction: float, *, scope: str) -> Masks:
    """Make masks that remove the given fraction of weights with the smallest scores: the nearest number, never all.

    Args:
      values: scores by kernel.
      fraction: share of weights to remove, 0 <= fraction < 1.
      scope: group of weights to which the fraction applies: "matrix", each kernel by itself; "output", each output of a
        kernel (Wanda's); "global", all kernels together.

    Of equal scores, the first are removed first.

    Raises:
      ValueError: the fraction or the scope is invalid.
    """
    if not 0.0 <= fraction < 1.0:
        raise ValueError(f"pruning: fraction={fraction} is outside 0 <= fraction < 1")
    if scope not in SCOPES:
        raise ValueError(f"pruning: scope={scope!r} is not one of {', '.join(SCOPES)}")
    if scope == "output":
        return {name: _kept_by_column(value, _number(fraction, value.shape[0])) for name, value in values.items()}
    if scope == "matrix":
        flat = {name: _kept(value.ravel(), _number(fraction, value.size)) for name, value in values.items()}
        return {name: flat[name].reshape(value.shape) for name, value in values.items()}
    joined = np.concatenate([value.ravel() for value in values.values()])
    parts = np.split(_kept(joined, _number(fraction, joined.size)), np.cumsum([v.size for v in values.values()])[:-1])
    return {name: part.reshape(value.shape) for (name, value), part in zip(values.items(), parts, strict=True)}


def largest_of_groups(values: Mapping[str, Float[np.ndarray, "I O"]], kept: int, group: int) -> Masks:
    """Make masks that keep the `kept` largest scores of every `group` adjacent inputs of an output; 2 of 4 is "2:4".

    Of equal scores, the first are removed first.

    Raises:
      ValueError: kept is not between 1 and group - 1, or a kernel's inputs do not divide into groups.
    Source: Mishra et al. 2021, arXiv:2104.08378, section 3.
    """
    if not 0 < kept < group:
        raise ValueError(f"pruning: {kept}:{group} keeps {kept} of {group}, wanted 1 to {group - 1}")
    masks = {}
    for name, value in values.items():
        inputs, outputs = value.shape
        if inputs % group:
            raise ValueError(f"pruning: {name} has {inputs} inputs, which are no groups of {group}")
        cut = value.reshape(inputs // group, group, outputs)
        masks[name] = _without_first(cut, group - kept, axis=1).reshape(value.shape)
    return masks


def apply(params: Mapping[str, np.ndarray], masks: Masks) -> dict[str, np.ndarray]:
    """Set masked weights to zero; parameters without a mask stay the same arrays.

    Raises:
      ValueError: a mask belongs to no parameter, or has another shape.
    """
    for name, mask in masks.items():
        if name not in params or params[name].shape != mask.shape:
            found = params[name].shape if name in params else None
            raise ValueError(f"pruning: the mask of {name} is {mask.shape}, its parameter {found}")
    return {
        name: np.where(masks[name], value, np.zeros((), value.dtype)) if name in masks else value
        for name, value in params.items()
    }


def count(params: Mapping[str, np.ndarray]) -> Count:
    """Count the zero weights of prunable kernels."""
    kernels = [params[name] for name in prunable(params)]
    zeros = sum(int(np.count_nonzero(value == 0)) for value in kernels)
    return Count(zeros, sum(value.size for value in kernels), len(kernels))


def _number(fraction: float, size: int) -> int:
    return min(round(fraction * size), size - 1)


def _kept(values: Float[np.ndarray, " n"], removed: int) -> Bool[np.ndarray, " n"]:
    """False at the `removed` smallest values; of equal ones, the first."""
    if not removed:
        return np.ones(values.shape, bool)
    limit = np.partition(values, removed - 1)[removed - 1]
    kept = values > limit
    equal = np.flatnonzero(values == limit)
    kept[equal[removed - np.count_nonzero(values < limit) :]] = True
    return kept


def _kept_by_column(values: Float[np.ndarray, "I O"], removed: int) -> Bool[np.ndarray, "I O"]:
    return _without_first(values, removed, axis=0)


def _without_first(values: np.ndarray, removed: int, *, axis: int) -> np.ndarray:
    """False at the `removed` smallest values along an axis; of equal ones, the first."""
    order = np.argsort(values, axis=axis, kind="stable")
    kept = np.ones(values.shape, bool)
    np.put_along_axis(kept, np.take(order, range(removed), axis=axis), False, axis=axis)
    return kept
