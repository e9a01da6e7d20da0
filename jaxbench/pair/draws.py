"""What the objective asks for, and further weights and inputs on which two whole functions are compared (S file)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxbench.parity import distance

SALT = b"targets of jaxbench.pair"
JITTER = 0.3  # of weights and inputs, relative
SMALL, LARGER = 1e-2, 0.3  # a weight whose RMS is below the one, such as a layer scale, is drawn with the other


def targets(outputs: Sequence[np.ndarray], inputs: Any) -> tuple[np.ndarray, ...]:
    """Normal numbers for the outputs to be near to; NaN, which is no objective, where one stands for infinity.

    Their seed is a hash of the inputs: an example input is often default_rng(0).standard_normal(shape) itself, and an
    output near its own target has no gradient.
    """
    digest = hashlib.sha256(SALT)
    for x in arrays_of(inputs):
        digest.update(np.ascontiguousarray(x).tobytes())
    random = np.random.default_rng(int.from_bytes(digest.digest()[:8], "big"))
    return tuple(np.where(np.abs(y) > distance.MASK, np.nan, _normal(random, y)) for y in outputs)


def _normal(random: np.random.Generator, like: np.ndarray) -> np.ndarray:
    """Normal numbers of another array's shape; complex where it is."""
    drawn = random.standard_normal(like.shape)
    return drawn + 1j * random.standard_normal(like.shape) if np.iscomplexobj(like) else drawn


def weights(tensors: Mapping[str, np.ndarray], names: Sequence[str], seed: int) -> dict[str, np.ndarray]:
    """All tensors, those of some names drawn anew around their values.

    Signs and zeros stay. What is so small that it hides what it is multiplied with, such as a layer scale of 1e-6, gets
    larger.
    """
    random, drawn = np.random.default_rng(seed), dict(tensors)
    for name in sorted(names):
        x = tensors[name]
        rms = float(np.sqrt(np.mean(np.abs(x) ** 2))) if x.size else 0.0
        factor = LARGER / rms if 0.0 < rms < SMALL else 1.0
        drawn[name] = x * factor * random.uniform(1 - JITTER, 1 + JITTER, x.shape)
    return drawn


def inputs(tree: Any, seed: int, *, is_shuffled: bool = False) -> Any:
    """Inputs drawn anew: floating numbers between their own and 0.7 times it; what lies between 0 and 1 stays there.

    is_shuffled: whole numbers, such as ids and masks, change places within their array; else they stay.
    """
    random = np.random.default_rng(seed)

    def drawn(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: drawn(value) for key, value in x.items()}
        if isinstance(x, tuple | list):
            items = [drawn(value) for value in x]
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
        if not isinstance(x, np.ndarray):
            return x
        if not np.issubdtype(x.dtype, np.inexact) or np.array_equal(x, np.round(x), equal_nan=True):
            return random.permutation(x.ravel()).reshape(x.shape) if is_shuffled else x
        return x * random.uniform(1 - JITTER, 1.0, x.shape)

    return drawn(tree)


def constant(tree: Any) -> list[str]:
    """Inputs of one value in every place, which say nothing of how they are used: "input 1"."""
    found = []
    for i, each in enumerate(tree):
        arrays = list(arrays_of(each))
        if arrays and all(x.size > 1 and np.all(x == x.flat[0]) for x in arrays):
            found.append(f"input {i}")
        elif isinstance(each, dict):
            kinds = {key: list(arrays_of(value)) for key, value in each.items()}
            found += [
                f"input {i} {key}" for key, xs in kinds.items()
                if xs and all(x.size > 1 and np.all(x == x.flat[0]) for x in xs)
            ]  # fmt: skip
    return found


def arrays_of(tree: Any) -> Iterator[np.ndarray]:
    """Arrays of nested dictionaries, tuples and lists, from left to right."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, tuple | list):
        for each in tree:
            yield from arrays_of(each)
    elif isinstance(tree, np.ndarray):
        yield tree
