"""Grids: the values that few-bit weights can have, and how their scales are chosen, in numpy (S file).

Weights are [outputs, inputs]. Groups of consecutive inputs of an output share a scale and, on some grids, a zero:

| zero | codes | weight |
|---|---|---|
| none | -2^(bits-1) .. 2^(bits-1) - 1, for 8 bits -127 .. 127 | scale code; GGUF's Q4_0 and Q8_0, int8 |
| integer | 0 .. 2^bits - 1 | scale (code - zero), zero is a code; compressed-tensors' asymmetric weights |
| least | 0 .. 2^bits - 1 | scale code + zero, zero is a weight; GGUF's Q4_1 |

With type e4m3 a code is an 8-bit float up to 448 (Micikevicius et al. 2022, arXiv:2209.05433), and zero is none.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

Rule = Literal["minmax", "percentile", "mse"]
RULES = ("minmax", "percentile", "mse")
PERCENTILE = 0.999  # of |weight| in a group, or of each of its ends, that `percentile` keeps in range
SHRINK = np.linspace(1.0, 0.5, 11)  # fractions of the range that `mse` tries


class Grid(NamedTuple):
    """The values that a weight may have."""

    bits: int  # 2 to 8
    group_size: int | None = 32  # inputs that share a scale; None = all of an output's
    zero: Literal["none", "integer", "least"] = "none"
    scale_dtype: Literal["float32", "float16", "bfloat16"] = "float16"
    type: Literal["int", "e4m3"] = "int"

    @property
    def dtype(self) -> np.dtype:
        """Type of codes in memory."""
        if self.type == "e4m3":
            import ml_dtypes

            return np.dtype(ml_dtypes.float8_e4m3fn)
        return np.dtype(np.int8 if self.zero == "none" else np.uint8)

    @property
    def codes(self) -> tuple[int, int]:
        """The smallest and the largest code."""
        if self.type == "e4m3":
            return -448, 448
        if self.zero == "none":
            return -(2 ** (self.bits - 1)) + (self.bits == 8), 2 ** (self.bits - 1) - 1
        return 0, 2**self.bits - 1

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight with its share of scale and zero; a scale and a zero per output are not counted."""
        if self.group_size is None:
            return float(self.bits)
        scale = 32 if self.scale_dtype == "float32" else 16
        return self.bits + (scale + {"none": 0, "integer": self.bits, "least": scale}[self.zero]) / self.group_size


class Quantized(NamedTuple):
    """A matrix on a grid."""

    grid: Grid
    codes: Int[np.ndarray, "outputs inputs"]  # int8 where zero is none, else uint8; or e4m3
    scales: Float[np.ndarray, "outputs groups"]  # float32, values of the grid's scale_dtype
    zeros: Float[np.ndarray, "outputs groups"] | None  # float32: whole numbers, or least weights in scale_dtype


# Named grids: GGUF's; int8 and e4m3 with one scale per output.
NAMED = {
    "q8_0": Grid(8),
    "q4_0": Grid(4),
    "q4_1": Grid(4, zero="least"),
    "int8": Grid(8, None, scale_dtype="float32"),
    "fp8": Grid(8, None, scale_dtype="float32", type="e4m3"),
}


def check(grid: Grid, inputs: int, name: str) -> None:
    """Check that a grid fits a matrix.

    Raises:
      ValueError: bits outside 2 to 8, other than 8 or a zero with e4m3, or groups that do not divide the inputs.
    """
    if grid.type == "e4m3" and (grid.bits != 8 or grid.zero != "none"):
        raise ValueError(f"quantize: type=e4m3 has 8 bits and zero=none, got bits={grid.bits}, zero={grid.zero}")
    if not 2 <= grid.bits <= 8:
        raise ValueError(f"quantize: bits={grid.bits}, wanted 2 to 8")
    if grid.group_size is not None and (grid.group_size < 1 or inputs % grid.group_size):
        raise ValueError(f"quantize: group_size={grid.group_size} does not divide the {inputs} inputs of {name}")


def nearest(
    weights: Float[np.ndarray, "outputs inputs"],
    grid: Grid,
    *,
    rule: Rule = "minmax",
    importance: Float[np.ndarray, " inputs"] | None = None,
) -> Quantized:
    """Round every weight to the nearest value of the grid.

    Args:
      rule: how scales are chosen: minmax has all weights in range; percentile leaves out the largest 0.1 %; mse takes
        the range with the least squared error.
      importance: weight of each input in that error, such as its mean square; None = all equal.
    """
    scales, zeros = ranges(weights, grid, rule=rule, importance=importance)
    size = weights.shape[1] // scales.shape[1]
    each = (np.repeat(part, size, axis=1) if part is not None else None for part in (scales, zeros))
    return Quantized(grid, codes(weights, *each, grid), scales, zeros)


def dequantized(matrix: Quantized) -> Float[np.ndarray, "outputs inputs"]:
    """Dequantise a matrix to float32 weights."""
    size = matrix.codes.shape[1] // matrix.scales.shape[1]
    scales = np.repeat(matrix.scales, size, axis=1)
    zeros = None if matrix.zeros is None else np.repeat(matrix.zeros, size, axis=1)
    return values(matrix.codes, scales, zeros, matrix.grid)


def codes(weights: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, grid: Grid) -> np.ndarray:
    """Codes of weights; scales and zeros broadcast against them. With a scale of 0, the code is that of weight 0."""
    shifted = weights - zeros if grid.zero == "least" else weights
    steps = np.divide(shifted, scales, out=np.zeros(weights.shape, np.float32), where=scales != 0)
    if grid.zero == "integer":
        steps = steps + zeros
    steps = np.clip(steps if grid.type == "e4m3" else np.rint(steps), *grid.codes)
    return steps.astype(grid.dtype)


