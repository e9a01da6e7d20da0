"""Which module of one side is which of the other, and how their activations are laid out (S file)."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.pair.matching import Matching
from jaxbench.pair.rules import Arrangement, Rule, arrangements
from jaxbench.parity import capture, distance, gates
from jaxbench.parity.capture import ROOT, Call

MAX_LAYOUT_AXES = 5
NEARLY = 1e-2  # relative error under which two tensors are the same but for a small difference
# Channels first in PyTorch, last in JAX, for signals, images and volumes; and the other way round.
LAYOUTS = ((0, 2, 1), (0, 2, 3, 1), (0, 2, 3, 4, 1), (0, 3, 1, 2), (0, 4, 1, 2, 3))


class Aligned(NamedTuple):
    """Modules of both sides by the JAX call's name, in PyTorch's order of completion."""

    torch_names: dict[str, str]  # name of the call on the PyTorch side
    calls: dict[str, Call]  # PyTorch's tensors in JAX's layout; None where JAX takes an input that PyTorch does not


def modules(jax_calls: Iterable[str], torch_calls: Iterable[str], matching: Matching, given: Mapping[str, str]) -> dict:
    """PyTorch's call for each JAX call that computes the same, by name.

    Modules are the same where exactly the same weights are inside them; of several nested ones, the outermost is the
    outermost. Modules without weights, and taps, must have equal names, or be named by the caller.

    Args:
      jax_calls: names, `name#1` for a module's second call.
      torch_calls: likewise.
      matching: the weights' rules.
      given: what the caller says: PyTorch's module by JAX's.
    """
    jax_calls, torch_calls = list(jax_calls), list(torch_calls)
    jax_names, torch_names = ({_module(name): None for name in calls} for calls in (jax_calls, torch_calls))
    pairs = {ROOT: ROOT} | {a: b for a, b in given.items() if a in jax_names and b in torch_names}
    inside = _weights_inside(jax_names, matching)
    every = {source for weights in inside for source, _ in weights}
    for weights, outer_to_inner in inside.items():
        others = _torch_modules(torch_names, weights, every)
        names = [name for name in outer_to_inner if name not in pairs]
        others = [name for name in others if name not in pairs.values()]
        pairs |= _nested(names, others)
    taken = set(pairs.values())
    pairs |= {name: name for name in jax_names if name not in pairs and name in torch_names and name not in taken}
    calls = {name: name.replace(_module(name), pairs[_module(name)], 1) for name in jax_calls if _module(name) in pairs}
    order = {name: i for i, name in enumerate(torch_calls)}
    kept = [(name, other) for name, other in calls.items() if other in order]
    return dict(sorted(kept, key=lambda pair: order[pair[1]]))


def _nested(names: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """Pairs of modules with the same weights inside: from the innermost outwards, the outermost with the outermost."""
    if not names or not others:
        return {}
    if len(names) == len(others):
        return dict(zip(names, others, strict=True))
    inner = min(len(names), len(others)) - 1
    return {names[0]: others[0]} | dict(zip(names[len(names) - inner :], others[len(others) - inner :], strict=True))


def _module(call: str) -> str:
    return call.partition("#")[0]


def _weights_inside(names: Iterable[str], matching: Matching) -> dict[frozenset, list[str]]:
    """Modules by the PyTorch weights inside them, outermost first."""
    inside: dict[frozenset, list[str]] = collections.defaultdict(list)
    for name in sorted(names, key=lambda name: (name.count("."), len(name))):
        weights = set()
        for guess in matching.guesses:
            array = guess.name.partition(":")[2] or guess.name  # a state's name begins with its collection
            if isinstance(guess.rule, Rule) and _is_inside(array, name):
                weights |= {(source, guess.rule.part) for source in guess.rule.sources}
        if weights and name != ROOT:
            inside[frozenset(weights)].append(name)
    return inside


def _torch_modules(names: Iterable[str], weights: frozenset, every: set[str]) -> list[str]:
    """PyTorch modules that hold exactly these weights of all, outermost first."""
    sources = {source for source, _ in weights}
    parts = {source: [part for each, part in weights if each == source] for source in sources}
    if any(part is not None and len(parts[source]) < part[1] for source, part in weights):
        return []  # a part of a fused tensor, which no PyTorch module computes alone
    outer = sorted(names, key=lambda name: (name.count("."), len(name)))
    return [name for name in outer if name != ROOT and {x for x in every if _is_inside(x, name)} == sources]


def _is_inside(weight: str, module: str) -> bool:
    return weight.startswith(module + ".")


def aligned(jax_calls: Mapping[str, Call], torch_calls: Mapping[str, Call], names: Mapping[str, str]) -> Aligned:
    """PyTorch's calls in JAX's layout; a call's outputs are empty where no layout makes them of one shape."""
    calls = {}
    for name, other in names.items():
        mine, theirs = jax_calls[name], torch_calls[other]
        output = in_layout(theirs.outputs[0], np.asarray(mine.outputs[0]))
        calls[name] = Call(_inputs(mine.inputs, theirs.inputs), () if output is None else (output,))
    return Aligned(dict(names), calls)


