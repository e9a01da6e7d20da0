"""Match a JAX model's arrays with PyTorch tensors by shape, name, order of use and values (S file).

A minimum-cost assignment (Hungarian method) between arrays, or parts of fused ones, whose shapes can be arranged as
each other gives the guesses; an equal path outweighs order. Anything left over raises an error, never passes silently.
"""

from __future__ import annotations

import collections
import difflib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxbench.pair.costs import name_cost, other_cost, rarities, same_values
from jaxbench.pair.naming import Leaf, equal_paths
from jaxbench.pair.rules import Arrangement, Given, Rule, arrangements
from jaxbench.pair.stacks import stacked

WEIGHT_MODULE = 2.0  # cost of taking one module's weights from several modules
ROUNDS = 3  # of assignment, each using the result of the one before
WEIGHT_SOURCE = 5.0  # above all that one round's errors of order can cost together
NEVER = 1e6
MARGIN = 0.1  # difference of costs under which names do not tell two arrays apart
OTHER_LAYOUT = "same values, in another order of axes than its own"
BY_NAME, BY_USE, BY_PLACE = "name", "order of use", "order of names"
MAX_PARTS = 4  # of one fused tensor
MAX_SHOWN = 12  # leaves that an error names


class _Slot(NamedTuple):
    """A leaf, or one of the equal parts into which it is split along an axis."""

    whole: Leaf
    part: Leaf  # with the shape of the part
    index: int = 0
    count: int = 1
    axis: int = 0


class Guess(NamedTuple):
    """One array, what it is made from, and why."""

    name: str
    rule: Rule | Given
    why: str  # "given", or the evidence for it


class Matching(NamedTuple):
    """A rule for every array of the JAX model."""

    guesses: tuple[Guess, ...]
    ignored: tuple[str, ...]  # PyTorch tensors not used by the JAX model: left out by the caller, or buffers
    kept: tuple[str, ...] = ()  # state of the JAX model that PyTorch lacks; it keeps its own values

    @property
    def rules(self) -> dict[str, Rule | Given]:
        """Rules by the name of the JAX array."""
        return {guess.name: guess.rule for guess in self.guesses}

    @property
    def assumed(self) -> tuple[Guess, ...]:
        """Guesses between tensors of one shape that neither names nor values settle."""
        return tuple(guess for guess in self.guesses if guess.why in (BY_USE, BY_PLACE))

    def to_jax(self, tensors: Mapping[str, object]) -> dict:
        """Make the JAX model's arrays from PyTorch's tensors."""
        return {
            name: rule.apply(tensors) if isinstance(rule, Rule) else rule(tensors) for name, rule in self.rules.items()
        }


def match(
    arrays: Sequence[Leaf], tensors: Sequence[Leaf], names: Mapping[str, str | Rule | Given | None] | None = None
) -> Matching:
    """Find a rule for every array of a JAX model.

    Args:
      arrays: of the JAX model.
      tensors: parameters and buffers of the PyTorch module.
      names: the caller's overrides, by JAX name: a PyTorch name, a Rule, or a function of all tensors by name; and by
        PyTorch name: None for a tensor that the JAX model does not have.

    Raises:
      ValueError: arrays or tensors are left over (the message lists them), or a given name does not exist (the message
        lists the nearest names) or does not fit.
    """
    arrays_by_name, tensors_by_name = ({leaf.name: leaf for leaf in leaves} for leaves in (arrays, tensors))
    given, ignored = _given(names or {}, arrays_by_name, tensors_by_name)
    used = set(ignored) | {source for guess in given for source in _sources(guess.rule)}
    free_arrays = [leaf for leaf in arrays if leaf.name not in {guess.name for guess in given}]
    free_tensors = [leaf for leaf in tensors if leaf.name not in used]
    has_function = any(not isinstance(guess.rule, Rule) for guess in given)
    paths = equal_paths(arrays, [leaf for leaf in tensors if leaf.name not in ignored])
    errors = []
    for by_name in (True, False):  # first stacks of layers that names show, then also those by shape
        guesses = _stacks(free_arrays, free_tensors, by_name=by_name)
        taken = {source for guess in guesses for source in _sources(guess.rule)}
        rest = [leaf for leaf in free_arrays if leaf.name not in {guess.name for guess in guesses}]
        guesses += _assigned(rest, [leaf for leaf in free_tensors if leaf.name not in taken], paths)
        found = {guess.name: guess for guess in (*given, *guesses)}
        left_arrays = [leaf for leaf in arrays if leaf.name not in found]
        taken = {source for guess in found.values() for source in _sources(guess.rule)}
        left_tensors = [leaf for leaf in free_tensors if leaf.name not in taken]
        needed = [leaf for leaf in left_tensors if not (leaf.is_optional or has_function)]
        wanted_arrays = [leaf for leaf in left_arrays if not leaf.is_optional]
        if not (wanted_arrays or needed):
            ignored += tuple(leaf.name for leaf in left_tensors)  # a caller's function may read any of them
            kept = tuple(leaf.name for leaf in left_arrays)
            return Matching(tuple(found[leaf.name] for leaf in arrays if leaf.name in found), ignored, kept)
        errors.append(_left_over(wanted_arrays, needed))
    raise ValueError(errors[0])


