"""The models of the quality table: a checkpoint quantised by each method, in Flax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxbench import transformer
from jaxbench.native import checkpoint, formats
from jaxbench.native import model as native
from jaxbench.pretrained.weights import Checkpoint
from jaxbench.quantization import inputs, linear, quantize
from jaxbench.quantization.study.quality import Method


class Made(NamedTuple):
    """A model after a method."""

    model: Any
    bits_per_weight: float  # of the layers' matrices, including scales
    bytes: int  # of all parameters


def make(method: Method, held: Checkpoint, tokens: Callable[[], Int[np.ndarray, "B T"]]) -> Made:
    """Make the model of one row.

    Args:
      tokens: returns calibration tokens; called only if they are needed.

    Raises:
      ValueError: groups do not divide a matrix, or a peer is not installed.
    """
    if method.recipe is not None:
        return _of_recipe(method, held, tokens)
    params, rows = dict(held.params), {}
    if method.torchao is not None or method.qwix is not None:
        ways = (_torchao, method.torchao) if method.torchao else (_qwix, method.qwix)
        params, bits, embedding_bits = *_of_peer(*ways, params), 32.0
    else:
        bits = {"bfloat16": 16.0, "q8_0": 8.5, "q4_0": 4.5, "q4_1": 5.0}[method.rounded]
        embedding_bits = max(bits, 8.5)
        for name in _matrices(params):
            is_embedding = name == "embed.embedding"
            kind = method.rounded if name.startswith("layers.") or bits >= 8 else "q8_0"  # the head too, as in a file
            own = checkpoint.quantized(params[name] if is_embedding else params[name].T, kind)
            values = formats.dequantized(own)
            params[name], rows[name.rpartition(".")[0]] = values if is_embedding else values.T, own
    size = _bytes(params, bits, embedding_bits)
    if method.native is None:
        return Made(transformer.build(held.config, params), bits, size)
    packed = checkpoint.pack_rows(held.config, {name: lambda r=r: r for name, r in rows.items()}, params)
    return Made(_native(packed, method), bits, size)


def _bytes(params: dict[str, np.ndarray], bits: float, embedding_bits: float) -> int:
    """Bytes of the layers' matrices, embedding and head at so many bits, and the rest in float32."""
    each = {name: bits if name.startswith("layers.") else embedding_bits for name in _matrices(params)}
    return round(sum(value.size * each.get(name, 32) for name, value in params.items()) / 8)


def _native(packed: checkpoint.PackedCheckpoint, method: Method) -> native.NativeTransformer:
    return native.build(packed, cache_dtype=method.native.cache, activations=method.native.activations)


def _of_recipe(method: Method, held: Checkpoint, tokens: Callable[[], Any]) -> Made:
    settings = method.recipe
    calibration = {}
    if settings.needs_calibration:
        calibration = {"calibrator": inputs.LayerByLayer(held.config), "tokens": tokens()}
    found = quantize.quantize(held.config, held.params, settings, **calibration)
    if method.native is not None:
        return Made(_native(checkpoint.pack_quantized(found), method), settings.grid.bits_per_weight, found.bytes)
    return Made(linear.build(found), settings.grid.bits_per_weight, found.bytes)


def _matrices(params: dict[str, np.ndarray]) -> list[str]:
    return [name for name in params if name.endswith(".kernel") or name == "embed.embedding"]


def _of_peer(
    peer: Callable[[str], Callable[[np.ndarray], np.ndarray]], kind: str, params: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], float]:
    """Round the layers' matrices as a peer does; return parameters and bits per weight; the embedding is unchanged.

    Raises:
      ValueError: the peer is not installed.
    """
    name = peer.__name__.removeprefix("_")
    try:
        rounded = peer(kind)
    except ImportError as error:
        raise ValueError(f"{name}={kind}: {error}; install {name}, or leave the method out") from error
    kernels = [key for key in _matrices(params) if key.startswith("layers.")]
    made = {key: rounded(np.ascontiguousarray(params[key].T)).T for key in kernels}
    return params | made, {"int8": 8.0, "int4": 5.0}[kind]  # int4: a float32 scale per 32 weights here, without zeros


def _torchao(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    import torch
    from torchao import quantization

    settings = {
        "int8": lambda: quantization.Int8WeightOnlyConfig(),
        "int4": lambda: quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=quantization.PerGroup(32)
        ),
    }[kind]()

    def rounded(weight: Float[np.ndarray, "O I"]) -> Float[np.ndarray, "O I"]:
        layer = torch.nn.Sequential(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False))
        layer[0].weight.data.copy_(torch.from_numpy(weight))
        quantization.quantize_(layer, settings)
        return layer[0].weight.dequantize().float().detach().numpy()

    return rounded


def _qwix(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    import qwix

    tiles = {} if kind == "int8" else {"tiled_axes": {1: 32}}
    how = {"qtype": kind, "channelwise_axes": [0], **tiles}
    return lambda weight: np.asarray(qwix.dequantize(qwix.quantize(jnp.asarray(weight), **how)))
