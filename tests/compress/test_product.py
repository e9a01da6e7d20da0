"""Product quantisation: what has few distinct pieces comes back as it was, bytes and errors of what has many."""

import numpy as np
import pytest

from jaxbench.compress import document, product


def test_pieces_that_are_few_come_back_as_they_were():
    random = np.random.default_rng(0)
    pieces = random.standard_normal((3, 8)).astype(np.float32)
    vectors = pieces[random.integers(0, 3, (product.LEAST, 2))].reshape(product.LEAST, 16)
    np.testing.assert_allclose(product.dequantized(product.quantized(vectors)), vectors, atol=1e-5)


def test_numbers_of_every_kind_are_nearer_than_their_spread_and_the_bytes_are_counted(tmp_path):
    random = np.random.default_rng(1)
    vectors = random.standard_normal((2048, 24)).astype(np.float32)
    codes = product.quantized(vectors)
    assert codes.numbers.shape == (2048, 3) and codes.numbers.dtype == np.uint8
    error = np.mean((product.dequantized(codes) - vectors) ** 2)
    assert 0.2 < error < 0.5  # one bit a number: no code of 8 independent normal numbers does better than 1/4
    spans = np.stack([np.arange(2048), np.arange(1, 2049)], axis=1).astype(np.int64)
    positions = np.arange(0, 4096, 2, dtype=np.int32)
    result = document.CompressionResult(vectors, spans, positions, 2, 4096, 0.0, "1" * 64, "abc")
    sizes = {dtype: document.save(tmp_path / f"{dtype}.safetensors", result, dtype=dtype) for dtype in document.DTYPES}
    found = document.load(tmp_path / "pq.safetensors")
    np.testing.assert_allclose(found.vectors, product.dequantized(codes), atol=0.02)
    np.testing.assert_array_equal(found.spans, spans)
    assert sizes["int8"] - sizes["pq"] > 2048 * (24 + 4 - 3) - 3 * 256 * 8 * 2 - 400


def test_a_short_text_or_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="dtype=pq of 1023 vectors of 16; wanted 1024 at least"):
        product.quantized(np.zeros((1023, 16), np.float32))
    with pytest.raises(ValueError, match="and a multiple of 8: take int8"):
        product.quantized(np.zeros((1024, 12), np.float32))


def test_the_nearest_centroid_is_found_where_centroids_are_closer_than_float32_tells_of_their_products():
    random = np.random.default_rng(0)
    centroids = (100 + random.standard_normal((2, product.CENTROIDS, product.PIECE))).astype(np.float32)
    vectors = (100 + random.standard_normal((200, 2 * product.PIECE))).astype(np.float32)
    apart = vectors.reshape(200, 2, 1, product.PIECE).astype(np.float64) - centroids
    found = product.coded(vectors, centroids)
    np.testing.assert_array_equal(found, np.argmin(np.sum(apart**2, axis=-1), axis=-1))
    by_rows = np.concatenate([product.coded(row[None], centroids) for row in vectors])
    np.testing.assert_array_equal(found, by_rows)