def _stacks(arrays: Sequence[Leaf], tensors: Sequence[Leaf], *, by_name: bool) -> list[Guess]:
    """Match arrays that stack one tensor per layer, or a part of it, along their first axis."""
    layers, stacks = stacked(arrays, tensors, _fits_part, by_name=by_name)
    members = {stack.leaf.name: stack.members for stack in stacks}
    counts = {array.name: array.shape[0] for array in arrays if array.shape}
    guesses, taken = [], collections.defaultdict(set)  # layer counts by tensor; only one may be used
    for count in sorted({len(names) for names in members.values()}, reverse=True):
        mine = [leaf for leaf in layers if counts[leaf.name] == count]
        theirs = [stack.leaf for stack in stacks if len(stack.members) == count]
        for guess in _assigned(mine, theirs, equal_paths(mine, theirs)):
            sources = members[guess.rule.sources[0]]
            is_taken = any(taken[name] - {count} for name in sources)
            if guess.rule.joined is None and not is_taken:
                arrangement = guess.rule.arrangement._replace(shape=(1, *guess.rule.arrangement.shape))
                guesses.append(
                    guess._replace(rule=guess.rule._replace(sources=sources, arrangement=arrangement, joined=0))
                )
                for name in sources:
                    taken[name].add(count)
    return guesses


def _given(
    names: Mapping[str, str | Rule | Given | None], arrays: Mapping[str, Leaf], tensors: Mapping[str, Leaf]
) -> tuple[list[Guess], tuple[str, ...]]:
    """Check the caller's overrides; return them as guesses and as tensors to ignore."""
    guesses, ignored = [], []
    for name, value in names.items():
        if value is None:
            if name not in tensors:
                raise ValueError(f"names={{{name!r}: None}}: no such PyTorch tensor{near(name, tensors)}")
            ignored.append(name)
            continue
        if name not in arrays:
            raise ValueError(f"names={{{name!r}: ...}}: no such JAX array{near(name, arrays)}")
        if isinstance(value, str):
            if value not in tensors:
                raise ValueError(f"names={{{name!r}: {value!r}}}: no such PyTorch tensor{near(value, tensors)}")
            fits = _arrangements(tensors[value], arrays[name])
            if not fits:
                shapes = f"{list(tensors[value].shape)} cannot be arranged as {list(arrays[name].shape)}"
                raise ValueError(f"names={{{name!r}: {value!r}}}: {shapes}")
            value = Rule((value,), fits[0])
        if not isinstance(value, Rule) and not callable(value):
            wanted = "a PyTorch name, a jaxbench.Rule, a function of all tensors, or None"
            raise ValueError(f"names={{{name!r}: {value!r}}}: wanted {wanted}")
        missing = [source for source in _sources(value) if source not in tensors]
        if missing:
            raise ValueError(f"names={{{name!r}: ...}}: no such PyTorch tensor: {', '.join(missing)}")
        guesses.append(Guess(name, value, "given"))
    return guesses, tuple(ignored)


