"""Measurement of gate P3: products of integers that are exact in the stated type and wrong in any narrower one.

Operands have more bits than a narrower type holds, results no more than the stated type holds: 13 and 10 bits, whose
sums of two products fill the 24 bits of a float32; 26 and 25 bits for the 53 of a float64. A TensorFloat-32 product
(11 bits), one in bfloat16 (8), or one of three bfloat16 passes (which leave out the product of the low parts) is off by
whole numbers, and so is float32 if float64 is stated (S file).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxbench.parity import distance, gates

BITS = {"float32": (13, 10), "float64": (26, 25)}  # of the left and right operand
SIZE = 64  # rows and columns: large enough for a device's fast kernels


class Operands(NamedTuple):
    """Integers [SIZE SIZE] stored in the stated type; each row of `left` and of `gradient` has two nonzeros."""

    left: np.ndarray
    right: np.ndarray
    gradient: np.ndarray  # of a loss with respect to left @ right; its product with right's transpose is exact too


def operands(dtype: str) -> Operands:
    """Make odd integers that use every allowed bit, at random places.

    Raises:
      ValueError: the type is not one whose precision is stated.
    """
    if dtype not in BITS:
        raise ValueError(f"products: dtype={dtype!r} is not one of {', '.join(BITS)}")
    random, (wide, narrow) = np.random.default_rng(0), BITS[dtype]

    def odd(bits: int, shape: tuple[int, ...]) -> np.ndarray:
        return 2 * random.integers(2 ** (bits - 2), 2 ** (bits - 1), shape) + 1

    def two_a_row() -> np.ndarray:
        x = np.zeros((SIZE, SIZE))
        for row in x:
            row[random.choice(SIZE, 2, replace=False)] = odd(wide, (2,))
        return x

    return Operands(*(x.astype(dtype) for x in (two_a_row(), odd(narrow, (SIZE, SIZE)), two_a_row())))


def attended(dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make query [1 2 1 4], keys [1 1 4 2] and values [1 1 2 4] of the stated type, for causal attention of two tokens.

    The second token's scores differ by 2 / sqrt(4) if its query keeps all its bits, and by another number otherwise;
    values of both keys hold as many bits.
    """
    bits = BITS[dtype][0]
    query = np.zeros((1, 2, 1, 4), dtype)
    query[0, 1, 0, :2] = 2**bits - 1, 2**bits - 3
    key = np.zeros((1, 1, 4, 2), dtype)
    key[0, 0, 0, 0] = key[0, 0, 1, 1] = 1
    value = np.zeros((1, 1, 2, 4), dtype)
    value[0, 0, 0, 0] = value[0, 0, 1, 1] = 2**bits - 1
    return query, key, value


def gate(found: dict[str, dict[str, np.ndarray]], dtype: str, settings: dict[str, Any]) -> gates.Gate:
    """Gate P3: by measurement, every product of every backend, by name, has the precision of the stated type.

    The error is in epsilons of the type; the note holds the settings.
    """
    left, right, gradient = (x.astype(np.int64) for x in operands(dtype))
    share = 1.0 / (1.0 + np.exp(-1.0))  # of the first key: scores differ by 1
    mixed = (2 ** BITS[dtype][0] - 1) * np.array([[1.0, 0.0, 0.0, 0.0], [share, 1.0 - share, 0.0, 0.0]])
    wanted = {"product": left @ right, "gradient": gradient @ right.T, "attention": mixed}
    errors = {}
    for backend, values in found.items():
        for name, exact in wanted.items():
            value = values[name]
            is_stated = value.dtype == dtype  # a float32 array is wrong if float64 is stated, whatever its values
            error = distance.relative_error(value, exact) if is_stated else float("inf")
            errors[f"{backend}: {name}"] = error / distance.MACHINE_EPSILON[dtype]
    where = max(errors, key=errors.__getitem__)
    limit = 8.0  # attention's exponentials round; products are exact
    note = ", ".join(f"{name}={value}" for name, value in settings.items())
    what = f"precision of products, {dtype}, measured"
    return gates.Gate("P3", what, errors[where] <= limit, errors[where], limit, where, note)
