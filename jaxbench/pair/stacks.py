"""Find JAX arrays that hold several PyTorch layers along their first axis, as scanned layers are stored (S file)."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxbench.pair.naming import Leaf, equal_paths, natural


class Stack(NamedTuple):
    """Tensors of one shape whose names differ only in one number."""

    leaf: Leaf  # the first of them, without the number in its name
    members: tuple[str, ...]  # in order of their numbers


def stacked(
    arrays: Sequence[Leaf], tensors: Sequence[Leaf], fits: Callable[[Leaf, Leaf], bool], *, by_name: bool
) -> tuple[list[Leaf], list[Stack]]:
    """Return one layer of every array that is a stack of layers, and the stacks of tensors that it may hold.

    An array is a stack if its name is that of some layers without their number. Then arrays with the same first name
    part and number of layers are stacks too.

    Args:
      arrays: of the JAX model.
      tensors: of PyTorch.
      fits: whether an array's shape and kind are those of a tensor.
      by_name: False also takes for a stack any array that no tensor fits as a whole.
    """
    by_count: dict[int, list[Stack]] = collections.defaultdict(list)
    for stack in _stacks(tensors):
        by_count[len(stack.members)].append(stack)
    named = {n: equal_paths(arrays, [stack.leaf for stack in stacks]) for n, stacks in by_count.items()}
    layers, certain = {}, set()
    for array in arrays:
        if not array.shape or array.shape[0] not in by_count:
            continue
        layer, count = layer_of(array), array.shape[0]
        fitting = [stack.leaf for stack in by_count[count] if fits(layer, stack.leaf)]
        if fitting:
            layers[array.name, count] = layer
            is_named = any((array.name, leaf.name) in named[count] for leaf in fitting)
            if is_named or not (by_name or any(fits(array, tensor) for tensor in tensors)):
                certain.add((_first(array), count))
    found = {key: layer for key, layer in layers.items() if (_first(layer), key[1]) in certain}
    counts = {count for _, count in found}
    return list(found.values()), [stack for count in counts for stack in by_count[count]]


def layer_of(array: Leaf) -> Leaf:
    """Return the first layer of a stack."""
    return array._replace(shape=array.shape[1:], value=None if array.value is None else array.value[0])


def _first(leaf: Leaf) -> str:
    return re.split(r"[./]", leaf.name)[0]


def _stacks(tensors: Sequence[Leaf]) -> Iterator[Stack]:
    """Yield stacks of two or more tensors; of those of one length, a tensor is in the one of its outermost number."""
    groups: dict[tuple, list[Leaf]] = collections.defaultdict(list)
    for leaf in tensors:
        for depth, number in enumerate(re.finditer(r"\d+", leaf.name)):
            before, after = leaf.name[: number.start()], leaf.name[number.end() :]
            groups[depth, before, after, leaf.shape].append(leaf)
    taken, names = set(), set()
    for (_, before, after, _), members in sorted(groups.items(), key=lambda item: item[0][:3]):
        name = re.sub(r"[._]+\.", ".", before + after).strip("._")
        here = {(leaf.name, len(members)) for leaf in members}
        if len(members) > 1 and name not in names and not here & taken:
            taken, names = taken | here, names | {name}
            members = sorted(members, key=lambda leaf: natural(leaf.name))
            first = members[0]._replace(name=name, order=min(leaf.order for leaf in members))
            yield Stack(first, tuple(leaf.name for leaf in members))
