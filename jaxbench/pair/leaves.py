"""The arrays of a JAX model as leaves to match: when their modules are called, and what those read (S file)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxbench.pair.naming import Leaf, natural
from jaxbench.parity import capture

DISTURB_SEED = 0
DISTURBANCE = 0.3  # relative to the constant
COUNTED = re.compile(r"(^|\.)[A-Z]\w*_\d+(\.|$)")  # names in a path that Linen generates: Dense_0
OF_HAIKU = re.compile(r"_\d+(/|[.]|$)")  # names that Haiku generates: linear_1, not fc1, which the user chose
OF_LAYERS = {  # last names of the matrices in a framework's own layers, which tell their layout
    "flax.nnx": ("kernel", "embedding"), "flax.linen": ("kernel", "embedding"), "haiku": ("w", "embeddings"),
    "equinox": ("weight", "weight_ih", "weight_hh"),
}  # fmt: skip
REVERSED = ("kernel", "w")  # last names of weights stored [*window, in, out], in Flax and Haiku but not in Equinox


def leaves_of(
    model: Any, calls: Mapping[str, capture.Call], order: Sequence[str], stored: Mapping[str, bool], *,
    with_values: bool,
) -> list[Leaf]:  # fmt: skip
    """Return the leaves of a JAX model, parameters before state; their `order` is that of their modules' calls.

    For a function it is the order in which it first uses its parameters; where that is unknown, is_ordered is False.

    Args:
      model: of jax_model.open_model.
      calls: of its modules.
      order: its modules by the end of their first call.
      stored: whether an array is stored [in, out], by name, as far as its use tells; used where its name does not.
      with_values: whether the leaves get the arrays' values.
    """
    places = {name: i for i, name in enumerate(order)}
    sources, leaves = sources_of(calls), []
    names = model.order or sorted(model.params, key=natural) if model.order is not None else ()
    used = {name: i for i, name in enumerate(names)}
    for i, (name, x) in enumerate({**model.params, **model.state}.items()):
        path = name.partition(":")[2] or name
        value = np.asarray(x) if with_values else None
        is_named = path.rpartition(".")[2] in REVERSED and model.framework != "equinox"
        is_reversed = is_named if has_known_layout(model.framework, path) else stored.get(name, is_named)
        place = used[name] if name in used else _place(path, places, i)
        source = sources.get(path.rpartition(".")[0], "")
        is_counted = bool((OF_HAIKU if model.framework == "haiku" else COUNTED).search(path))
        known = {"source": source, "is_optional": name in model.state, "is_ordered": model.order != ()}
        leaves.append(Leaf(name, tuple(x.shape), place, is_reversed, value, is_counted=is_counted, **known))
    return leaves


def has_known_layout(framework: str, path: str) -> bool:
    """True where the name of an array tells its layout: it is that of a framework's own layers."""
    return path.rpartition(".")[2] in OF_LAYERS.get(framework, ())


def disturbed(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return random replacements for the constant arrays, around their values, by name; other arrays are omitted.

    All zeros or all ones, as in freshly initialised norms, hide what a model does with them. Variances stay positive.
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
    """Return, by the reader's name, the module whose output another module reads bit for bit as its first input.

    Arrays that are constant or not finite are no evidence: zeros equal zeros wherever they come from.
    """
    made: dict[bytes, str] = {}
    sources: dict[str, str] = {}
    for name, call in calls.items():
        if call.inputs and _is_telling(call.inputs[0]):
            source = made.get(np.asarray(call.inputs[0]).tobytes())
            if source:
                sources.setdefault(name.partition("#")[0], source)
        if call.outputs and _is_telling(call.outputs[0]):
            made.setdefault(np.asarray(call.outputs[0]).tobytes(), name.partition("#")[0])
    return sources


def _is_telling(values: Any) -> bool:
    x = np.asarray(values)
    return bool(x.size and np.all(np.isfinite(x)) and np.any(x != x.flat[0]))


def _place(name: str, order: Mapping[str, int], position: int) -> int:
    """Return a sort key: the call order of the innermost called module around a weight, then definition order."""
    parts = name.split(".")
    called = next((order[p] for p in (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)) if p in order), 0)
    return called * 100_000 + position