def _inputs(mine: Sequence[Any], theirs: Sequence[np.ndarray]) -> tuple[np.ndarray | None, ...]:
    """PyTorch's inputs for JAX's: in their order where all fit, else the nearest one for each."""
    wanted = [np.asarray(x) for x in mine]
    if len(wanted) == len(theirs):
        in_order = [in_layout(x, y) for x, y in zip(theirs, wanted, strict=True)]
        if all(x is not None for x in in_order):
            return tuple(in_order)
    return tuple(_best(theirs, y) for y in wanted)


def _best(tensors: Iterable[np.ndarray], wanted: np.ndarray) -> np.ndarray | None:
    """The tensor that, in the layout of another, is nearest to it; None where none fits."""
    fitting = [x for x in (in_layout(tensor, wanted) for tensor in tensors) if x is not None]
    return min(fitting, key=lambda x: distance.relative_error(x, wanted), default=None)


def in_layout(x: np.ndarray, wanted: np.ndarray) -> np.ndarray | None:
    """A tensor with its axes in another's order; None where none fits.

    Of several orders that fit, one under which both are nearly equal; else, where they differ for another reason, the
    first of LAYOUTS, because the nearest of two unlike tensors is chance.
    """
    if x.ndim > MAX_LAYOUT_AXES and x.shape != wanted.shape:
        return None
    if x.shape == wanted.shape and distance.relative_error(x, wanted) < NEARLY:
        return x
    fits = sorted(arrangements(x.shape, wanted.shape, is_reversed=False), key=lambda fit: _preference(fit.axes))
    values = [fit.apply(x) for fit in fits]
    first = values[0] if values else _rebatched(x, wanted.shape)
    return next((y for y in values if distance.relative_error(y, wanted) < NEARLY), first)


