"""The native kernels as PyTorch operators: products of packed weights and whole decode steps, on CPUs.

Twin: jaxbench/native/calls.py. The operators jaxbench::linear, embed, largest and decode call the same library through
ctypes; it has its own threads (src/team.c).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from jaxbench import philox
from jaxbench.config import TransformerConfig
from jaxbench.native import formats, library
from jaxbench.native.checkpoint import Settings
from jaxbench.prompts import SamplingParams


@dataclasses.dataclass(frozen=True)
class PackedWeights:
    """A packed matrix."""

    data: UInt8[Tensor, " bytes"]
    format: str  # of formats.FORMATS
    inputs: int
    outputs: int


@dataclasses.dataclass(frozen=True)
class BlockWeights:
    """A layer's arrays; None if there is none."""

    norms: tuple[tuple[Tensor | None, Tensor | None], ...]  # scale and bias, in the order of library.NORMS
    matrices: tuple[UInt8[Tensor, " bytes"] | None, ...]  # in the order of library.MATRICES
    biases: tuple[Float[Tensor, " outputs"] | None, ...]
    formats: tuple[str, ...]


class _Steps(NamedTuple):
    """The calls of a decoder's blocks, prepared once for a cache; the caller keeps the arrays that they point to."""

    calls: ctypes.Array
    is_local: ctypes.Array
    weights: weakref.ref  # the first matrix and the first page array they were prepared for
    pages: weakref.ref
    settings: tuple  # Settings, and pages of a row
    threads: int


_steps = threading.local()  # `last`: for the thread's last cache; the operator uses the calls that its thread prepared


@functools.cache
def register() -> None:
    """Define the operators.

    Raises:
      NotAvailable: the library is not available here.
    """
    handlers = library.load()
    assert ctypes.sizeof(library.BlockCall) == handlers.jaxbench_block_call_bytes()
    operators = torch.library.Library("jaxbench", "DEF")
    operators.define(
        "linear(Tensor x, Tensor data, Tensor? bias, int inputs, int outputs, int format, int planes, int threads) "
        "-> Tensor"
    )
    operators.define("embed(Tensor tokens, Tensor data, int inputs, int outputs, int format) -> Tensor")
    operators.define("norm(Tensor x, Tensor scale, Tensor? bias, float eps) -> Tensor")
    operators.define("largest(Tensor logits) -> Tensor")
    operators.define(
        "draw(Tensor logits, Tensor key, int step, Tensor row_ids, float temperature, float top_p, float min_p, "
        "int top_k) -> Tensor"
    )
    operators.define(
        "decode(Tensor x, Tensor positions, Tensor table, Tensor? cosine, Tensor? sine, Tensor? local_cosine, "
        "Tensor? local_sine) -> Tensor"
    )
    functions = {
        "linear": _linear, "embed": _embed, "norm": _norm, "largest": _largest, "draw": _draw, "decode": _decode,
    }  # fmt: skip
    for name, function in functions.items():
        operators.impl(name, functools.partial(function, handlers), "CPU")
    register.kept = operators  # operators vanish with their Library


def linear(
    x: Float[Tensor, "*rows I"], weights: PackedWeights, bias: Float[Tensor, " O"] | None, settings: Settings
) -> Float[Tensor, "*rows O"]:
    """Affine map of the last axis by a packed matrix; x is cast to float32, and the result is float32."""
    format = formats.FORMATS.index(weights.format)
    rows = x.reshape(-1, weights.inputs).float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    product = torch.ops.jaxbench.linear(
        rows, weights.data, bias, weights.inputs, weights.outputs, format, settings.planes, _threads(settings)
    )
    return product.reshape(*x.shape[:-1], weights.outputs)


def embed(tokens: Int[Tensor, "..."], weights: PackedWeights) -> Float[Tensor, "... D"]:
    """Look up rows of a packed embedding, dequantised."""
    flat, format = tokens.reshape(-1).int().contiguous(), formats.FORMATS.index(weights.format)
    rows = torch.ops.jaxbench.embed(flat, weights.data, weights.inputs, weights.outputs, format)
    return rows.reshape(*tokens.shape, weights.inputs)


