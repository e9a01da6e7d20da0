"""The arrays of a JAX model as leaves to be matched: when their modules are called, and what those read (S file)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxbench.pair.matching import Leaf
from jaxbench.parity import capture

REVERSED = ("kernel", "w")  # last names of weights stored [*window, in, out]: Flax's and Haiku's, not Equinox's


def leaves_of(model: Any, calls: Mapping[str, capture.Call], order: Sequence[str], *, with_values: bool) -> list[Leaf]:
    """Leaves of a JAX model, parameters before state, in the order in which their modules are called."""
    places = {name: i for i, name in enumerate(order)}
    sources, leaves = sources_of(calls), []
    for i, (name, x) in enumerate({**model.params, **model.state}.items()):
        path = name.partition(":")[2] or name
        value = np.asarray(x) if with_values else None
        is_reversed = path.rpartition(".")[2] in REVERSED and model.framework != "equinox"
        place = _place(path, places, i)
        is_state = name in model.state
        source = sources.get(path.rpartition(".")[0], "")
        leaves.append(Leaf(name, tuple(x.shape), place, is_reversed, value, source=source, is_optional=is_state))
    return leaves


def sources_of(calls: Mapping[str, capture.Call]) -> dict[str, str]:
    """Module whose output another reads as its first input, number for number; by the reader's name."""
    made: dict[bytes, str] = {}
    sources: dict[str, str] = {}
    for name, call in calls.items():
        if call.inputs:
            source = made.get(np.asarray(call.inputs[0]).tobytes())
            if source:
                sources.setdefault(name.partition("#")[0], source)
        made.setdefault(np.asarray(call.outputs[0]).tobytes(), name.partition("#")[0])
    return sources


def _place(name: str, order: Mapping[str, int], position: int) -> int:
    """Order of the innermost called module around a weight, then of definition."""
    parts = name.split(".")
    called = next((order[p] for p in (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)) if p in order), 0)
    return called * 100_000 + position
