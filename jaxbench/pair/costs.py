"""Costs of matching a PyTorch tensor with a JAX array, by names, classes, order of use and values (S file)."""

from __future__ import annotations

import collections
import difflib
from collections.abc import Iterable, Mapping

import numpy as np

from jaxbench.pair.naming import Leaf
from jaxbench.parity import distance

WEIGHT_KIND, WEIGHT_NAME, WEIGHT_ROLE, WEIGHT_ORDER = 3.0, 1.5, 1.0, 1.5
WEIGHT_UNORDERED = 0.01  # of the position among names: only breaks ties
# An equal path outweighs all of these and the costs by module; a kernel's layout and equal values outweigh it.
WEIGHT_PATH, WEIGHT_LAYOUT, WEIGHT_VALUES = 40.0, 60.0, 80.0


def rarities(leaves: Iterable[Leaf]) -> dict[str, float]:
    """Return the weight of every word in some names: a word that is in many of them distinguishes little."""
    counts = collections.Counter(word for leaf in leaves for word in set(leaf.words))
    return {word: 1.0 / count for word, count in counts.items()}


def name_cost(array: Leaf, tensor: Leaf, weights: Mapping[str, float], *, is_path: bool) -> float:
    """Return the cost of matching a tensor with an array by their names and classes; 0 where all agree."""
    cost = WEIGHT_KIND * (array.kind != tensor.kind)
    cost += WEIGHT_NAME * (1.0 - _similarity(array.words, tensor.words, weights))
    cost += WEIGHT_ROLE * bool(array.role and tensor.role and array.role != tensor.role)
    return WEIGHT_LAYOUT * _fits_only_untransposed(array, tensor) + (0.0 if is_path else cost + WEIGHT_PATH)


def _fits_only_untransposed(array: Leaf, tensor: Leaf) -> bool:
    """True if a matrix fits only untransposed, though the two frameworks store it transposed to each other."""
    is_matrix = len(array.shape) == len(tensor.shape) == 2 and not tensor.is_bare
    return is_matrix and array.is_reversed != tensor.is_reversed and array.shape != tensor.shape[::-1]


def other_cost(array: Leaf, tensor: Leaf, rank: int, other_rank: int) -> float:
    """Return the cost by order of use and by values."""
    is_ordered = array.is_ordered and tensor.is_ordered
    cost = (WEIGHT_ORDER if is_ordered else WEIGHT_UNORDERED) * min(abs(rank - other_rank), 3) / 3
    if array.value is not None and tensor.value is not None:
        cost += WEIGHT_VALUES * (not same_values(array.value, tensor.value))
    return cost


def _similarity(words: tuple[str, ...], others: tuple[str, ...], weights: Mapping[str, float]) -> float:
    """Return the weighted share of the words of two paths that both have in the same order; 1 for two empty paths."""
    if not words and not others:
        return 1.0
    blocks = difflib.SequenceMatcher(None, words, others, autojunk=False).get_matching_blocks()
    common = sum(weights[word] for block in blocks for word in words[block.a : block.a + block.size])
    return 2 * common / sum(weights[word] for word in (*words, *others))


def same_values(value: np.ndarray, other: np.ndarray) -> bool:
    """True if two arrays hold the same numbers in any order, to float32 rounding, and are not constant."""
    a, b = distance.widest(np.sort(value, axis=None)), distance.widest(np.sort(other, axis=None))
    return bool(a.size and a[0] != a[-1] and np.allclose(a, b, rtol=1e-5, atol=1e-7))