def _assigned(arrays: Sequence[Leaf], tensors: Sequence[Leaf], paths: set[tuple[str, str]]) -> list[Guess]:
    """Match as many arrays as possible, each with a tensor, a part of one or several, at least total cost."""
    from scipy.optimize import linear_sum_assignment

    if not arrays or not tensors:
        return []
    tensor_slots = [slot for leaf in tensors for slot in _slots(leaf, arrays, axes=(_outputs(leaf),))]
    parts = [slot.part for slot in tensor_slots]
    array_slots = [slot for leaf in arrays for slot in _slots(leaf, parts, axes=(len(leaf.shape) - 1, 0))]
    names = np.full((len(array_slots), len(tensor_slots)), NEVER)
    costs, weights = names.copy(), rarities([*arrays, *tensors])
    ranks = [_ranks(slots) for slots in (array_slots, tensor_slots)]
    for i, array in enumerate(array_slots):
        for j, tensor in enumerate(tensor_slots):
            if _fits(array.part, tensor.part) and 1 in (array.count, tensor.count):
                is_path = (array.whole.name, tensor.whole.name) in paths
                names[i, j] = name_cost(array.part, tensor.part, weights, is_path=is_path)
                costs[i, j] = names[i, j] + other_cost(array.part, tensor.part, ranks[0][i], ranks[1][j])
    rows, columns = linear_sum_assignment(costs)
    for _ in range(ROUNDS - 1):
        rows, columns = linear_sum_assignment(costs + _apart(array_slots, tensor_slots, rows, columns, costs))
    places = [(i, j) for i, j in zip(rows, columns, strict=True) if costs[i, j] < NEVER]
    pairs = [(array_slots[i], tensor_slots[j]) for i, j in places]
    alone = {array_slots[i].whole.name for i, _ in places if np.sum(costs[i] < NEVER) == 1}
    return _guesses(_ordered(pairs), alone, _exchangeable(places, pairs, names))


def _exchangeable(
    places: Sequence[tuple[int, int]], pairs: Sequence[tuple[_Slot, _Slot]], names: np.ndarray
) -> set[str]:
    """Return the arrays that could swap tensors with another as far as names tell: only order of use separates them."""
    found: dict[bool, set[str]] = {True: set(), False: set()}  # by whether the other array is in the same module
    modules = [(array.whole.parent, tensor.whole.parent) for array, tensor in pairs]
    is_qkv = [any(_place(slot.whole)[0] < 3 for slot in pair) for pair in pairs]
    for a, ((i, j), (array, tensor)) in enumerate(zip(places, pairs, strict=True)):
        for b, ((k, m), (other, its)) in enumerate(zip(places, pairs, strict=True)):
            now, then = names[i, j] + names[k, m], names[i, m] + names[k, j]
            is_one = array.whole.name == other.whole.name or tensor.whole.name == its.whole.name
            if a != b and then < min(NEVER, now + MARGIN) and not (is_one and is_qkv[a] and is_qkv[b]):
                found[modules[a] == modules[b]].add(array.whole.name)
    # An array that shares its module, on both sides, with one that names settle is thereby settled across modules.
    exchangeable = found[True] | found[False]
    names_of = [array.whole.name for array, _ in pairs]
    certain = {both for name, both in zip(names_of, modules, strict=True) if name not in exchangeable and both[0]}
    settled = {name for name, both in zip(names_of, modules, strict=True) if both in certain}
    return found[True] | (found[False] - settled)


def _apart(
    arrays: Sequence[_Slot], tensors: Sequence[_Slot], rows: np.ndarray, columns: np.ndarray, costs: np.ndarray
) -> np.ndarray:
    """Return costs, by the last round, of splitting a module's weights over several, or of not following its source."""
    went = collections.defaultdict(list)  # JAX module -> (array, PyTorch module it went to, certainty)
    for i, j in zip(rows, columns, strict=True):
        if costs[i, j] < NEVER:
            sure = 1.0 / int(np.sum(costs[i] < NEVER))
            went[arrays[i].whole.parent].append((arrays[i].whole.name, tensors[j].whole.parent, sure))
    cost = np.zeros_like(costs)
    for i, array in enumerate(arrays):
        siblings = [(module, sure) for name, module, sure in went[array.whole.parent] if name != array.whole.name]
        sources = [(module, sure) for _, module, sure in went.get(array.whole.source, ())]
        for j, tensor in enumerate(tensors):
            cost[i, j] = WEIGHT_MODULE * _elsewhere(siblings, tensor.whole.parent)
            if tensor.whole.source:
                cost[i, j] += WEIGHT_SOURCE * _elsewhere(sources, tensor.whole.source)
    return cost