def _rebatched(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """A tensor whose batch is one row, or rows that are all alike, as positions' are, with another's batch, or none.

    None where it is no such tensor.
    """
    if x.ndim == len(shape) and x.shape[1:] == shape[1:] and 1 in (len(x), shape[0]):
        row = x[:1]
    elif x.shape[1:] == shape and len(x):
        row = x[0]
    else:
        row = x
    is_one_row = x.shape == row.shape or bool(np.all(x == row))
    is_row = row.shape in (shape, shape[1:], (1, *shape[1:]))
    return np.broadcast_to(row, shape) if is_one_row and is_row else None


def _preference(axes: tuple[int, ...]) -> int:
    return -1 if axes == tuple(range(len(axes))) else LAYOUTS.index(axes) if axes in LAYOUTS else len(LAYOUTS)


class Placed(NamedTuple):
    """One floating output of JAX as one of PyTorch's."""

    name: str  # "output 0", "output logits"
    index: int  # of the JAX output
    fit: Arrangement  # of it in PyTorch's layout
    is_same: bool  # False where another order of axes, or another grouping, is taken that is no layout
    words: str = ""  # on what is taken, where it is not the output as it is

    def compared(self, outputs: Sequence[Any]) -> np.ndarray:
        """What stands against PyTorch's output."""
        return np.asarray(self.fit.apply(outputs[self.index]) if self.is_same else outputs[self.index])


class Exact(NamedTuple):
    """An integer or boolean output of both sides; the arrays' places among those of their kind."""

    name: str
    mine: int
    theirs: int


def as_torch(mine: capture.Outputs, theirs: capture.Outputs) -> tuple[list[Placed], list[Exact], list[str]]:
    """Floating outputs of JAX in PyTorch's order and layout, pairs of exact ones, and notes on what only one side has.

    Raises:
      ValueError: their numbers or keys differ, or a shape cannot be arranged as the other.
    """
    if not theirs.floating:
        raise ValueError(
            f"outputs: {len(theirs.floating)} floating arrays from PyTorch, wanted one at least to compare"
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
        exact += [Exact(name, i, j) for name, i, j in zip(names[1], *integers, strict=False)]
        for name in names[1][min(map(len, integers)) :]:
            side = "JAX" if len(integers[0]) > len(integers[1]) else "PyTorch"
            notes.append(f"{name} was not compared: only {side} has it, integers or booleans")
    return [placed[j] for j in sorted(placed)], exact, notes


def _names(path: str, counts: Sequence[int]) -> list[list[str]]:
    """Names of the floating and of the exact outputs of one group."""
    total, names = sum(counts), []
    for kind, count in zip(("", "exact "), counts, strict=True):
        inside = [f"{path}.{i}" if path else f"{i}" for i in range(count)]
        names.append([f"{kind}output {path or 0}"] if total == 1 and count else [f"{kind}output {i}" for i in inside])
    return names


def _placed(name: str, index: int, value: np.ndarray, reference: np.ndarray) -> Placed:
    """Layout of one output: as it is, else channels last for channels first; any other order is no layout."""
    kinds = ["complex" if np.iscomplexobj(x) else "real" for x in (value, reference)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{name}: {kinds[0]} numbers from JAX, {kinds[1]} ones from PyTorch; wanted the same kind")
    identity = Arrangement(tuple(range(value.ndim)), value.shape)
    is_near = lambda fit: distance.relative_error(fit.apply(value), reference) < NEARLY
    if value.shape == reference.shape and is_near(identity):
        return Placed(name, index, identity, is_same=True)
    fits = sorted(arrangements(value.shape, reference.shape, is_reversed=False), key=lambda fit: _preference(fit.axes))
    # With equal sizes (0, 2, 1) is a transposed matrix as well as a signal, so there it is no layout.
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
    """Words on the first element that keeps two tensors of one shape from being compared; empty where there is none."""
    a, b = (np.atleast_1d(distance.widest(x)) for x in (value, reference))
    if a.shape != b.shape:
        return ""
    places = np.argwhere(~(np.isfinite(a) & np.isfinite(b)) & ~(a == b))
    if len(places):
        where = [int(i) for i in places[0]]
        return f"not finite at {where}: {a[tuple(where)]} in JAX, {b[tuple(where)]} in PyTorch"
    return ""


def count_not_finite(outputs: capture.Outputs) -> int:
    """Elements of floating outputs that are no finite number."""
    return sum(int(np.count_nonzero(~np.isfinite(x))) for x in outputs.floating)


def repeat_error(again: tuple, outputs: tuple) -> float:
    """Largest distance of outputs from those of another call; 0 where they are equal bit for bit, NaN and all."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(again, outputs, strict=True)]
    return max((distance.relative_error(a, b) for a, b in pairs if not np.array_equal(a, b, equal_nan=True)), default=0)


def exact_gates(
    pairs: Sequence[Exact], mine: capture.Outputs, theirs: capture.Outputs, mode: str
) -> tuple[gates.Gate, ...]:
    """Gate of the integer and boolean outputs, element by element; none where there are none."""
    shares = {pair.name: _differing(np.asarray(mine.exact[pair.mine]), theirs.exact[pair.theirs]) for pair in pairs}
    if not shares:
        return ()
    worst = max(shares, key=shares.__getitem__)
    what = f"integer and boolean outputs, {mode}"
    return (gates.Gate("P1", what, shares[worst] == 0.0, shares[worst], 0.0, worst),)


def _differing(value: np.ndarray, reference: np.ndarray) -> float:
    """Share of the elements that differ; of another shape, in the layout that fits best."""
    if value.shape == reference.shape:
        return float(np.mean(value != reference)) if value.size else 0.0
    fits = arrangements(value.shape, reference.shape, is_reversed=False)
    layouts = [fit for fit in fits if fit.axes in LAYOUTS and len(fit.axes) == len(fit.shape)]
    return min((float(np.mean(fit.apply(value) != reference)) for fit in layouts), default=1.0)


def local_errors(forced: Mapping[str, capture.Call], twin: Mapping[str, capture.Call]) -> list[capture.Local]:
    """Each module's own error, and that of what it hands to the modules inside it, in the order of completion."""
    mine, theirs = {}, {}
    for name, wanted in twin.items():
        if name in forced:
            pairs = zip(forced[name].inputs, wanted.inputs, strict=True)
            kept = [(a, b) for a, b in pairs if b is not None]
            outputs = wanted.outputs or (np.full(1, np.nan),)  # of another shape: an infinite error
            mine[name] = capture.Call(tuple(a for a, _ in kept), forced[name].outputs)
            theirs[name] = capture.Call(tuple(b for _, b in kept), outputs)
    return capture.local_errors(mine, theirs)
