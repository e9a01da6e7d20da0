"""The arrays of a JAX model as leaves to be matched: when their modules are called, and what those read (S file)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxbench.pair.naming import Leaf, natural
from jaxbench.parity import capture

DISTURB_SEED = 0
DISTURBANCE = 0.3  # of a constant, relative
COUNTED = re.compile(r"(^|\.)[A-Z]\w*_\d+(\.|$)")  # in paths: names that Linen gives, Dense_0
OF_HAIKU = re.compile(r"_\d+(/|[.]|$)")  # linear_1, not fc1, which the user named
REVERSED = ("kernel", "w")  # last names of weights stored [*window, in, out]: Flax's and Haiku's, not Equinox's


def leaves_of(model: Any, calls: Mapping[str, capture.Call], order: Sequence[str], *, with_values: bool) -> list[Leaf]:
    """Leaves of a JAX model, parameters before state, in the order in which their modules are called.

    A function's parameters are in the order in which it uses them; where that is not known, their order says nothing.
    """
    places = {name: i for i, name in enumerate(order)}
    sources, leaves = sources_of(calls), []
    names = model.order or sorted(model.params, key=natural) if model.order is not None else ()
    used = {name: i for i, name in enumerate(names)}
    for i, (name, x) in enumerate({**model.params, **model.state}.items()):
        path = name.partition(":")[2] or name
        value = np.asarray(x) if with_values else None
        is_reversed = path.rpartition(".")[2] in REVERSED and model.framework != "equinox"
        place = used[name] if name in used else _place(path, places, i)
        source = sources.get(path.rpartition(".")[0], "")
        is_counted = bool((OF_HAIKU if model.framework == "haiku" else COUNTED).search(path))
        known = {"source": source, "is_optional": name in model.state, "is_ordered": model.order != ()}
        leaves.append(Leaf(name, tuple(x.shape), place, is_reversed, value, is_counted=is_counted, **known))
    return leaves


def disturbed(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Random numbers around the value of every array that is constant, by name; the others are left out.

    A zero or a one in every place, as norms have at first, hides what is done with it. Variances stay positive.
    """
    random, found = np.random.default_rng(DISTURB_SEED), {}
    for name in sorted(arrays):
        x = np.asarray(arrays[name])
        if x.size and np.all(x == x.flat[0]) and np.isfinite(x.flat[0]):
            size = float(abs(x.flat[0])) or 1.0
            if "var" in name.rpartition(".")[2]:
                found[name] = size * random.uniform(1 - DISTURBANCE, 1 + DISTURBANCE, x.shape)
            else:
                found[name] = x + DISTURBANCE * size * random.uniform(-1.0, 1.0, x.shape)
    return found


def sources_of(calls: Mapping[str, capture.Call]) -> dict[str, str]:
    """Module whose output another reads as its first input, number for number; by the reader's name.

    Arrays of one number, or of what is none, say nothing: zeros are equal to zeros wherever they come from.
    """
    made: dict[bytes, str] = {}
    sources: dict[str, str] = {}
    for name, call in calls.items():
        if call.inputs and _is_telling(call.inputs[0]):
            source = made.get(np.asarray(call.inputs[0]).tobytes())
            if source:
                sources.setdefault(name.partition("#")[0], source)
        if _is_telling(call.outputs[0]):
            made.setdefault(np.asarray(call.outputs[0]).tobytes(), name.partition("#")[0])
    return sources


def _is_telling(values: Any) -> bool:
    x = np.asarray(values)
    return bool(x.size and np.all(np.isfinite(x)) and np.any(x != x.flat[0]))


def _place(name: str, order: Mapping[str, int], position: int) -> int:
    """Order of the innermost called module around a weight, then of definition."""
    parts = name.split(".")
    called = next((order[p] for p in (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)) if p in order), 0)
    return called * 100_000 + position
