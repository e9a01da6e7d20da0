"""Product quantisation of a text's vectors: pieces of 8 numbers, each as the number of its nearest of 256 (S file).

The 256 of each place are learned from the vectors of the same text, and lie in its file: some 295,000 bytes for vectors
of 576, which long texts alone are worth. Source: Jégou, Douze and Schmid 2011, IEEE TPAMI 33(1), section II.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.cluster.vq
from jaxtyping import Float32, UInt8

PIECE, CENTROIDS = 8, 256  # numbers of a piece, what each is one of
LEAST, MOST = 1024, 8192  # vectors: of a text, that the centroids are learned from
ITERATIONS = 12  # of k-means


class Codes(NamedTuple):
    """Vectors in a byte for every 8 numbers."""

    numbers: UInt8[np.ndarray, "M P"]  # of centroids
    centroids: Float32[np.ndarray, "P 256 8"]


def quantized(vectors: Float32[np.ndarray, "M D"]) -> Codes:
    """Codes of vectors.

    Raises:
      ValueError: as `learned` raises.
    """
    centroids = learned(len(vectors), lambda places: vectors[places])
    return Codes(coded(vectors, centroids), centroids)


def check(count: int, width: int) -> None:
    """Check that so many vectors can have codes.

    Raises:
      ValueError: they are too few to learn from, or their width is not a multiple of 8.
    """
    if count < LEAST or width % PIECE:
        raise ValueError(
            f"compressed text: dtype=pq of {count} vectors of {width}; wanted {LEAST} at least, and a multiple of "
            f"{PIECE}: take int8"
        )


def learned(count: int, taken: Callable[[np.ndarray], np.ndarray]) -> Float32[np.ndarray, "P 256 8"]:
    """Centroids of `count` vectors, learned from MOST of them at random.

    Args:
      taken: vectors [M D] at places.

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
            warnings.simplefilter("ignore", UserWarning)  # a centroid that nothing is nearest to stays where it was
            found, _ = scipy.cluster.vq.kmeans2(
                sample[:, first : first + PIECE], CENTROIDS, iter=ITERATIONS, minit="points", rng=random
            )
        centroids.append(found.astype(np.float32))
    return np.stack(centroids)


def coded(vectors: Float32[np.ndarray, "M D"], centroids: Float32[np.ndarray, "P 256 8"]) -> UInt8[np.ndarray, "M P"]:
    """The number of the nearest centroid of each piece of each vector."""
    pieces = np.split(vectors, len(centroids), axis=1)
    numbers = [scipy.cluster.vq.vq(piece, own)[0].astype(np.uint8) for piece, own in zip(pieces, centroids)]
    return np.stack(numbers, axis=1)


def dequantized(codes: Codes) -> Float32[np.ndarray, "M D"]:
    """The vectors that codes stand for."""
    pieces = codes.centroids[np.arange(len(codes.centroids)), codes.numbers]
    return pieces.reshape(len(codes.numbers), -1)
