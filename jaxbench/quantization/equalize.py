"""AWQ and SmoothQuant: scale the channels between two matrices to reduce rounding errors, without changing the
function (S file).

Inputs x of a matrix become x / s and its weights w s. The division is folded into what produces x: a norm's scale, or
the outputs of the previous matrix. A block has four such places; not every family has all of them.

Sources: Lin et al. 2023, arXiv:2306.00978 (AWQ: s from the inputs' mean size, by search over the rounding error of the
products); Xiao et al. 2022, arXiv:2211.10438 (SmoothQuant: s from the largest inputs and weights, equation 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

from jaxbench.config import TransformerConfig
from jaxbench.quantization import grids
from jaxbench.quantization.grids import Grid
from jaxbench.quantization.statistics import InputStatistics

Method = Literal["none", "awq", "smoothquant"]
METHODS = ("none", "awq", "smoothquant")
SEARCH = np.linspace(0.0, 0.95, 20)  # exponents of the inputs' mean size that AWQ tries
MIGRATION = 0.5  # SmoothQuant's exponent

Layer = dict[str, np.ndarray]  # a layer's parameters by name within it, "attention.q_proj.kernel"


class Link(NamedTuple):
    """A place in a block where channels can be scaled."""

    source: str  # the statistics' matrix: all consumers have its inputs
    producer: str  # module whose outputs are divided
    consumers: tuple[str, ...]  # modules whose inputs are multiplied
    repeats: int = 1  # consecutive heads of the consumers' inputs that share a head of the producer's outputs
    head_dim: int = 0  # of those heads


def links(config: TransformerConfig, method: Method) -> list[Link]:
    """Places in a block: after its two norms; with AWQ also after the value heads and a gated up projection."""
    queries = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
    fed = ("mlp.gate_proj", "mlp.up_proj") if config.is_gated else ("mlp.up_proj",)
    found = [Link(queries[0], "attention_norm", queries), Link("mlp.up_proj", "mlp_norm", fed)]
    if method == "awq":
        repeats = config.num_heads // config.num_kv_heads
        found.append(
            Link("attention.o_proj", "attention.v_proj", ("attention.o_proj",), repeats, config.head_dim)
        )  # fmt: skip
        if config.is_gated:
            found.append(Link("mlp.down_proj", "mlp.up_proj", ("mlp.down_proj",)))
    return found


def equalized(
    layer: Layer,
    config: TransformerConfig,
    statistics: Mapping[str, InputStatistics],
    grid: Grid,
    *,
    method: Method,
) -> Layer:
    """Scale the channels of a layer's parameters without changing what the layer computes.

    Args:
      statistics: of the inputs of every matrix, by module name within the layer.
      grid: the grid that AWQ's search rounds to.

    Raises:
      ValueError: an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"quantize: equalize={method!r} is not one of {', '.join(METHODS)}")
    layer = dict(layer)
    for link in links(config, method) if method != "none" else ():
        found = statistics[link.source]
        scale = _awq(layer, link, found, grid) if method == "awq" else _smoothquant(layer, link, found)
        _scale(layer, link, scale)
    return layer


def _scale(layer: Layer, link: Link, scale: np.ndarray) -> None:
    """Divide the producer's outputs and multiply the consumers' inputs by a scale of the producer's channels."""
    for part in ("scale", "bias", "kernel"):  # the last axis of a kernel [in, out] is also the channels
        name = f"{link.producer}.{part}"
        if name in layer:
            layer[name] = (layer[name] / scale).astype(np.float32)
    wide = _spread(link, scale)
    for consumer in link.consumers:
        layer[f"{consumer}.kernel"] = (layer[f"{consumer}.kernel"] * wide[:, None]).astype(np.float32)


def _spread(link: Link, scale: np.ndarray) -> np.ndarray:
    """Expand a scale of the producer's channels to the consumers' inputs."""
    if link.repeats == 1:
        return scale
    return np.repeat(scale.reshape(-1, 1, link.head_dim), link.repeats, axis=1).reshape(-1)


def _gathered(link: Link, sizes: np.ndarray, join) -> np.ndarray:
    """Reduce sizes of the consumers' inputs to the producer's channels."""
    return sizes if link.repeats == 1 else join(sizes.reshape(-1, link.repeats, link.head_dim), axis=1).reshape(-1)


def _normal(scale: np.ndarray) -> np.ndarray:
    """Centre a scale's extremes around 1; unused channels are left unscaled."""
    used = np.isfinite(scale) & (scale > 0)
    if not used.any():
        return np.ones_like(scale)
    middle = np.sqrt(scale[used].max() * scale[used].min())
    return np.where(used, np.clip(scale / middle, 1e-4, 1e4), 1.0).astype(np.float32)


def _smoothquant(layer: Layer, link: Link, statistics: InputStatistics) -> np.ndarray:
    weights = [np.abs(layer[f"{name}.kernel"]).max(axis=1) for name in link.consumers]
    largest = np.maximum(_gathered(link, np.max(weights, axis=0), np.max), 1e-5)
    return _normal(_gathered(link, statistics.largest, np.max) ** MIGRATION / largest ** (1 - MIGRATION))


def _awq(layer: Layer, link: Link, statistics: InputStatistics, grid: Grid) -> np.ndarray:
    """Search powers of the inputs' mean size for the scale with the least error of the rounded consumers' products."""
    size = _gathered(link, statistics.absolute / max(statistics.count, 1), np.mean)
    weights = [layer[f"{name}.kernel"].T for name in link.consumers]
    best, best_error = np.ones_like(size, np.float32), np.inf
    for exponent in SEARCH:
        scale = _normal(size**exponent)
        wide, error = _spread(link, scale), 0.0
        for matrix in weights:
            change = grids.dequantized(grids.nearest(matrix * wide, grid)) / wide - matrix
            error += float(np.vdot(change @ statistics.second_moment, change))
        if error < best_error:
            best, best_error = scale, error
    return best
