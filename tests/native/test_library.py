"""Products by packed matrices through ctypes: exact, and the same bits whatever the batch and the threads."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.native import checkpoint, formats, library

if not library.is_available():
    pytest.skip("native kernels need a C compiler", allow_module_level=True)

INPUTS, OUTPUTS = 96, 70


@functools.cache
def _packed(format: str) -> tuple[library.Packed, np.ndarray]:
    """A matrix of a format, and the weights that it stands for."""
    values = np.random.default_rng(7).normal(size=(OUTPUTS, INPUTS)).astype(np.float32)
    rows = checkpoint.quantized(values, format)
    return library.pack(rows), formats.dequantized(rows)


def _rows(count: int, seed: int, spread: float = 1.0) -> np.ndarray:
    return (spread * np.random.default_rng(seed).normal(size=(count, INPUTS))).astype(np.float32)


@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("format", formats.FORMATS)
@given(
    rows=st.integers(1, 70), start=st.integers(0, 69), threads=st.integers(2, 6), seed=st.integers(0, 99),
    spread=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
)  # fmt: skip
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(format, planes, rows, start, threads, seed, spread):
    packed, _ = _packed(format)
    x = _rows(rows, seed, spread)
    alone = library.linear(x, packed, planes=planes, threads=1)
    together = library.linear(x[start % rows :], packed, planes=planes, threads=threads)
    np.testing.assert_array_equal(together, alone[start % rows :], strict=True)


@pytest.mark.parametrize("format", formats.FORMATS)
def test_a_product_is_that_of_the_dequantised_weights(format):
    packed, weights = _packed(format)
    x, bias = _rows(9, 1), np.linspace(-1, 1, OUTPUTS, dtype=np.float32)
    expected = x.astype(np.float64) @ weights.T.astype(np.float64) + bias
    np.testing.assert_allclose(library.linear(x, packed, bias), expected, rtol=0, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("format", formats.FORMATS)
def test_a_value_that_is_not_finite_shows_in_its_row_and_in_no_other(format, planes, bad):
    packed, _ = _packed(format)
    x = _rows(5, 2)
    clean = library.linear(x, packed, planes=planes)
    x[3, 40] = bad
    spoilt = library.linear(x, packed, planes=planes)
    assert not np.isfinite(spoilt[3]).any()
    np.testing.assert_array_equal(np.delete(spoilt, 3, axis=0), np.delete(clean, 3, axis=0))


@given(
    rows=st.lists(
        st.lists(st.sampled_from([-np.inf, -1.5, 0.0, 2.5, np.inf, np.nan]), min_size=300, max_size=300),
        min_size=1,
        max_size=3,
    )
)
def test_the_largest_is_the_one_that_numpy_finds(rows):
    logits = np.array(rows, np.float32)
    np.testing.assert_array_equal(library.largest(logits), logits.argmax(axis=1))


@pytest.mark.parametrize(
    ("x", "bias", "planes"),
    [
        (np.zeros((2, INPUTS + 1)), None, 3),
        (np.zeros(INPUTS), None, 3),
        (np.zeros((2, INPUTS)), np.zeros(OUTPUTS + 1), 3),
        (np.zeros((2, INPUTS)), None, 2),
    ],
)
def test_shapes_that_do_not_fit_are_refused(x, bias, planes):
    with pytest.raises(ValueError, match="linear: "):
        library.linear(x, _packed("q8_0")[0], bias, planes=planes)


def test_no_rows_are_no_outputs():
    assert library.linear(np.zeros((0, INPUTS)), _packed("q4_0")[0]).shape == (0, OUTPUTS)


def test_structures_have_the_size_that_c_gives_them():
    assert library.load().jaxbench_block_call_bytes() == library.ctypes.sizeof(library.BlockCall)