def _elsewhere(places: Sequence[tuple[str, float]], place: str) -> float:
    """Return the share of places, weighted by certainty, that are not this one."""
    total = sum(sure for _, sure in places)
    return sum(sure for each, sure in places if each != place) / total if total else 0.0


def _outputs(leaf: Leaf) -> int:
    """Return the axis along which a fused tensor is split."""
    return len(leaf.shape) - 1 if leaf.is_reversed else 0


def _fits_part(array: Leaf, tensor: Leaf) -> bool:
    """True if an array can be a tensor, or one part of a fused one."""
    return any(_fits(array, slot.part) for slot in _slots(tensor, [array] * MAX_PARTS, axes=(_outputs(tensor),)))


def _slots(leaf: Leaf, others: Sequence[Leaf], *, axes: tuple[int, ...]) -> list[_Slot]:
    """Return the whole leaf if it fits one of the others, else its split into the fewest equal parts that fit some."""
    if not leaf.shape or any(_fits(leaf, other) for other in others):
        return [_Slot(leaf, leaf)]
    # First try counts that divide the number of arrays they fit, as in a stack of equal layers.
    for is_even, count, axis in itertools.product((True, False), range(2, MAX_PARTS + 1), axes):
        if leaf.shape[axis] % count == 0:
            part = leaf._replace(shape=(*leaf.shape[:axis], leaf.shape[axis] // count, *leaf.shape[axis + 1 :]))
            fitting = sum(_fits(part, other) for other in others)
            if fitting >= count and not (is_even and fitting % count):
                return [_Slot(leaf, part, index, count, axis) for index in range(count)]
    return [_Slot(leaf, leaf)]


def _ordered(pairs: Iterable[tuple[_Slot, _Slot]]) -> list[tuple[_Slot, _Slot]]:
    """Reorder pairs so that the parts of a fused leaf are query, key, value, else in the other side's order of use."""
    groups: dict[tuple[str, str], list[tuple[_Slot, _Slot]]] = collections.defaultdict(list)
    for array, tensor in pairs:
        is_joined = array.count > 1
        groups["array" if is_joined else "tensor", (array if is_joined else tensor).whole.name].append((array, tensor))
    ordered = []
    for (side, _), group in groups.items():
        split, other = (0, 1) if side == "array" else (1, 0)
        slots = sorted((pair[split] for pair in group), key=lambda slot: slot.index)
        others = sorted((pair[other] for pair in group), key=lambda slot: _place(slot.whole))
        ordered += [(s, o) if side == "array" else (o, s) for s, o in zip(slots, others, strict=True)]
    return ordered


def _place(leaf: Leaf) -> tuple[int, int]:
    places = {"q": 0, "k": 1, "v": 2}
    return min((places[word] for word in leaf.words if word in places), default=3), leaf.order


def _guesses(pairs: Iterable[tuple[_Slot, _Slot]], alone: set[str], exchangeable: set[str]) -> list[Guess]:
    """Make guesses from pairs; pairs whose array or tensor is matched only in part are dropped.

    Args:
      pairs: parts of arrays and of tensors.
      alone: arrays that only one tensor fits.
      exchangeable: arrays that names do not tell from others.
    """
    pairs = list(pairs)
    of_array = collections.Counter(array.whole.name for array, _ in pairs)
    of_tensor = collections.Counter(tensor.whole.name for _, tensor in pairs)
    guesses: dict[str, Guess] = {}
    for array, tensor in pairs:
        name = array.whole.name
        if of_array[name] < array.count or of_tensor[tensor.whole.name] < tensor.count:
            continue
        arrangement = _arrangement(array, tensor)
        if array.count > 1:
            sources = (*guesses[name].rule.sources, tensor.whole.name) if name in guesses else (tensor.whole.name,)
            rule = Rule(sources, arrangement, joined=array.axis)
        else:
            part = (tensor.index, tensor.count) if tensor.count > 1 else None
            rule = Rule((tensor.whole.name,), arrangement, part, axis=tensor.axis)
        if arrangement == _arrangements(tensor.part, array.part)[0]:
            why = _why(array.whole, tensor.whole, name in alone, name in exchangeable)
        else:
            why = OTHER_LAYOUT
        guesses[name] = Guess(name, rule, why)
    return list(guesses.values())


def _fits(leaf: Leaf, other: Leaf) -> bool:
    """True if one leaf's shape can be arranged as the other's and their names do not imply different kinds."""
    if math.prod(leaf.shape) != math.prod(other.shape) or (leaf.kind and other.kind and leaf.kind != other.kind):
        return False
    return bool(arrangements(other.shape, leaf.shape, is_reversed=False) or _arrangements(other, leaf))


def _arrangements(tensor: Leaf, array: Leaf) -> list[Arrangement]:
    is_transposed = tensor.owner.startswith("ConvTranspose") and array.name.endswith("kernel")
    is_reversed = array.is_reversed != tensor.is_reversed and not tensor.is_bare
    return arrangements(tensor.shape, array.shape, is_reversed=is_reversed, is_transposed=is_transposed)


def _has_values(*slots: _Slot) -> bool:
    return all(slot.whole.value is not None for slot in slots)


def _arrangement(array: _Slot, tensor: _Slot) -> Arrangement:
    """Return how a tensor, or its part, is arranged; for a bare one the values decide where they are known."""
    fits = _arrangements(tensor.part, array.part)
    if tensor.part.is_bare and array.count == tensor.count == 1 and _has_values(array, tensor):
        same = lambda fit: np.allclose(fit.apply(tensor.part.value), array.part.value, rtol=1e-5, atol=1e-7)
        return next(filter(same, fits), fits[0])
    return fits[0]


def _ranks(slots: Sequence[_Slot]) -> list[int]:
    """Return each slot's rank, in order of use, among those of its kind and size."""
    groups: dict[tuple, list[int]] = collections.defaultdict(list)
    for i in sorted(range(len(slots)), key=lambda i: (slots[i].whole.order, slots[i].index)):
        groups[slots[i].whole.kind, math.prod(slots[i].part.shape)].append(i)
    ranks = {i: rank for group in groups.values() for rank, i in enumerate(group)}
    return [ranks[i] for i in range(len(slots))]


def _why(array: Leaf, tensor: Leaf, is_alone: bool, is_exchangeable: bool) -> str:
    if array.value is not None and tensor.value is not None and same_values(array.value, tensor.value):
        return "same values"
    if is_alone:
        return "only one of its shape"
    return BY_NAME if not is_exchangeable else BY_USE if array.is_ordered and tensor.is_ordered else BY_PLACE


def _sources(rule: Rule | Given) -> tuple[str, ...]:
    return rule.sources if isinstance(rule, Rule) else ()


def near(name: str, known: Iterable[str]) -> str:
    """Return a hint that lists similar names; empty where there are none."""
    names = difflib.get_close_matches(name, list(known), n=3, cutoff=0.3)
    return f"; nearest: {', '.join(names)}" if names else ""


def _left_over(arrays: Sequence[Leaf], tensors: Sequence[Leaf]) -> str:
    """Return the error message that lists what has no counterpart, and how to match it by hand."""
    lines = ["weights do not match"]
    for title, leaves in (("JAX arrays", arrays), ("PyTorch tensors", tensors)):
        if leaves:
            shown = ", ".join(f"{leaf.name} {list(leaf.shape)}" for leaf in leaves[:MAX_SHOWN])
            more = f" and {len(leaves) - MAX_SHOWN} more" if len(leaves) > MAX_SHOWN else ""
            lines.append(f"{title} left over: {shown}{more}")
    lines.append(
        "say what they are with names={'jax.name': 'torch.name' or a function of the tensors, 'torch.name': None}"
    )
    return "; ".join(lines)
