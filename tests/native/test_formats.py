"""Formats of packed weights: the numbers that GGUF's own package reads, and the same tiles from numpy and from C."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import constants, quants
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.native import checkpoint, formats, library

needs_library = pytest.mark.skipif(not library.is_available(), reason="native kernels need a C compiler")
SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 100))


def _weights(outputs: int, inputs: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(outputs, inputs)).astype(np.float32)


def _random_blocks(format: str, outputs: int, groups: int, seed: int) -> formats.Rows:
    """Any bytes as integers, any finite scales, subnormal ones too."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (outputs, groups, formats.BLOCK_BYTES[format]), dtype=np.uint8)
    for place in range(0, 4 if format == "q4_1" else 2, 2):
        scales = random.normal(size=(outputs, groups)) * 10.0 ** random.integers(-7, 3, (outputs, groups))
        blocks[:, :, place : place + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return formats.Rows(format, blocks.reshape(outputs, -1), None, 32 * groups)


@pytest.mark.parametrize("format", formats.BLOCK_BYTES)
@given(shape=st.tuples(st.integers(1, 40), st.integers(1, 5)), seed=st.integers(0, 99))
def test_blocks_stand_for_the_numbers_that_gguf_reads(format, shape, seed):
    rows = _random_blocks(format, *shape, seed)
    expected = quants.dequantize(rows.values, constants.GGMLQuantizationType[format.upper()])
    np.testing.assert_array_equal(formats.dequantized(rows), expected, strict=True)


@pytest.mark.parametrize("format", formats.FORMATS)
def test_quantised_weights_are_within_half_a_step(format):
    values = _weights(40, 64, 3)
    error = np.abs(formats.dequantized(checkpoint.quantized(values, format)) - values)
    of_group = np.abs(values.reshape(40, 2, 32)).max(axis=2)
    step = {"float32": 0, "bfloat16": 2**-7, "int8": 1 / 127, "q8_0": 1 / 127, "q4_0": 1 / 8, "q4_1": 2 / 15}[format]
    largest = np.abs(values).max(axis=1)[:, None] if format == "int8" else of_group.repeat(32, axis=1)
    half = 1.0 if format == "q4_0" else 0.57  # q4_0 cuts the far end off; scales in 16 bits are themselves rounded
    assert (error <= half * step * largest).all()


@needs_library
@pytest.mark.parametrize("format", formats.FORMATS)
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_c_packs_the_tiles_that_numpy_packs(format, shape, seed):
    outputs, inputs = shape
    if format in formats.BLOCK_BYTES:
        rows = _random_blocks(format, outputs, -(-inputs // 32), seed)
    else:
        rows = checkpoint.quantized(_weights(outputs, inputs, seed), format)
    packed = library.pack(rows)
    np.testing.assert_array_equal(packed.data, formats.packed(rows), strict=True)
    assert packed.data.nbytes == formats.packed_bytes(format, rows.inputs, outputs)


@needs_library
@pytest.mark.parametrize("format", formats.FORMATS)
def test_an_embedding_is_the_dequantised_row(format):
    rows = checkpoint.quantized(_weights(70, 64, 5), format)
    tokens = np.array([0, 69, 33, 31, 32, 69], np.int32)
    np.testing.assert_array_equal(
        library.embed(tokens, library.pack(rows)), formats.dequantized(rows)[tokens], strict=True
    )


@needs_library
def test_a_token_outside_the_embedding_is_zeros():
    packed = library.pack(checkpoint.quantized(_weights(40, 32, 5), "q8_0"))
    assert not library.embed(np.array([-1, 40, 2**31 - 1, -(2**31)], np.int32), packed).any()


def test_bfloat16_is_rounded_to_nearest_with_ties_to_even():
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0xFF800000, 0x7F7FFFFF], np.uint32)
    expected = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xFF80, 0x7F80]
    assert formats.as_bfloat16(bits.view(np.float32)).tolist() == expected


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000])
def test_every_nan_stays_one_in_bfloat16(bits):
    rounded = formats.as_bfloat16(np.array([bits, 0x3F800000], np.uint32).view(np.float32))
    assert np.isnan((rounded[:1].astype(np.uint32) << 16).view(np.float32)) and rounded[1] == 0x3F80


@pytest.mark.parametrize("units", [1, 36, 130, 250, 2**23 * 100, 2**23 * 400])
def test_weights_too_small_for_a_scale_of_full_precision_keep_their_sign_or_become_zeros(units):
    values = np.array([[units, -units, units // 2]], np.float64) * 2.0**-149
    integers, scales = formats.as_int8(values.astype(np.float32))
    error = np.abs(integers * scales.astype(np.float64)[:, None] - values)
    assert (error <= formats.SMALLEST).all() and (np.sign(integers[0]) * [1, -1, 1] >= 0).all()
