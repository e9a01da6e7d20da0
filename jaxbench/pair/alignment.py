"""Which module of one side is which of the other, and how their activations are laid out (S file)."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.pair.matching import Matching
from jaxbench.pair.rules import Rule, arrangements
from jaxbench.parity import distance
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
    return next((y for y in values if distance.relative_error(y, wanted) < NEARLY), values[0] if values else None)


def _preference(axes: tuple[int, ...]) -> int:
    return -1 if axes == tuple(range(len(axes))) else LAYOUTS.index(axes) if axes in LAYOUTS else len(LAYOUTS)


def as_torch(outputs: Sequence[Any], references: Sequence[np.ndarray]) -> list[Any]:
    """Arrangement of each JAX output in the PyTorch output's layout.

    Raises:
      ValueError: their numbers differ, or a shape cannot be arranged as the other.
    """
    if not references:
        raise ValueError(f"outputs: {len(references)} floating arrays from PyTorch, wanted one at least to compare")
    if len(outputs) != len(references):
        raise ValueError(
            f"outputs: {len(outputs)} floating arrays from JAX, {len(references)} from PyTorch: choose the same ones "
            "with jax_outputs=function and torch_outputs=function"
        )
    chosen = []
    for i, (output, reference) in enumerate(zip(outputs, references, strict=True)):
        value = np.asarray(output, np.float64)
        fits = arrangements(value.shape, reference.shape, is_reversed=False)
        if not fits:
            raise ValueError(f"output {i}: {list(value.shape)} from JAX, {list(reference.shape)} from PyTorch")
        fits.sort(key=lambda fit: _preference(fit.axes))
        near = (fit for fit in fits if distance.relative_error(fit.apply(value), reference) < NEARLY)
        chosen.append(next(near, fits[0]))
    return chosen
