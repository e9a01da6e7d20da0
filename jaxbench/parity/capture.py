"""Traces of one backend, and the module names that align two backends (S file: neither JAX nor PyTorch).

A module is named by its path, "layers.0.attention.q_proj"; the model itself is "model". The sides (flax_side.py,
torch_side.py, equinox_side.py) fill these types without changing the models.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxbench.parity import distance

ROOT = "model"


class Trace(NamedTuple):
    """One loss and its gradients; outputs in forward order, their gradients in backward order."""

    loss: np.ndarray
    outputs: dict[str, np.ndarray]  # first tensor each module returns
    output_gradients: dict[str, np.ndarray]  # of the loss with respect to them; empty without gradients
    gradients: dict[str, np.ndarray]  # by parameter; empty without gradients


class Call(NamedTuple):
    """Floating-point tensors of one module's call."""

    inputs: tuple[Any, ...]  # in the order of its arguments
    # Only the first one it returns, since the layout of the others, such as a cache, may differ between backends; in a
    # pair (jaxbench/pair) every one, None where the other side has no counterpart.
    outputs: tuple[Any, ...]
    whole: tuple[Any, ...] = ()  # integers among its arguments, such as ids; only in a pair


class Training(NamedTuple):
    """Losses of consecutive optimiser steps, and parameters and moments after the last."""

    losses: np.ndarray  # nats per token
    arrays: dict[str, dict[str, np.ndarray]]  # params, first_moment, second_moment by parameter


class Decoding(NamedTuple):
    """Logits of one batch computed in one call, and token by token after a prefill, all [B T V]."""

    full: np.ndarray
    incremental: np.ndarray


class Outputs(NamedTuple):
    """A call's outputs: the arrays by kind, and the place of each."""

    floating: tuple[Any, ...]  # from left to right
    exact: tuple[Any, ...]  # integers and booleans, likewise
    tree: Any  # nested dictionaries and lists of Leaf; None where there is no array


class Leaf(NamedTuple):
    """Index of one output among those of its kind."""

    is_floating: bool
    index: int
    is_plain: bool = False  # a Python number


class LocalError(NamedTuple):
    """Error of one module's own code: its distance from the twin, given the twin's inputs and inner results."""

    module: str
    error: float  # relative 2-norm, the largest of its tensors
    child: str | None = None  # the error is in what the module passes to this one inside it; None = in its own output
    output: int = 0  # index of that output in a pair (jaxbench/pair); elsewhere 0 stands for all outputs

    @property
    def part(self) -> str:
        """Where the error is, in words: "output", "output 1" and so on, or "input of <child>"."""
        if self.child is not None:
            return f"input of {self.child}"
        return f"output {self.output}" if self.output else "output"

    @property
    def is_first_output(self) -> bool:
        """True for the error of the module's first output."""
        return self.child is None and self.output == 0

    def as_dict(self) -> dict[str, Any]:
        """Return the module, the part and the error as plain values, for JSON."""
        return {"module": self.module, "part": self.part, "error": self.error}


def call_names() -> Callable[[str], str]:
    """Return a function that gives repeated calls of a module distinct names: name, name#1, name#2."""
    counts: collections.Counter[str] = collections.Counter()

    def name_of_call(module: str) -> str:
        counts[module] += 1
        return module if counts[module] == 1 else f"{module}#{counts[module] - 1}"

    return name_of_call


def enclosing_module(name: str, modules: Mapping[str, Any]) -> str:
    """Return the name of the nearest enclosing module, "model" for the outermost ones."""
    parent = name.rpartition(".")[0]
    while parent and parent not in modules:
        parent = parent.rpartition(".")[0]
    return parent or ROOT