def values(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, grid: Grid) -> np.ndarray:
    """Dequantise codes to weights; scales and zeros broadcast against them."""
    steps = codes.astype(np.float32)
    if grid.zero == "integer":
        return (steps - zeros) * scales
    return steps * scales if grid.zero == "none" else steps * scales + zeros


def ranges(
    weights: Float[np.ndarray, "outputs inputs"],
    grid: Grid,
    *,
    rule: Rule,
    importance: Float[np.ndarray, " inputs"] | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Choose scales and zeros [outputs, groups] for a matrix; `nearest` documents the arguments.

    Raises:
      ValueError: an unknown rule, or weights that are too large for the scales' type or not finite.
    """
    if rule not in RULES:
        raise ValueError(f"quantize: rule={rule!r} is not one of {', '.join(RULES)}")
    groups = weights.astype(np.float32).reshape(len(weights), -1, grid.group_size or weights.shape[1])
    low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError(f"quantize: weights from {low.min()} to {high.max()}, wanted finite ones")
    if rule == "percentile":
        low, high = (np.quantile(groups, q, axis=2, keepdims=True) for q in (1 - PERCENTILE, PERCENTILE))
    if rule == "mse":
        chosen = _least_error(groups, low, high, grid, importance)
    else:
        chosen = _spanned(low, high, grid)
    scales, zeros = (None if part is None else part[:, :, 0] for part in chosen)
    if not np.isfinite(scales).all() or (zeros is not None and not np.isfinite(zeros).all()):
        largest = np.abs(weights).max()
        raise ValueError(f"quantize: weights up to {largest} have no finite scale in {grid.scale_dtype}")
    return scales, zeros


def _spanned(low: np.ndarray, high: np.ndarray, grid: Grid, flip: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
    """Scale and zero that exactly cover [low, high].

    With few signed bits there is one more code below 0 than above: the end further from 0 gets it, by a negative scale
    if that is the upper end (as in ggml). flip gives it to the other end.
    """
    if grid.zero == "none":
        largest = np.maximum(np.abs(low), np.abs(high))
        if grid.bits > 4:
            return _typed(largest / grid.codes[1], grid), None
        sign = np.where((high > -low) ^ flip, -1.0, 1.0)
        return _typed(sign * largest / (grid.codes[1] if flip else -grid.codes[0]), grid), None
    if grid.zero == "least":
        return _typed((high - low) / grid.codes[1], grid), _typed(low, grid)
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    scale = _typed((high - low) / grid.codes[1], grid)
    zero = np.divide(-low, scale, out=np.zeros_like(low), where=scale != 0)
    return scale, np.clip(np.rint(zero), *grid.codes)


def _typed(part: np.ndarray, grid: Grid) -> np.ndarray:
    """Round values to the scales' type; the result is float32."""
    if grid.scale_dtype == "bfloat16":
        import ml_dtypes

        return part.astype(ml_dtypes.bfloat16).astype(np.float32)
    with np.errstate(over="ignore"):  # overflows become infinite, which `ranges` rejects
        return part.astype(grid.scale_dtype).astype(np.float32)


def _least_error(groups, low, high, grid: Grid, importance) -> tuple[np.ndarray, np.ndarray | None]:
    """Choose, for each group, the shrunk range, refitted to its codes, with the least squared error."""
    weight = np.float32(1) if importance is None else importance.astype(np.float32).reshape(1, -1, groups.shape[2])
    best = best_error = None
    for span in _candidates(low, high, grid):
        for scale, zero in (span, _refitted(groups, span, grid, weight)):
            error = (values(codes(groups, scale, zero, grid), scale, zero, grid) - groups) ** 2 * weight
            error = error.sum(axis=2, keepdims=True)
            if best is None:
                best, best_error = (scale, zero), error
                continue
            better = error < best_error
            best_error = np.where(better, error, best_error)
            best = tuple(None if new is None else np.where(better, new, old) for new, old in zip((scale, zero), best))
    return best


def _candidates(low: np.ndarray, high: np.ndarray, grid: Grid):
    """Ranges to try: shrunk on both sides; with few signed bits, with the spare code at either end."""
    for factor in SHRINK.astype(np.float32):
        yield _spanned(low * factor, high * factor, grid)
        if grid.zero == "none" and grid.bits <= 4:
            yield _spanned(low * factor, high * factor, grid, flip=True)


def _refitted(groups, span, grid: Grid, weight) -> tuple[np.ndarray, np.ndarray | None]:
    """Refit the scale (and the least weight, on a grid that has one) to a range's codes by weighted least squares."""
    scale, zero = span
    steps = codes(groups, scale, zero, grid).astype(np.float32)
    steps = steps - zero if grid.zero == "integer" else steps

    def total(x: np.ndarray) -> np.ndarray:
        return (x * weight).sum(axis=2, keepdims=True)

    if grid.zero != "least":
        squares = total(steps**2)
        fitted = np.divide(total(steps * groups), squares, out=scale.copy(), where=squares > 0)
        return _typed(fitted, grid), zero
    count, sums, squares = total(np.ones_like(steps)), total(steps), total(steps**2)
    first, second = total(groups), total(steps * groups)
    spread = squares * count - sums**2
    is_line = spread > 1e-6 * squares * count
    fitted = np.divide(second * count - first * sums, spread, out=scale.copy(), where=is_line)
    fitted = _typed(fitted, grid)
    least = np.divide(first - fitted * sums, count, out=zero.copy(), where=is_line & (count > 0))
    return fitted, _typed(least, grid)
