"""Structured pruning: remove whole attention heads and feed-forward units (S file: neither JAX nor PyTorch).

    config, params = structured.keep_heads(config, params, 2)
    config, params = structured.keep_width(config, params, 1024)

The result is a decoder of the same family with fewer key-value heads, each with its query heads, or a narrower
feed-forward layer: every program loads it, and its products are smaller. All layers keep the same number, since a
configuration has one number for all. Axis letters: WORKSPACE.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from jaxtyping import Float

from jaxbench.config import TransformerConfig
from jaxbench.initial import check_params, parameter_shapes
from jaxbench.quantization import pruning

Params = dict[str, np.ndarray]


def keep_heads(
    config: TransformerConfig,
    params: Mapping[str, np.ndarray],
    num_kv_heads: int,
    *,
    input_norms: Mapping[str, Float[np.ndarray, " I"]] | None = None,
) -> tuple[TransformerConfig, Params]:
    """Keep the `num_kv_heads` highest-scoring key-value heads of each layer, each with its query heads.

    Args:
      input_norms: of o_proj's inputs, by kernel; None = magnitude. See `head_scores`.

    Raises:
      ValueError: the number is not between 1 and the decoder's, layers are of a workload's own kind, or parameters do
        not fit the configuration.
    """
    _check(config, params, "num_kv_heads", num_kv_heads, config.num_kv_heads)
    group = config.num_heads // config.num_kv_heads
    smaller = config.model_copy(update={"num_kv_heads": num_kv_heads, "num_heads": num_kv_heads * group})
    found = dict(params)
    for layer in _layers(config):
        best = _largest(head_scores(config, params, layer, input_norms=input_norms), num_kv_heads)
        key_columns = _columns(best, config.head_dim)
        query_columns = _columns(best, group * config.head_dim)
        for name, columns in (("q_proj", query_columns), ("k_proj", key_columns), ("v_proj", key_columns)):
            _take(found, f"{layer}.attention.{name}", columns, axis=-1)
        _take(found, f"{layer}.attention.o_proj", query_columns, axis=0)
    return smaller, found


def keep_width(
    config: TransformerConfig,
    params: Mapping[str, np.ndarray],
    d_ff: int,
    *,
    input_norms: Mapping[str, Float[np.ndarray, " I"]] | None = None,
) -> tuple[TransformerConfig, Params]:
    """Keep the `d_ff` highest-scoring feed-forward units of each layer.

    Args:
      input_norms: of down_proj's inputs, by kernel; None = magnitude. See `unit_scores`.

    Raises:
      ValueError: see keep_heads.
    """
    _check(config, params, "d_ff", d_ff, config.d_ff)
    found = dict(params)
    for layer in _layers(config):
        best = _largest(unit_scores(params, layer, input_norms=input_norms), d_ff)
        for name in ("gate_proj", "up_proj"):
            _take(found, f"{layer}.mlp.{name}", best, axis=-1)
        _take(found, f"{layer}.mlp.down_proj", best, axis=0)
    return config.model_copy(update={"d_ff": d_ff}), found


def head_scores(
    config: TransformerConfig,
    params: Mapping[str, np.ndarray],
    layer: str,
    *,
    input_norms: Mapping[str, Float[np.ndarray, " I"]] | None = None,
) -> Float[np.ndarray, " K"]:
    """Score each key-value head of a layer, with its query heads.

    By magnitude: the 2-norm of all weights that belong to it, in query, key, value and output (Ma et al. 2023,
    arXiv:2305.11627, remove such groups together). With input norms: the 2-norm of the output's weights, each times
    its input's norm, which An et al. 2024 (arXiv:2312.11983) call Wanda-sp.

    Args:
      layer: its name, such as "layers.0".
    """
    heads, output = config.num_kv_heads, f"{layer}.attention.o_proj.kernel"
    squares = np.square(_weighted(params, output, input_norms)).reshape(heads, -1).sum(axis=1)
    if input_norms is None:
        for name in ("q_proj", "k_proj", "v_proj"):
            kernel = np.square(np.asarray(params[f"{layer}.attention.{name}.kernel"], np.float64))
            squares = squares + kernel.reshape(len(kernel), heads, -1).sum(axis=(0, 2))
    return np.sqrt(squares)


def unit_scores(
    params: Mapping[str, np.ndarray],
    layer: str,
    *,
    input_norms: Mapping[str, Float[np.ndarray, " I"]] | None = None,
) -> Float[np.ndarray, " F"]:
    """Score each feed-forward unit of a layer, as `head_scores` does for heads."""
    squares = np.square(_weighted(params, f"{layer}.mlp.down_proj.kernel", input_norms)).sum(axis=1)
    if input_norms is None:
        for name in ("gate_proj", "up_proj"):
            kernel = params.get(f"{layer}.mlp.{name}.kernel")
            squares = squares if kernel is None else squares + np.square(np.asarray(kernel, np.float64)).sum(axis=0)
    return np.sqrt(squares)


def _check(config: TransformerConfig, params: Mapping[str, np.ndarray], name: str, wanted: int, most: int) -> None:
    """Raise for a number of heads or units that a decoder cannot have, and for decoders with layers of another kind."""
    if config.layer_kind is not None:
        raise ValueError(f"pruning: layers of kind {config.layer_kind} are not made smaller, only a decoder's own")
    if not 1 <= wanted <= most:
        raise ValueError(f"pruning: {name}={wanted} is not between 1 and the decoder's {most}")
    check_params(parameter_shapes(config), dict(params))


def _layers(config: TransformerConfig) -> Iterator[str]:
    return (f"layers.{i}" for i in range(config.num_layers))


def _weighted(
    params: Mapping[str, np.ndarray], name: str, input_norms: Mapping[str, np.ndarray] | None
) -> Float[np.ndarray, "I O"]:
    kernel = np.asarray(params[name], np.float64)
    return kernel if input_norms is None else kernel * pruning.norms_of(input_norms, name, len(kernel))[:, None]


def _largest(values: Float[np.ndarray, " n"], count: int) -> np.ndarray:
    """Indices of the largest values in ascending order; of equal ones, the first are kept."""
    return np.sort(np.argsort(-values, kind="stable")[:count])


def _columns(heads: np.ndarray, width: int) -> np.ndarray:
    """Columns of heads that are `width` wide."""
    return (heads[:, None] * width + np.arange(width)).ravel()


def _take(params: Params, module: str, index: np.ndarray, *, axis: int) -> None:
    """Keep some outputs (axis -1) or inputs (axis 0) of a linear layer, in place; outputs keep their biases."""
    for part in ("kernel", "bias") if axis else ("kernel",):
        name = f"{module}.{part}"
        if name in params:
            params[name] = np.ascontiguousarray(np.take(params[name], index, axis=axis))
