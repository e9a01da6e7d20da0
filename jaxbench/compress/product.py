"""Product quantisation of a text's vectors: each piece of 8 numbers becomes one of 256 centroids (S file).

The 256 centroids of each piece are learned from the vectors of the same text and stored in its file: some 295,000 bytes
for vectors of width 576, which only pays off for long texts.
Source: Jégou, Douze and Schmid 2011, IEEE TPAMI 33(1), section II.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.cluster.vq
from jaxtyping import Float32, UInt8

PIECE, CENTROIDS = 8, 256  # numbers per piece, centroids per piece
LEAST, MOST = 1024, 8192  # least vectors of a text, most vectors that centroids are learned from
ITERATIONS = 12  # of k-means


class Codes(NamedTuple):
    """Vectors as one byte per 8 numbers."""

    numbers: UInt8[np.ndarray, "M P"]  # indices of centroids
    centroids: Float32[np.ndarray, "P 256 8"]


def quantized(vectors: Float32[np.ndarray, "M D"]) -> Codes:
    """Quantise vectors.

    Raises:
      ValueError: as `learned` raises.
    """
    centroids = learned(len(vectors), lambda places: vectors[places])
    return Codes(coded(vectors, centroids), centroids)


def check(count: int, width: int) -> None:
    """Check that `count` vectors can be quantised.

    Raises:
      ValueError: they are too few to learn from, or their width is not a multiple of 8.
    """
    if count < LEAST or width % PIECE:
        raise ValueError(
            f"compressed text: dtype=pq of {count} vectors of {width}; wanted {LEAST} at least, and a multiple of "
            f"{PIECE}: take int8"
        )


def learned(count: int, taken: Callable[[np.ndarray], np.ndarray]) -> Float32[np.ndarray, "P 256 8"]:
    """Learn centroids of `count` vectors from at most MOST of them, drawn at random.

    Args:
      taken: returns the vectors [M D] at given indices.

    Raises:
      ValueError: as `check` raises.
    """
    random = np.random.default_rng(0)
    sample = taken(random.permutation(count)[:MOST])
    width = sample.shape[1]
    check(count, width)
    centroids = []
    for first in range(0, width, PIECE):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an empty cluster keeps its centroid
            found, _ = scipy.cluster.vq.kmeans2(
                sample[:, first : first + PIECE], CENTROIDS, iter=ITERATIONS, minit="points", rng=random
            )
        centroids.append(found.astype(np.float32))
    return np.stack(centroids)


def coded(vectors: Float32[np.ndarray, "M D"], centroids: Float32[np.ndarray, "P 256 8"]) -> UInt8[np.ndarray, "M P"]:
    """Index of the nearest centroid of each piece of each vector, whatever vectors are coded with it.

    In float64: scipy's distances come from a matrix product, which BLAS rounds otherwise for other numbers of rows. In
    float32, centroids that are almost equal then change places with how a text is divided into parts.
    """
    pieces = np.split(vectors.astype(np.float64), len(centroids), axis=1)
    pairs = zip(pieces, centroids.astype(np.float64), strict=True)
    return np.stack([scipy.cluster.vq.vq(piece, own)[0].astype(np.uint8) for piece, own in pairs], axis=1)


def dequantized(codes: Codes) -> Float32[np.ndarray, "M D"]:
    """Reconstruct vectors from codes."""
    pieces = codes.centroids[np.arange(len(codes.centroids)), codes.numbers]
    return pieces.reshape(len(codes.numbers), -1)
