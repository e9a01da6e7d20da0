"""Pair the modules of both sides and find the layout of their activations (S file)."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.pair.matching import Matching
from jaxbench.pair.rules import Rule, arrangements
from jaxbench.parity import capture, distance
from jaxbench.parity.capture import ROOT, Call

MAX_LAYOUT_AXES = 5
NEARLY = 1e-2  # relative error under which two tensors are taken for the same one
# Channels first in PyTorch, last in JAX, for signals, images and volumes; and the reverse.
LAYOUTS = ((0, 2, 1), (0, 2, 3, 1), (0, 2, 3, 4, 1), (0, 3, 1, 2), (0, 4, 1, 2, 3))


class Aligned(NamedTuple):
    """Paired calls by the JAX call's name, in PyTorch's order of completion."""

    torch_names: dict[str, str]  # name of the call on the PyTorch side
    calls: dict[str, Call]  # PyTorch's tensors in JAX's layout; None for one that PyTorch lacks or that fits no layout
    reordered: frozenset[str] = frozenset()  # calls whose inputs are matched in another order than PyTorch's


def modules(jax_calls: Iterable[str], torch_calls: Iterable[str], matching: Matching, given: Mapping[str, str]) -> dict:
    """Return PyTorch's call for each JAX call that computes the same, by name.

    Modules are paired if exactly the same weights are inside them; of nested ones, outermost pairs with outermost.
    Modules without weights, and taps, must have equal names or be paired by the caller.

    Args:
      jax_calls: names, `name#1` for a module's second call.
      torch_calls: likewise.
      matching: the matched weights.
      given: pairs from the caller: JAX module -> PyTorch module.
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
    """Pair modules with the same weights inside: outermost with outermost, the others from the innermost outwards."""
    if not names or not others:
        return {}
    if len(names) == len(others):
        return dict(zip(names, others, strict=True))
    inner = min(len(names), len(others)) - 1
    return {names[0]: others[0]} | dict(zip(names[len(names) - inner :], others[len(others) - inner :], strict=True))


def _module(call: str) -> str:
    return call.partition("#")[0]


def _weights_inside(names: Iterable[str], matching: Matching) -> dict[frozenset, list[str]]:
    """Group modules by the PyTorch weights inside them, outermost first."""
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
    """Return the PyTorch modules that hold exactly these of all matched weights, outermost first."""
    sources = {source for source, _ in weights}
    parts = {source: [part for each, part in weights if each == source] for source in sources}
    if any(part is not None and len(parts[source]) < part[1] for source, part in weights):
        return []  # only part of a fused tensor, which no PyTorch module uses alone
    outer = sorted(names, key=lambda name: (name.count("."), len(name)))
    return [name for name in outer if name != ROOT and {x for x in every if _is_inside(x, name)} == sources]


def _is_inside(weight: str, module: str) -> bool:
    return weight.startswith(module + ".")


def aligned(
    jax_calls: Mapping[str, Call], torch_calls: Mapping[str, Call], names: Mapping[str, str], *,
    in_order: frozenset[str] = frozenset(), with_whole: frozenset[str] = frozenset(),
) -> Aligned:  # fmt: skip
    """Arrange PyTorch's calls in JAX's layout; None for a tensor that no layout brings to JAX's shape.

    Args:
      jax_calls: by name.
      torch_calls: by name.
      names: JAX call -> PyTorch call.
      in_order: JAX calls whose inputs keep PyTorch's order even if another one is nearer.
      with_whole: JAX calls that get PyTorch's integers too.
    """
    pairs = [(jax_calls[name], torch_calls[other]) for name, other in names.items() if name != ROOT]
    layouts = learned_layouts(
        (x, np.asarray(y))
        for mine, theirs in pairs
        for ys, xs in ((mine.inputs, theirs.inputs), (mine.outputs, theirs.outputs))
        if len(xs) == len(ys)
        for x, y in zip(xs, ys, strict=True)
    )
    calls, reordered = {}, set()
    for name, other in names.items():
        mine, theirs = jax_calls[name], torch_calls[other]
        if name == ROOT:
            calls[name] = theirs  # arranged already
            continue
        inputs, is_reordered = _inputs(mine.inputs, theirs.inputs, layouts, is_in_order=name in in_order)
        numbers = whole_inputs(mine, theirs) if name in with_whole else ()
        calls[name] = Call(inputs, _outputs(mine.outputs, theirs.outputs, layouts), numbers)
        reordered |= {name} if is_reordered else set()
    return Aligned(dict(names), calls, frozenset(reordered))


def whole_inputs(mine: Call, theirs: Call) -> tuple[np.ndarray, ...]:
    """Return PyTorch's integer inputs in the shapes of JAX's; empty where their numbers or shapes differ."""
    if len(mine.whole) != len(theirs.whole):
        return ()
    pairs = [(np.asarray(x), y) for x, y in zip(theirs.whole, mine.whole, strict=True)]
    found = [x if x.shape == y.shape else _rebatched(x, y.shape) for x, y in pairs]
    return () if any(x is None for x in found) else tuple(found)


