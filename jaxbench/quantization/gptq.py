"""GPTQ: round column by column, and let the remaining columns compensate for each error (S file).

Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1, with columns in the order of their inputs' size and scales
chosen beforehand ("static groups"), so that groups remain contiguous.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from scipy import linalg

from jaxbench.quantization import grids
from jaxbench.quantization.grids import Grid, Quantized, Rule

BLOCK = 128  # columns whose corrections are applied to the remaining columns at once
DAMPING = 0.01  # of the mean square of an input, added to all


def gptq(
    weights: Float[np.ndarray, "outputs inputs"],
    second_moment: Float[np.ndarray, "inputs inputs"],
    grid: Grid,
    *,
    rule: Rule = "mse",
    name: str = "matrix",
) -> Quantized:
    """Round a matrix to a grid, greedily minimising the error of its products.

    Args:
      second_moment: sum of x x^T over calibration inputs x.

    Raises:
      ValueError: calibration inputs are not finite.
    """
    squares = np.diagonal(second_moment).astype(np.float64)
    if not np.isfinite(second_moment).all() or not squares.any():
        raise ValueError(f"gptq: inputs of {name} are all 0 or not finite, mean square {squares.mean()}")
    scales, zeros = grids.ranges(weights, grid, rule=rule, importance=squares)
    order = np.argsort(-squares, kind="stable")
    inverse = _inverse_factor(second_moment, squares, order)
    group = order // (weights.shape[1] // scales.shape[1])
    rest = weights[:, order].astype(np.float32)
    found = np.empty(weights.shape, grid.dtype)
    for start in range(0, len(order), BLOCK):
        stop = min(start + BLOCK, len(order))
        errors = np.empty((len(weights), stop - start), np.float32)
        for j in range(start, stop):
            scale = scales[:, group[j]]
            zero = None if zeros is None else zeros[:, group[j]]
            code = grids.codes(rest[:, j], scale, zero, grid)
            found[:, order[j]] = code
            error = (rest[:, j] - grids.values(code, scale, zero, grid)) / inverse[j, j]
            rest[:, j + 1 : stop] -= np.outer(error, inverse[j, j + 1 : stop])
            errors[:, j - start] = error
        rest[:, stop:] -= errors @ inverse[start:stop, stop:]
    return Quantized(grid, found, scales, zeros)


def _inverse_factor(second_moment: np.ndarray, squares: np.ndarray, order: np.ndarray) -> Float[np.ndarray, "I I"]:
    """Upper Cholesky factor of the damped second moment's inverse, columns in order."""
    damped = second_moment.astype(np.float64)[np.ix_(order, order)]
    np.fill_diagonal(damped, squares[order] + DAMPING * squares.mean())
    factor = linalg.cholesky(damped, lower=True)
    inverse = linalg.cho_solve((factor, True), np.eye(len(order)))
    return linalg.cholesky(inverse, lower=False).astype(np.float32)


def product_error(
    weights: Float[np.ndarray, "outputs inputs"],
    rounded: Float[np.ndarray, "outputs inputs"],
    second_moment: Float[np.ndarray, "inputs inputs"],
) -> float:
    """Relative 2-norm of the rounding error of a matrix's products over the calibration inputs."""
    change = (rounded - weights).astype(np.float64)
    reference = weights.astype(np.float64)
    top = np.einsum("oi,ij,oj->", change, second_moment, change, optimize=True)
    bottom = np.einsum("oi,ij,oj->", reference, second_moment, reference, optimize=True)
    return float(np.sqrt(max(top, 0.0) / bottom)) if bottom > 0 else 0.0
