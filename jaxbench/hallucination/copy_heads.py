"""Copying heads of a decoder: attention heads that raise the logits of the tokens they attend to (S file).

A head's circuit M = E W_V W_O W_U [V V] says how much attending to one token raises the logit of another: a head that
copies has a large trace, and Gershgorin discs without outlying eigenvalues. M has rank head_dim, so that its trace
needs no V x V matrix; discs are computed for a sample of its rows.

Source: Sun et al. 2025, arXiv:2410.11414, appendix B, whose script was never published; Elhage et al. 2021 (circuits).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats

from jaxbench.config import TransformerConfig

ROW_TILE = 512  # rows of a circuit in memory at once


class Head(NamedTuple):
    """A head, and the statistics that decide its rank."""

    layer: int
    head: int
    trace: float
    outliers: int  # ends of Gershgorin discs outside 1.5 interquartile ranges, of the rows in the sample
    rank: float  # sum of its ranks by |trace|, the largest first, and by outliers, the fewest first


class Circuit(NamedTuple):
    """A head's circuit as a product of two thin matrices."""

    left: Float[np.ndarray, "V H"]  # tokens as values
    right: Float[np.ndarray, "H V"]  # values as logits


def circuit(config: TransformerConfig, params: Mapping[str, np.ndarray], layer: int, head: int) -> Circuit:
    """Circuit of a query head, whose values are those of its key-value head."""
    width, group = config.head_dim, head // (config.num_heads // config.num_kv_heads)
    name = f"layers.{layer}.attention"
    embedding = np.asarray(params["embed.embedding"], np.float32)
    unembedding = embedding.T if config.tie_embeddings else np.asarray(params["head.kernel"], np.float32)
    values = np.asarray(params[f"{name}.v_proj.kernel"], np.float32)[:, group * width : (group + 1) * width]
    outputs = np.asarray(params[f"{name}.o_proj.kernel"], np.float32)[head * width : (head + 1) * width]
    return Circuit(embedding @ values, outputs @ unembedding)


def trace(circuit: Circuit) -> float:
    """Trace of a circuit: what each token adds to its own logit, summed over tokens."""
    return float(np.einsum("VH,HV->", circuit.left, circuit.right, dtype=np.float64))


def disc_ends(circuit: Circuit, rows: np.ndarray) -> Float[np.ndarray, " 2*R"]:
    """Left and right ends of the Gershgorin discs of some rows: the diagonal minus and plus the others' magnitudes."""
    ends = []
    for start in range(0, len(rows), ROW_TILE):
        part = rows[start : start + ROW_TILE]
        products = circuit.left[part] @ circuit.right
        centre = products[np.arange(len(part)), part]
        radius = np.abs(products, out=products).sum(axis=1) - np.abs(centre)
        ends += [centre - radius, centre + radius]
    return np.concatenate(ends)


def num_outliers(values: np.ndarray) -> int:
    """Count the values further than 1.5 interquartile ranges outside the quartiles."""
    low, high = np.percentile(values, [25, 75])
    reach = 1.5 * (high - low)
    return int(np.sum((values < low - reach) | (values > high + reach)))


def ranked(
    config: TransformerConfig,
    params: Mapping[str, np.ndarray],
    *,
    num_rows: int | None = 1024,
    seed: int = 0,
    progress: Callable[[], Any] = lambda: None,
) -> list[Head]:
    """Rank all heads, the most copying first; num_rows: of the circuit, None = all. progress is called after each."""
    rows = np.arange(config.vocab_size)
    if num_rows is not None and num_rows < len(rows):
        rows = np.sort(np.random.default_rng(seed).choice(rows, num_rows, replace=False))
    found = []
    for layer, head in np.ndindex(config.num_layers, config.num_heads):
        made = circuit(config, params, layer, head)
        found.append((layer, head, trace(made), num_outliers(disc_ends(made, rows))))
        progress()
    ranks = stats.rankdata([-abs(each[2]) for each in found]) + stats.rankdata([each[3] for each in found])
    heads = [Head(*each, float(rank)) for each, rank in zip(found, ranks)]
    return sorted(heads, key=lambda head: (head.rank, head.layer, head.head))