def map_floating(tree: Any, function: Callable[[Any], Any], *, is_floating: Callable[[Any], bool]) -> Any:
    """Apply a function to the floating-point tensors of nested tuples, lists and dictionaries, from left to right."""
    if is_floating(tree):
        return function(tree)
    if isinstance(tree, dict):
        changed = copy.copy(tree)  # keeps its class: transformers' outputs are dictionaries with attributes
        for key, value in tree.items():
            changed[key] = map_floating(value, function, is_floating=is_floating)
        return changed
    if isinstance(tree, tuple | list):
        items = [map_floating(item, function, is_floating=is_floating) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def outputs_of(result: Any, *, kind_of: Callable[[Any], str]) -> Outputs:
    """Collect a call's outputs from nested mappings, dataclasses, tuples and lists; parts without arrays are left out.

    Plain numbers are exact outputs, as arrays without axes.

    Args:
      result: what the model returned.
      kind_of: returns "floating", "exact", or "" for anything that is no array to compare.
    """
    arrays: dict[str, list[Any]] = {"floating": [], "exact": []}

    def walk(tree: Any) -> Any:
        if isinstance(tree, Mapping):
            items = dict(tree)
        elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
            items = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
        elif isinstance(tree, tuple | list):
            return [kept for kept in map(walk, tree) if kept is not None] or None
        elif isinstance(tree, bool | int | float | complex | np.number | np.bool_):
            arrays["exact"].append(np.asarray(tree))
            return Leaf(False, len(arrays["exact"]) - 1, is_plain=True)
        elif kind := kind_of(tree):
            arrays[kind].append(tree)
            return Leaf(kind == "floating", len(arrays[kind]) - 1)
        else:
            return None
        return {str(key): kept for key, value in items.items() if (kept := walk(value)) is not None} or None

    tree = walk(result)
    return Outputs(tuple(arrays["floating"]), tuple(arrays["exact"]), tree)


def in_order_of(outputs: Outputs, tree: Any) -> Outputs:
    """Reorder outputs like another tree with the same places; return them unchanged if the places differ.

    A compiled function returns its dictionaries sorted by key, the same function run op by op in insertion order.
    """
    here, there = (dict(_places(each)) for each in (outputs.tree, tree))
    if here.keys() != there.keys() or any(here[p].is_floating != there[p].is_floating for p in here):
        return outputs
    arrays: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
    for path, leaf in there.items():
        found = (outputs.floating if leaf.is_floating else outputs.exact)[here[path].index]
        arrays[0 if leaf.is_floating else 1][leaf.index] = found
    return Outputs(*(tuple(each[i] for i in sorted(each)) for each in arrays), tree)


def _places(tree: Any, path: tuple = ()) -> Iterator[tuple[tuple, Leaf]]:
    if isinstance(tree, Leaf):
        yield path, tree
    elif tree is not None:
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _places(child, (*path, key))


def paired_outputs(mine: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, list[Leaf], list[Leaf]]]:
    """Yield (path, leaves of one side, of the other) for two trees of outputs: dictionaries by key, lists by position.

    Where one side has a list and the other something else, or another length, all leaves inside are one group. A key
    that only one side has, holding only plain numbers, is a group whose other side is empty.

    Raises:
      ValueError: two dictionaries have different keys; the message names them.
    """
    if isinstance(mine, dict) and isinstance(theirs, dict):
        missing, more = (
            sorted(key for key in one.keys() - other.keys() if not _is_plain(one[key]))
            for one, other in ((theirs, mine), (mine, theirs))
        )
        if missing or more:
            where = f" {path}" if path else ""
            raise ValueError(
                f"outputs{where}: only PyTorch's have the keys {missing}, only JAX's {more}: choose the same ones with "
                "jax_outputs=function and torch_outputs=function"
            )
        children = [(key, mine.get(key), theirs.get(key)) for key in {**theirs, **mine}]
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        children = [(str(i), a, b) for i, (a, b) in enumerate(zip(mine, theirs, strict=True))]
    else:
        yield path, list(_leaves(mine)), list(_leaves(theirs))
        return
    for key, a, b in children:
        yield from paired_outputs(a, b, f"{path}.{key}" if path else key)


def _is_plain(tree: Any) -> bool:
    return all(leaf.is_plain for leaf in _leaves(tree))


def _leaves(tree: Any) -> Iterator[Leaf]:
    return (leaf for _, leaf in _places(tree))


def local_errors(forced: Mapping[str, Call], reference: Mapping[str, Call]) -> list[LocalError]:
    """Compute each module's own error, in the reference's order; forced calls were made on the reference's tensors.

    The enclosing module computes a call's inputs, so their error counts as that module's.

    Raises:
      ValueError: the modules differ, or one passes a different number of tensors.
    """
    distance.check_names(forced, reference, kind="modules called")
    local = []
    for name, wanted in reference.items():
        if name != ROOT:
            parent = enclosing_module(name, reference)
            local.append(_local_error(forced[name].inputs, wanted.inputs, module=parent, child=name))
        local.append(_local_error(forced[name].outputs, wanted.outputs, module=name, child=None))
    return local


def _local_error(values: tuple[Any, ...], references: tuple[Any, ...], *, module: str, child: str | None) -> LocalError:
    local = LocalError(module, 0.0, child)
    if len(values) != len(references):
        raise ValueError(f"parity: {local.part} of {module}: {len(values)} tensors, the twin has {len(references)}")
    errors = [distance.error_by_size(a, b) for a, b in zip(values, references, strict=True)]
    return local._replace(error=max(errors, default=0.0))


def blame(local: Iterable[LocalError], *, tolerance: float) -> LocalError | None:
    """Return the first part whose own error is above the tolerance, in order of computation; None if there is none."""
    return next((entry for entry in local if not entry.error <= tolerance), None)
