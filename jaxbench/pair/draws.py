"""Draw the objective's targets, and further weights and inputs on which the whole functions are compared (S file)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.parity import distance

SALT = b"targets of jaxbench.pair"
JITTER = 0.3  # of weights and inputs, relative
PLAIN = 2.0**8  # sizes of outputs, and their inverses, up to which the objective takes them as they are
LEAST_SIZE = 2.0**-16  # of an output's smaller values relative to its largest: still smaller ones may be rounding
SMALL, LARGER = 1e-2, 0.3  # a weight with an RMS below SMALL, such as a layer scale, is scaled to an RMS of LARGER


class Term(NamedTuple):
    """One output's part of the objective, half the mean square of output / size - target."""

    target: np.ndarray  # NaN where the objective skips the output
    size: np.ndarray | float  # powers of two, so that the division is exact; 1.0 for usual outputs


def terms(outputs: Sequence[np.ndarray], inputs: Any) -> tuple[Term, ...]:
    """Return the objective's terms, every value at its own size: large outputs hide no gradients of small ones."""
    pairs = zip(targets(outputs, inputs), map(sizes, outputs), strict=True)
    return tuple(Term(target, size) for target, size in pairs)


def sizes(output: np.ndarray) -> np.ndarray | float:
    """Return the size of every value of an output: the RMS of its class (distance.size_limits) as a power of two.

    1.0 where all are within PLAIN of 1.
    """
    values = np.abs(output)
    values = np.where(values <= distance.MASK, values, 0.0)  # infinities and NaN have no size
    found, upper, largest = np.ones(values.shape), np.inf, 0.0
    for lower in (*distance.size_limits(values), np.finfo(float).smallest_subnormal):
        is_here = (values >= lower) & (values < upper)
        upper = lower
        if is_here.any():
            top = float(values[is_here].max())
            rms = top * float(np.sqrt(np.mean(np.square(values[is_here] / top))))
            largest = largest or rms
            found[is_here] = 2.0 ** np.round(np.log2(max(rms, LEAST_SIZE * largest)))
    found[values == 0.0] = np.median(found[values > 0.0]) if values.any() else 1.0
    return 1.0 if np.all((found <= PLAIN) & (found >= 1.0 / PLAIN)) else found


def targets(outputs: Sequence[np.ndarray], inputs: Any) -> tuple[np.ndarray, ...]:
    """Draw normal targets for the outputs; NaN, which the objective skips, where an output stands for infinity.

    The seed is a hash of the inputs: an example input is often default_rng(0).standard_normal(shape) itself, and an
    output near its own target has no gradient.
    """
    digest = hashlib.sha256(SALT)
    for x in arrays_of(inputs):
        digest.update(np.ascontiguousarray(x).tobytes())
    random = np.random.default_rng(int.from_bytes(digest.digest()[:8], "big"))
    return tuple(np.where(np.abs(y) > distance.MASK, np.nan, _normal(random, y)) for y in outputs)


def _normal(random: np.random.Generator, like: np.ndarray) -> np.ndarray:
    """Draw normal numbers of another array's shape, complex if it is."""
    drawn = random.standard_normal(like.shape)
    return drawn + 1j * random.standard_normal(like.shape) if np.iscomplexobj(like) else drawn


def weights(tensors: Mapping[str, np.ndarray], names: Sequence[str], seed: int) -> dict[str, np.ndarray]:
    """Return all tensors, with those of the given names redrawn around their values.

    Signs and zeros stay. A tensor so small that it hides what it multiplies, such as a layer scale of 1e-6, is scaled
    up.
    """
    random, drawn = np.random.default_rng(seed), dict(tensors)
    for name in sorted(names):
        x = tensors[name]
        rms = float(np.sqrt(np.mean(np.abs(x) ** 2))) if x.size else 0.0
        factor = LARGER / rms if 0.0 < rms < SMALL else 1.0
        drawn[name] = x * factor * random.uniform(1 - JITTER, 1 + JITTER, x.shape)
    return drawn


def inputs(tree: Any, seed: int, *, is_shuffled: bool = False) -> Any:
    """Redraw the inputs: floating values are scaled by 0.7 to 1, so that values between 0 and 1 stay in that range.

    Arrays of whole numbers, such as ids and masks, are shuffled within themselves if is_shuffled, else they stay.
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
    """Return the names ("input 1") of constant inputs, which do not show how they are used."""
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
    """Yield the arrays of nested dictionaries, tuples and lists, from left to right."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, tuple | list):
        for each in tree:
            yield from arrays_of(each)
    elif isinstance(tree, np.ndarray):
        yield tree
