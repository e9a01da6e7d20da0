"""Pair JAX's outputs with PyTorch's: which is which, in which layout, and which are compared exactly (S file)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.pair.alignment import LAYOUTS, NEARLY, preference
from jaxbench.pair.rules import Arrangement, arrangements
from jaxbench.parity import capture, distance, gates


class Placed(NamedTuple):
    """A floating output of JAX that is paired with one of PyTorch's."""

    name: str  # "output 0", "output logits"
    index: int  # of the JAX output
    fit: Arrangement  # that puts it in PyTorch's layout
    is_same: bool  # False where the fit permutes or regroups axes in a way that is no known layout
    words: str = ""  # what the fit does, where it changes the output

    def compared(self, outputs: Sequence[Any]) -> np.ndarray:
        """Return the array to compare with PyTorch's output."""
        return np.asarray(self.fit.apply(outputs[self.index]) if self.is_same else outputs[self.index])


class Exact(NamedTuple):
    """An integer or boolean output that both sides have; its indices among the exact outputs of each side."""

    name: str
    mine: int
    theirs: int


def as_torch(mine: capture.Outputs, theirs: capture.Outputs) -> tuple[list[Placed], list[Exact], list[str]]:
    """Pair floating outputs in PyTorch's order and layout, and exact ones; with notes on outputs of one side only.

    Raises:
      ValueError: the sides' keys or numbers of floating outputs differ, PyTorch has no floating element, one is complex
        and the other real, or a shape cannot be arranged as the other.
    """
    if not any(x.size for x in theirs.floating):
        empty = f" without elements ({[list(x.shape) for x in theirs.floating]})" if theirs.floating else ""
        raise ValueError(
            f"outputs: {len(theirs.floating)} floating arrays from PyTorch{empty}, wanted one at least to compare"
        )
    placed: dict[int, Placed] = {}
    exact, notes = [], []
    for path, *leaves in capture.paired_outputs(mine.tree, theirs.tree):
        floats, integers = ([[x.index for x in side if x.is_floating == kind] for side in leaves] for kind in (1, 0))
        if len(floats[0]) != len(floats[1]):
            where = f" {path}" if path else ""
            raise ValueError(
                f"outputs{where}: {len(floats[0])} floating arrays from JAX, {len(floats[1])} from PyTorch: choose the "
                "same ones with jax_outputs=function and torch_outputs=function"
            )
        names = _names(path, [len(floats[0]), max(map(len, integers))])
        for name, i, j in zip(names[0], *floats, strict=True):
            placed[j] = _placed(name, i, distance.widest(mine.floating[i]), theirs.floating[j])
        paired, alone = _exact_pairs(integers, [mine.exact, theirs.exact])
        exact += [Exact(names[1][max(i, j)], integers[0][i], integers[1][j]) for i, j in paired]
        notes += [
            f"{names[1][place]} was not compared: only {side} has it, integers or booleans" for place, side in alone
        ]
    return [placed[j] for j in sorted(placed)], exact, notes


def _exact_pairs(
    places: Sequence[Sequence[int]], arrays: Sequence[Sequence[Any]]
) -> tuple[list[tuple[int, int]], list[tuple[int, str]]]:
    """Pair the exact outputs of one group; return also those that only one side has, with the name of that side.

    By position where both sides have equally many; else numbers with numbers and booleans with booleans.
    """
    counts = [len(each) for each in places]
    if counts[0] == counts[1]:
        return [(i, i) for i in range(counts[0])], []
    paired, alone = [], []
    for is_bool in (False, True):
        kinds = [
            [i for i, place in enumerate(each) if (np.asarray(side[place]).dtype == bool) == is_bool]
            for each, side in zip(places, arrays, strict=True)
        ]
        common = min(map(len, kinds))
        paired += list(zip(*(each[:common] for each in kinds), strict=True))
        alone += [(i, side) for each, side in zip(kinds, ("JAX", "PyTorch"), strict=True) for i in each[common:]]
    return sorted(paired), sorted(alone)


def _names(path: str, counts: Sequence[int]) -> list[list[str]]:
    """Return the names of the floating and of the exact outputs of one group."""
    total, names = sum(counts), []
    for kind, count in zip(("", "exact "), counts, strict=True):
        inside = [f"{path}.{i}" if path else f"{i}" for i in range(count)]
        names.append([f"{kind}output {path or 0}"] if total == 1 and count else [f"{kind}output {i}" for i in inside])
    return names


