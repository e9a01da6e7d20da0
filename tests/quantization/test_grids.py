"""Grids of few bits: nearest values, scales that are worth their search, the numbers of GGUF."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import constants, quants
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.native import formats
from jaxbench.quantization import blocks, grids
from jaxbench.quantization.grids import Grid

ALL = [
    *grids.NAMED.values(), Grid(4, 32, "integer"), Grid(3), Grid(3, 16, "integer"), Grid(2, 32, "least"), Grid(2),
    Grid(5, None, "integer", "float32"), Grid(6, 64, "none", "bfloat16"),
]  # fmt: skip


def _weights(seed: int, rows: int = 24, inputs: int = 128) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(4, (rows, inputs)).astype(np.float32) / 8


def _spread(part, inputs):
    return None if part is None else np.repeat(part, inputs // part.shape[1], axis=1)


@pytest.mark.parametrize("grid", ALL, ids=str)
@pytest.mark.parametrize("rule", grids.RULES)
def test_a_weight_in_range_goes_to_the_nearest_value_of_its_grid(grid, rule):
    weights = _weights(0)
    matrix = grids.nearest(weights, grid, rule=rule)
    scales, zeros = (_spread(part, weights.shape[1]) for part in (matrix.scales, matrix.zeros))
    error = np.abs(grids.dequantized(matrix) - weights)
    if grid.type == "e4m3":
        assert (error <= np.abs(weights) / 16 + np.abs(scales) / 512 + (rule == "percentile") * 9).all()
        return
    codes = matrix.codes.astype(int)
    low, high = grid.codes
    assert low <= codes.min() and codes.max() <= high
    for step in (-1, 1):  # no neighbouring code is nearer, unless the grid ends
        there = np.clip(codes + step, low, high)
        other = np.abs(grids.values(there, scales, zeros, grid) - weights)
        assert (error <= other * (1 + 1e-4) + 1e-7).all()


@pytest.mark.parametrize("grid", ALL, ids=str)
def test_searched_scales_are_never_worse_than_the_whole_range(grid):
    weights = _weights(1)
    importance = np.random.default_rng(2).gamma(0.5, size=weights.shape[1]).astype(np.float32)

    def errors(rule):
        change = grids.dequantized(grids.nearest(weights, grid, rule=rule, importance=importance)) - weights
        groups = (change**2 * importance).reshape(len(weights), -1, grid.group_size or weights.shape[1])
        return groups.sum(axis=2)

    assert (errors("mse") <= errors("minmax") * (1 + 1e-5)).all()
    if grid.bits <= 4:
        assert errors("mse").sum() < 0.97 * errors("minmax").sum()


@pytest.mark.parametrize("format", formats.BLOCK_BYTES)
@given(seed=st.integers(0, 99))
def test_blocks_are_what_gguf_reads(format, seed):
    matrix = grids.nearest(_weights(seed), grids.NAMED[format], rule="mse")
    rows = blocks.rows(matrix)
    read = quants.dequantize(rows.values, constants.GGMLQuantizationType[format.upper()])
    np.testing.assert_array_equal(read, grids.dequantized(matrix), strict=True)


@pytest.mark.parametrize("format", ["q4_0", "q4_1", "q8_0"])
def test_the_whole_range_is_as_good_as_ggmls_own_rounding(format):
    weights, kind = _weights(3, rows=256), constants.GGMLQuantizationType[format.upper()]
    theirs = np.linalg.norm(quants.dequantize(quants.quantize(weights, kind), kind) - weights)
    ours = np.linalg.norm(grids.dequantized(grids.nearest(weights, grids.NAMED[format])) - weights)
    assert ours <= 1.001 * theirs
    searched = np.linalg.norm(grids.dequantized(grids.nearest(weights, grids.NAMED[format], rule="mse")) - weights)
    assert searched < theirs


@pytest.mark.parametrize("grid", ALL, ids=str)
@pytest.mark.parametrize("rule", grids.RULES)
def test_weights_that_are_all_alike_are_kept(grid, rule):
    for value in (0.0, 0.5, -0.25):
        weights = np.full((4, 128), value, np.float32)
        error = np.abs(grids.dequantized(grids.nearest(weights, grid, rule=rule)) - weights)
        assert (error <= 2e-3 * abs(value)).all(), value


def test_a_grid_without_a_type_of_its_own_is_no_row_of_native_kernels():
    assert blocks.rows(grids.nearest(_weights(0), Grid(3))) is None
    assert blocks.rows(grids.nearest(_weights(0), grids.NAMED["fp8"])) is None


@pytest.mark.parametrize(
    ("grid", "inputs", "message"),
    [
        (Grid(1), 32, "bits=1"),
        (Grid(9), 32, "bits=9"),
        (Grid(4, 0), 32, "group_size=0"),
        (Grid(4, 48), 64, "group_size=48 does not divide the 64 inputs of it"),
        (Grid(4, type="e4m3"), 64, "type=e4m3 has 8 bits"),
        (Grid(8, zero="least", type="e4m3"), 64, "zero=least"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(grid, inputs, message):
    with pytest.raises(ValueError, match=message):
        grids.check(grid, inputs, "it")


@pytest.mark.parametrize("rule", grids.RULES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_weight_that_is_not_finite_is_refused_by_every_rule(rule, value):
    weights = np.random.default_rng(0).normal(size=(1, 4096)).astype(np.float32)  # percentile leaves four out
    weights[0, 7] = value
    with pytest.raises(ValueError, match="wanted finite ones"):
        grids.nearest(weights, grids.NAMED["int8"], rule=rule)


def test_weights_without_a_finite_scale_are_refused():
    with pytest.raises(ValueError, match="no finite scale in float16"):
        grids.nearest(np.full((1, 32), 3e38, np.float32), grids.NAMED["q8_0"])
    with pytest.raises(ValueError, match="rule='best' is not one of"):
        grids.nearest(_weights(0), Grid(4), rule="best")