def norm(
    x: Float[Tensor, "*rows D"], scale: Float[Tensor, " D"], bias: Float[Tensor, " D"] | None, *, eps: float
) -> Float[Tensor, "*rows D"]:
    """RMSNorm of each row, or LayerNorm if there is a bias: normalised, times scale, plus bias; bit-identical in any
    batch.
    """
    rows = x.reshape(-1, x.shape[-1]).float().contiguous()
    return torch.ops.jaxbench.norm(rows, scale, bias, eps).reshape(x.shape)


def largest(logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
    """Index of each row's largest value, the lowest index of equal ones; the first NaN if there is one."""
    return torch.ops.jaxbench.largest(logits.float().contiguous())


def draw(
    logits: Float[Tensor, "B V"],
    sampling: SamplingParams,
    *,
    key: Tensor,
    step: int | Tensor,
    row_ids: Int[Tensor, " B"],
) -> Int[Tensor, " B"]:
    """Sample a token per row like torch_ref.sample.draw, with noise only for tokens that can still be the largest."""
    if sampling.temperature == 0.0:
        return largest(logits)
    return torch.ops.jaxbench.draw(
        logits.float().contiguous(), key, int(step), row_ids.int().contiguous(), sampling.temperature, sampling.top_p,
        sampling.min_p, sampling.top_k,
    )  # fmt: skip


def _threads(settings: Settings) -> int:
    return settings.threads or torch.get_num_threads()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _linear(handlers, x, data, bias, inputs, outputs, format, planes, threads) -> Tensor:
    out, matrix = x.new_empty(len(x), outputs), library.Matrix(data.data_ptr(), inputs, outputs, format)
    if handlers.jaxbench_linear(
        ctypes.byref(matrix), x.data_ptr(), len(x), _pointer(bias), planes, threads, out.data_ptr()
    ):
        raise MemoryError(f"linear: no memory for {tuple(x.shape)} by {inputs} x {outputs}")
    return out


def _embed(handlers, tokens, data, inputs, outputs, format) -> Tensor:
    out, matrix = torch.empty(len(tokens), inputs), library.Matrix(data.data_ptr(), inputs, outputs, format)
    handlers.jaxbench_embed(ctypes.byref(matrix), tokens.data_ptr(), len(tokens), out.data_ptr())
    return out


def _norm(handlers, x, scale, bias, eps) -> Tensor:
    out, threads = torch.empty_like(x), torch.get_num_threads() if len(x) > 2 else 1
    handlers.jaxbench_norm(x.data_ptr(), *x.shape, scale.data_ptr(), _pointer(bias), eps, threads, out.data_ptr())
    return out


def _largest(handlers, logits) -> Tensor:
    out = torch.empty(len(logits), dtype=torch.int32)
    threads = torch.get_num_threads() if len(logits) > 1 else 1
    handlers.jaxbench_largest(logits.data_ptr(), *logits.shape, threads, out.data_ptr())
    return out


def _draw(handlers, logits, key, step, row_ids, temperature, top_p, min_p, top_k) -> Tensor:
    out = torch.empty(len(logits), dtype=torch.int32)
    how = library.Sampling(temperature, top_p, min_p, top_k, philox.site_id("sample"))
    halves = key.to(torch.int64).to(torch.int32).contiguous()  # the low 32 bits of each, in any type
    threads = torch.get_num_threads() if len(logits) > 1 else 1
    if handlers.jaxbench_draw(
        logits.data_ptr(), *logits.shape, halves.data_ptr(), step, row_ids.data_ptr(), ctypes.byref(how), threads,
        out.data_ptr(),
    ):  # fmt: skip
        raise MemoryError(f"draw: no memory for logits {tuple(logits.shape)}")
    return out


def _decode(handlers, x, positions, table, cosine, sine, local_cosine, local_sine) -> Tensor:
    prepared, out = _steps.last, x.clone()
    angles = (ctypes.c_void_p * 4)(*map(_pointer, (cosine, sine, local_cosine, local_sine)))
    problem = handlers.jaxbench_decode(
        prepared.calls, prepared.is_local, len(prepared.calls), out.data_ptr(), len(out), positions.data_ptr(),
        table.data_ptr(), angles, prepared.threads,
    )  # fmt: skip
    if problem is not None:
        raise ValueError(f"decode: {problem.decode()}")
    return out


def _prepare(layers, cache, table, configs, settings) -> _Steps:
    """Prepare the calls of all blocks on one cache."""
    calls = (library.BlockCall * len(layers))()
    for i, (call, weights, config) in enumerate(zip(calls, layers, configs, strict=True)):
        _fill_sizes(call, config, settings)
        for name, (scale, bias) in zip(library.NORMS, weights.norms, strict=True):
            setattr(call, name, library.Norm(_pointer(scale), _pointer(bias)))
        d, ff, query = config.d_model, config.d_ff, config.num_heads * config.head_dim
        kv = config.num_kv_heads * config.head_dim
        sizes = ((d, query), (d, kv), (d, kv), (query, d), (d, ff), (d, ff), (ff, d))
        for j, name in enumerate(library.MATRICES):
            format = formats.FORMATS.index(weights.formats[j])
            setattr(call, name, library.Matrix(_pointer(weights.matrices[j]), *sizes[j], format))
            setattr(call, name.replace("_proj", "_bias"), _pointer(weights.biases[j]))
        keys = cache[0][i]
        kind = library.CACHE_TYPES.index(_dtype_name(keys))
        pointers = (_pointer(arrays[i]) if arrays[i].numel() else None for arrays in cache)
        call.cache = library.Cache(*pointers, None, keys.shape[0], keys.shape[3], table.shape[1], kind)
    flags = (ctypes.c_uint8 * len(layers))(*(config.is_local for config in configs))
    first = (weakref.ref(layers[0].matrices[0]), weakref.ref(cache[0][0]))
    return _Steps(calls, flags, *first, (settings, table.shape[1]), _threads(settings))


def _dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _fill_sizes(call: library.BlockCall, config: TransformerConfig, settings: Settings) -> None:
    call.d_model, call.d_ff, call.num_heads = config.d_model, config.d_ff, config.num_heads
    call.num_kv_heads, call.head_dim, call.window = config.num_kv_heads, config.head_dim, config.sliding_window or 0
    call.activation, call.planes = library.ACTIVATIONS.index(config.activation), settings.planes
    call.norm_eps, call.query_scale = config.norm_eps, config.query_scale / config.head_dim**0.5
    call.softcap = config.attention_softcap or 0.0


def blocks(
    x: Float[Tensor, "R D"],
    positions: Int[Tensor, " R"],
    angles: tuple[Tensor, Tensor] | None,
    local_angles: tuple[Tensor, Tensor] | None,
    layers: Sequence[BlockWeights],
    cache: tuple[tuple[Tensor, ...], ...],
    table: Int[Tensor, "R P"],
    configs: Sequence[TransformerConfig],
    settings: Settings,
) -> tuple[Float[Tensor, "R D"], tuple[tuple[Tensor, ...], ...]]:
    """Run all layers on tokens, one per row: the residual stream after them, and the pages, written in place.

    Differs from the twin, which calls block by block: PyTorch would spend more time between two blocks than in them.

    Raises:
      ValueError: more than library.MAX_ROWS rows, not one position and one line of the table per row, or pages of a
        type that no cache has.
    """
    library.check_rows(x.shape[0], positions.shape[0], table.shape[0], _dtype_name(cache[0][0]))
    last = getattr(_steps, "last", None)
    is_same = last is not None and last.weights() is layers[0].matrices[0] and last.pages() is cache[0][0]
    if not is_same or last.settings != (settings, table.shape[1]):
        _steps.last = _prepare(layers, cache, table, configs, settings)
    pairs = (*(angles or (None, None)), *(local_angles or (None, None)))
    rows = (x.float().contiguous(), positions.int().contiguous(), table.int().contiguous())
    return torch.ops.jaxbench.decode(*rows, *pairs), cache