def _placed(name: str, index: int, value: np.ndarray, reference: np.ndarray) -> Placed:
    """Find the layout of one output: unchanged, else channels last for channels first; no other order is a layout."""
    kinds = ["complex" if np.iscomplexobj(x) else "real" for x in (value, reference)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{name}: {kinds[0]} numbers from JAX, {kinds[1]} ones from PyTorch; wanted the same kind")
    identity = Arrangement(tuple(range(value.ndim)), value.shape)
    is_near = lambda fit: distance.relative_error(fit.apply(value), reference) < NEARLY
    if value.shape == reference.shape and is_near(identity):
        return Placed(name, index, identity, is_same=True)
    fits = sorted(arrangements(value.shape, reference.shape, is_reversed=False), key=lambda fit: preference(fit.axes))
    # With equal shapes (0, 2, 1) may be a transposed matrix as well as a signal, so there it is no layout.
    is_layout = lambda fit: (
        fit.axes in LAYOUTS and len(fit.axes) == len(fit.shape) and (value.shape != reference.shape or value.ndim > 3)
    )
    near = next((fit for fit in fits if is_near(fit)), None)
    if near is None and value.shape == reference.shape:
        return Placed(name, index, identity, is_same=True)
    fit = near or next((fit for fit in fits if is_layout(fit)), fits[0] if fits else None)
    if fit is None:
        raise ValueError(f"{name}: {list(value.shape)} from JAX, {list(reference.shape)} from PyTorch")
    words = f"{name}: {list(value.shape)} of JAX taken in the order {fit.axes} as PyTorch's {list(reference.shape)}"
    if not is_layout(fit):
        agrees = f"{name} is equal up to {fit.text()} of JAX's: where that is meant, say so with jax_outputs=function"
        words = agrees if near else f"{name}: {list(value.shape)} from JAX, {list(reference.shape)} from PyTorch"
    return Placed(name, index, fit, is_layout(fit), words)


def not_finite(value: Any, reference: Any) -> str:
    """Describe the first non-finite element that keeps two tensors of one shape from being compared; empty if none."""
    a, b = (np.atleast_1d(distance.widest(x)) for x in (value, reference))
    if a.shape != b.shape:
        return ""
    places = np.argwhere(~(np.isfinite(a) & np.isfinite(b)) & ~(a == b))
    if len(places):
        where = [int(i) for i in places[0]]
        return f"not finite at {where}: {a[tuple(where)]} in JAX, {b[tuple(where)]} in PyTorch"
    return ""


def count_not_finite(outputs: capture.Outputs) -> int:
    """Count the elements of floating outputs that are not finite."""
    return sum(int(np.count_nonzero(~np.isfinite(x))) for x in outputs.floating)


def repeat_error(again: Sequence[Any], outputs: Sequence[Any]) -> float:
    """Return the largest distance of outputs from those of another call; 0 if equal bit for bit, NaN included."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(again, outputs, strict=True)]
    return max((distance.relative_error(a, b) for a, b in pairs if not np.array_equal(a, b, equal_nan=True)), default=0)


def differ(outputs: Sequence[Any], others: Sequence[Any]) -> bool:
    """True if the floating outputs of two calls of one model differ in value, number or shape."""
    if len(outputs) != len(others) or any(np.shape(a) != np.shape(b) for a, b in zip(outputs, others, strict=True)):
        return True
    return repeat_error(outputs, others) > distance.TOLERANCE_FLOAT64


def exact_gates(
    pairs: Sequence[Exact], mine: capture.Outputs, theirs: capture.Outputs, mode: str
) -> tuple[gates.Gate, ...]:
    """Return the gate of the integer and boolean outputs, element by element; no gate where there are none."""
    shares = {pair.name: _differing(np.asarray(mine.exact[pair.mine]), theirs.exact[pair.theirs]) for pair in pairs}
    if not shares:
        return ()
    worst = max(shares, key=shares.__getitem__)
    what = f"integer and boolean outputs, {mode}"
    return (gates.Gate("P1", what, shares[worst] == 0.0, shares[worst], 0.0, worst),)


def _differing(value: np.ndarray, reference: np.ndarray) -> float:
    """Return the share of elements that differ; where the shapes differ, in the layout that fits best.

    Plain floats may be rounded: for them return 0 up to the float64 tolerance, else the relative error.
    """
    if any(np.issubdtype(x.dtype, np.inexact) for x in (value, reference)):
        error = distance.relative_error(value, reference)
        return 0.0 if error <= distance.TOLERANCE_FLOAT64 else error
    if value.shape == reference.shape:
        return float(np.mean(value != reference)) if value.size else 0.0
    fits = arrangements(value.shape, reference.shape, is_reversed=False)
    layouts = [fit for fit in fits if fit.axes in LAYOUTS and len(fit.axes) == len(fit.shape)]
    return min((float(np.mean(fit.apply(value) != reference)) for fit in layouts), default=1.0)
