"""How one array of a JAX model is made from PyTorch tensors: transposed, split, joined, reshaped (S file).

Everything here uses only operations that numpy and JAX arrays share, so JAX can differentiate through a rule:
gradients of a JAX model with respect to PyTorch's tensors need no separate rule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Arrangement(NamedTuple):
    """A transposition and a reshape that turn a PyTorch tensor into a JAX array."""

    axes: tuple[int, ...]  # as of numpy.transpose
    shape: Shape  # after the transposition; only splits or merges neighbouring axes

    def apply(self, x: Any) -> Any:
        """Arrange a PyTorch tensor as the JAX array."""
        return x.transpose(self.axes).reshape(self.shape)

    def invert(self, x: Any, shape: Shape) -> Any:
        """Arrange a JAX array as the PyTorch tensor of this shape."""
        moved = tuple(shape[axis] for axis in self.axes)
        return x.reshape(moved).transpose(tuple(np.argsort(self.axes).tolist()))

    def text(self) -> str:
        """Describe it in words; empty where nothing changes."""
        parts = [] if self.axes == tuple(range(len(self.axes))) else [f"axes {self.axes}"]
        return ", ".join(parts + ([f"as {self.shape}"] if len(self.shape) != len(self.axes) else []))


class Rule(NamedTuple):
    """How one JAX array is made from one or more PyTorch tensors.

    A tensor may hold several JAX arrays, concatenated along its first axis (`part`, as in torch's fused query, key and
    value projection) or another one (`axis`, as in GPT-2's). Or one array holds several tensors, along `joined`.
    """

    sources: tuple[str, ...]  # PyTorch tensors
    arrangement: Arrangement  # of each source, or of the part
    part: tuple[int, int] | None = None  # (index, count) of equal parts of the tensor
    joined: int | None = None  # axis of the JAX array along which the sources are concatenated
    axis: int = 0  # axis of the tensor along which its parts are concatenated

    def apply(self, tensors: Mapping[str, Any]) -> Any:
        """Make the JAX array; tensors are numpy or JAX arrays by name."""
        pieces = [self._piece(tensors[name]) for name in self.sources]
        if self.joined is None:
            return pieces[0]
        return pieces[0].__array_namespace__().concat(pieces, axis=self.joined)

    def _piece(self, x: Any) -> Any:
        return self.arrangement.apply(x if self.part is None else x[self.place(x.shape)])

    def place(self, shape: Shape) -> tuple[slice, ...]:
        """Return the slices that select the rule's part in a tensor of this shape."""
        index, count = self.part or (0, 1)
        size = shape[self.axis] // count if shape else 0
        return (slice(None),) * self.axis + ((slice(index * size, (index + 1) * size),) if shape else ())

    def text(self) -> str:
        """Describe it in words: the tensors and what is done to them."""
        part = "" if self.part is None else f"part {self.part[0] + 1} of {self.part[1]}"
        part += f" along axis {self.axis}" if self.axis else ""
        joined = "" if self.joined is None else f"joined along axis {self.joined}"
        return ", ".join(text for text in (" + ".join(self.sources), part, self.arrangement.text(), joined) if text)


class Read(dict):
    """Tensors by name; records which were read."""

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        super().__init__(tensors)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        self.names.add(name)
        return super().__getitem__(name)


# A rule given as a function: PyTorch's tensors by name -> the JAX array, using operators that all arrays share.
Given = Callable[[Mapping[str, Any]], Any]


def arrangements(source: Shape, target: Shape, *, is_reversed: bool, is_transposed: bool = False) -> list[Arrangement]:
    """Return every way to arrange a tensor as an array of another shape, most likely first; empty where there is none.

    Args:
      source: shape of the PyTorch tensor, or of the part of it.
      target: shape of the JAX array.
      is_reversed: the frameworks store this kind of weight in opposite order: [out, in, *window] in PyTorch,
        [*window, in, out] in JAX. Where several transpositions fit, that one comes first.
      is_transposed: a transposed convolution's weight: [in, out, *window] in PyTorch, [*window, in, out] in Flax.
    """
    if math.prod(source) != math.prod(target):
        return []
    identity = tuple(range(len(source)))
    swapped = (*identity[2:], *identity[1::-1]) if is_reversed and len(source) > 1 else identity
    if is_transposed:
        swapped = (*identity[2:], 0, 1)
    found = []
    for axes in dict.fromkeys((swapped, identity, *_permutations(identity))):
        moved = tuple(source[axis] for axis in axes)
        is_regrouped = axes in (swapped, identity) and _regroups(moved, target)
        if moved == target or is_regrouped:
            found.append(Arrangement(axes, target))
    return found


def _permutations(axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Return all orders of the axes; none for more than five axes."""
    return itertools.permutations(axes) if len(axes) <= 5 else iter(())


def _regroups(source: Shape, target: Shape) -> bool:
    """True if one shape only splits axes of the other: (12, 64) and (3, 4, 64)."""
    ends = [set(itertools.accumulate(shape, lambda a, b: a * b)) for shape in (source, target)]
    return ends[0] <= ends[1] or ends[1] <= ends[0]


def to_torch(rules: Mapping[str, Rule], arrays: Mapping[str, np.ndarray], shapes: Mapping[str, Shape]) -> dict:
    """Make PyTorch's tensors from a JAX model's arrays, by name; shapes are those of the tensors.

    Raises:
      ValueError: a rule is a caller's function, which has no inverse, or a tensor is filled only in part.
    """
    tensors: dict[str, np.ndarray] = {}
    filled = dict.fromkeys(shapes, 0)
    for name, rule in rules.items():
        if not isinstance(rule, Rule):
            raise ValueError(f"weights={name!r}: made by a function, which has no inverse: take PyTorch's weights")
        for source, piece in _pieces(rule, arrays[name], shapes):
            into = tensors.setdefault(source, np.empty(shapes[source], arrays[name].dtype))
            into[rule.place(into.shape) if rule.part is not None else ...] = piece
            filled[source] += piece.size
    partly = [name for name, size in filled.items() if 0 < size < math.prod(shapes[name])]
    if partly:
        raise ValueError(f"weights={partly}: only parts of these tensors are in the JAX model")
    return tensors


def _pieces(rule: Rule, array: np.ndarray, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each source of a rule with its piece of an array."""
    sizes = [math.prod(shapes[source]) for source in rule.sources]
    if rule.joined is None:
        shape = shapes[rule.sources[0]]
        if rule.part is not None:
            axis = rule.axis
            shape = (*shape[:axis], shape[axis] // rule.part[1], *shape[axis + 1 :])
        yield rule.sources[0], rule.arrangement.invert(array, shape)
        return
    rest = array.size // array.shape[rule.joined]
    stops = np.cumsum([size // rest for size in sizes])[:-1]
    for source, piece in zip(rule.sources, np.split(array, stops, axis=rule.joined), strict=True):
        yield source, Arrangement(rule.arrangement.axes, piece.shape).invert(piece, shapes[source])