def learned_layouts(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> dict[int, tuple[int, ...]]:
    """Return the axis order for each number of axes, by majority of the pairs whose shapes or values fix it."""
    votes: dict[int, collections.Counter] = collections.defaultdict(collections.Counter)
    for x, y in pairs:
        if not 3 <= x.ndim == y.ndim <= MAX_LAYOUT_AXES:
            continue
        orders = [axes for axes in (tuple(range(x.ndim)), *LAYOUTS) if len(axes) == x.ndim]
        fits = [axes for axes in orders if tuple(x.shape[axis] for axis in axes) == y.shape]
        if len(fits) > 1:
            fits = [axes for axes in fits if distance.relative_error(x.transpose(axes), y) < NEARLY]
        if len(fits) == 1:
            votes[x.ndim][fits[0]] += 1
    return {ndim: counts.most_common(1)[0][0] for ndim, counts in votes.items()}


def _inputs(
    mine: Sequence[Any], theirs: Sequence[np.ndarray], layouts: Mapping[int, tuple[int, ...]], *, is_in_order: bool
) -> tuple[tuple[np.ndarray | None, ...], bool]:
    """Return PyTorch's inputs for JAX's, and whether they are in another order than PyTorch's.

    They keep PyTorch's order where all fit; an input far from the one in its place but near another takes the other.
    """
    wanted = [np.asarray(x) for x in mine]
    in_order = _in_order(wanted, theirs, layouts)
    if any(x is None for x in in_order):
        return tuple(_best(theirs, y, layouts) for y in wanted), False
    if is_in_order:
        return tuple(in_order), False
    found = [_nearer(theirs, own, y, layouts) for own, y in zip(in_order, wanted, strict=True)]
    return tuple(found), any(x is not own for x, own in zip(found, in_order, strict=True))


def _outputs(
    mine: Sequence[Any], theirs: Sequence[np.ndarray], layouts: Mapping[int, tuple[int, ...]]
) -> tuple[np.ndarray | None, ...]:
    """Return PyTorch's outputs for JAX's: a near one, else the one at the same position.

    Where the numbers of outputs differ, only the first has a position; later ones may be a cache of any layout.
    """
    wanted = [np.asarray(x) for x in mine]
    in_order = _in_order(wanted, theirs, layouts)
    if len(wanted) != len(theirs):
        in_order[:1] = [in_layout(theirs[0], wanted[0], layouts)]
    return tuple(_nearer(theirs, own, y, layouts) for own, y in zip(in_order, wanted, strict=True))


def _in_order(
    wanted: Sequence[np.ndarray], theirs: Sequence[np.ndarray], layouts: Mapping[int, tuple[int, ...]]
) -> list[np.ndarray | None]:
    if len(wanted) != len(theirs):
        return [None] * len(wanted)
    return [in_layout(x, y, layouts) for x, y in zip(theirs, wanted, strict=True)]


def _nearer(
    theirs: Sequence[np.ndarray], own: np.ndarray | None, y: np.ndarray, layouts: Mapping[int, tuple[int, ...]]
) -> np.ndarray | None:
    """Return `own` if it is nearly equal to y, else another tensor that is, else `own`."""
    if own is not None and distance.relative_error(own, y) < NEARLY:
        return own
    best = _best(theirs, y, layouts)
    return best if best is not None and distance.relative_error(best, y) < NEARLY else own


def _best(
    tensors: Iterable[np.ndarray], wanted: np.ndarray, layouts: Mapping[int, tuple[int, ...]]
) -> np.ndarray | None:
    """Return the tensor that, in the wanted one's layout, is nearest to it; None where none fits."""
    fitting = [x for x in (in_layout(tensor, wanted, layouts) for tensor in tensors) if x is not None]
    return min(fitting, key=lambda x: distance.relative_error(x, wanted), default=None)


def in_layout(
    x: np.ndarray, wanted: np.ndarray, layouts: Mapping[int, tuple[int, ...]] | None = None
) -> np.ndarray | None:
    """Return a tensor with its axes in the wanted one's order; None where no order fits.

    Of several orders that fit, take one under which both are nearly equal; else that of the model's other tensors
    (`layouts`, by number of axes); else the first of LAYOUTS. Tensors that differ for another reason than layout do not
    tell the order: the nearest would be chance.
    """
    known = (layouts or {}).get(x.ndim)
    if x.ndim > MAX_LAYOUT_AXES and x.shape != wanted.shape:
        return None
    if x.shape == wanted.shape and distance.relative_error(x, wanted) < NEARLY:
        return x
    fits = sorted(arrangements(x.shape, wanted.shape, is_reversed=False), key=lambda fit: preference(fit.axes))
    fits.sort(key=lambda fit: not (fit.axes == known and len(fit.shape) == len(fit.axes)))
    values = [fit.apply(x) for fit in fits]
    first = values[0] if values else _rebatched(x, wanted.shape)
    return next((y for y in values if distance.relative_error(y, wanted) < NEARLY), first)


def _rebatched(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Broadcast a tensor of one row, or of equal rows (such as positions), to another batch size or no batch axis.

    None for any other tensor.
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


def preference(axes: tuple[int, ...]) -> int:
    """Return the rank of an axis order: unchanged first, then those of LAYOUTS, then any other."""
    return -1 if axes == tuple(range(len(axes))) else LAYOUTS.index(axes) if axes in LAYOUTS else len(LAYOUTS)


def local_errors(forced: Mapping[str, Call], twin: Mapping[str, Call]) -> list[capture.LocalError]:
    """Return each module's own errors, and those of what it passes to its children, in order of completion.

    A first output without a counterpart of its shape has infinite error.
    """
    called, local = {name: wanted for name, wanted in twin.items() if name in forced}, []
    for name, wanted in called.items():
        mine = forced[name]
        if name != ROOT:
            pairs = zip(mine.inputs, wanted.inputs, strict=True)
            errors = [distance.error_by_size(a, b) for a, b in pairs if b is not None]
            errors += [float(np.mean(a != b)) for a, b in zip(mine.whole, wanted.whole, strict=False) if b.size]
            parent = capture.enclosing_module(name, called)
            local.append(capture.LocalError(parent, max(errors, default=0.0), child=name))
        for i, (a, b) in enumerate(zip(mine.outputs, wanted.outputs, strict=True)):
            if b is not None or i == 0:
                error = np.inf if b is None else distance.error_by_size(a, b)
                local.append(capture.LocalError(name, error, output=i))
    return local
