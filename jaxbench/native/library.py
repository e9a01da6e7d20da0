"""The native library through ctypes: packing, and the kernels with their own threads (S file)."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8, UInt32

from jaxbench.native import build, formats
from jaxbench.process_environment import usable_cores

NORMS = ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm", "q_norm", "k_norm")
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ACTIVATIONS = ("swiglu", "geglu", "gelu")  # indices are the numbers of src/native.h
CACHE_TYPES = ("float32", "bfloat16", "int8")  # of keys and values; indices are the numbers of src/native.h
MAX_ROWS = 4096  # of a block
ALIGNMENT = 64  # bytes: XLA:CPU uses a host array without a copy from this alignment on


class Matrix(ctypes.Structure):
    """`matrix` of src/native.h."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("inputs", ctypes.c_int64), ("outputs", ctypes.c_int64), ("format", ctypes.c_int32),
    )  # fmt: skip


class Norm(ctypes.Structure):
    """`norm` of src/native.h."""

    _fields_ = (("scale", ctypes.c_void_p), ("bias", ctypes.c_void_p))


class Cache(ctypes.Structure):
    """`kv_cache` of src/native.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales", "table")),
        *((name, ctypes.c_int64) for name in ("num_pages", "page_size", "max_pages")),
        ("kind", ctypes.c_int32),
    )


class BlockCall(ctypes.Structure):
    """`block_call` of src/native.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "d_model", "d_ff", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "window")),
        *((name, ctypes.c_int32) for name in ("activation", "planes")),
        *((name, ctypes.c_float) for name in ("norm_eps", "query_scale", "softcap")),
        *((name, ctypes.c_void_p) for name in ("x", "out", "positions", "cosine", "sine")),
        *((name, Norm) for name in NORMS),
        *((name, Matrix) for name in MATRICES),
        *((name.replace("_proj", "_bias"), ctypes.c_void_p) for name in MATRICES),
        ("cache", Cache),
    )  # fmt: skip


class Sampling(ctypes.Structure):
    """`sampling` of src/native.h."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("temperature", "top_p", "min_p")),
        ("top_k", ctypes.c_int64), ("site", ctypes.c_uint32),
    )  # fmt: skip


class Packed(NamedTuple):
    """A packed matrix; kernels read `data`."""

    data: UInt8[np.ndarray, " bytes"]
    format: str
    inputs: int
    outputs: int

    def struct(self) -> Matrix:
        """The C struct; valid as long as `data` lives."""
        return Matrix(self.data.ctypes.data, self.inputs, self.outputs, formats.FORMATS.index(self.format))


@functools.cache
def load(instructions: str | None = None) -> ctypes.CDLL:
    """Load the library, and build it first if necessary.

    Raises:
      NotAvailable: it is not available here.
    """
    library = ctypes.CDLL(str(build.library_path(instructions)))
    pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    library.jaxbench_pack.argtypes = (int32, int64, int64, pointer, pointer, pointer)
    library.jaxbench_embed.argtypes, library.jaxbench_embed.restype = (pointer, pointer, int64, pointer), None
    library.jaxbench_linear.argtypes = (pointer, pointer, int64, pointer, int32, int64, pointer)
    library.jaxbench_norm.argtypes = (pointer, int64, int64, pointer, pointer, ctypes.c_float, int64, pointer)
    library.jaxbench_largest.argtypes = (pointer, int64, int64, int64, pointer)
    library.jaxbench_draw.argtypes = (
        pointer, int64, int64, pointer, ctypes.c_uint32, pointer, ctypes.POINTER(Sampling), int64, pointer,
    )  # fmt: skip
    library.jaxbench_block_call_bytes.restype = int64
    library.jaxbench_decode.argtypes = (pointer, pointer, int64, pointer, int64, pointer, pointer, pointer, int64)
    library.jaxbench_decode.restype = ctypes.c_char_p
    return library


def check_rows(rows: int, positions: int, lines: int, dtype: str) -> None:
    """Check the arguments of a block call, since C would read past their ends.

    Args:
      positions, lines: number of positions, and of lines of the page table.
      dtype: of the pages.

    Raises:
      ValueError: the numbers differ from the rows, there are too many rows, or no cache has pages of this type.
    """
    if rows > MAX_ROWS:
        raise ValueError(f"blocks: {rows} rows, native kernels take at most {MAX_ROWS} at once")
    if positions != rows or lines != rows:
        raise ValueError(
            f"blocks: {positions} positions and {lines} lines of a page table for {rows} rows, wanted one each"
        )
    if dtype not in CACHE_TYPES:
        raise ValueError(f"blocks: cache of {dtype}, wanted one of {', '.join(CACHE_TYPES)}")


_is_off = contextvars.ContextVar("is_off", default=False)


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Context without native kernels: programs traced in it run on machines that have none."""
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


def is_available() -> bool:
    """Return True if the library exists or can be built, and is not switched off."""
    if _is_off.get():
        return False
    try:
        load()
    except build.NotAvailable:
        return False
    return True


def aligned(size: int) -> UInt8[np.ndarray, " size"]:
    """Allocate bytes that start at a multiple of 64."""
    room = np.empty(size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + size]


def pack(rows: formats.Rows, instructions: str | None = None) -> Packed:
    """Pack a matrix into tiles.

    Raises:
      ValueError: weights, or their scales, are NaN or infinite.
    """
    format = formats.FORMATS.index(rows.format)
    data = aligned(formats.packed_bytes(rows.format, rows.inputs, rows.outputs))
    values = np.ascontiguousarray(rows.values)
    scales = None if rows.scales is None else np.ascontiguousarray(rows.scales, np.float32)
    if not load(instructions).jaxbench_pack(
        format, rows.inputs, rows.outputs, values.ctypes.data, None if scales is None else scales.ctypes.data,
        data.ctypes.data,
    ):  # fmt: skip
        raise ValueError(f"pack: NaN or infinite weights among {rows.outputs} x {rows.inputs} of {rows.format}")
    return Packed(data, rows.format, rows.inputs, rows.outputs)


def linear(
    x: Float[np.ndarray, "M I"],
    weights: Packed,
    bias: Float[np.ndarray, " O"] | None = None,
    *,
    planes: int = 3,
    threads: int | None = None,
    instructions: str | None = None,
) -> Float[np.ndarray, "M O"]:
    """Multiply rows by a packed matrix. planes: 3 = float32 activations, 1 = 8-bit activations.

    Raises:
      ValueError: shapes do not fit, or `planes` is neither 1 nor 3.
    """
    x = np.ascontiguousarray(x, np.float32)
    if x.ndim != 2 or x.shape[1] != weights.inputs or (bias is not None and np.shape(bias) != (weights.outputs,)):
        raise ValueError(f"linear: x {x.shape}, bias {np.shape(bias)} by {weights.inputs} x {weights.outputs}")
    if planes not in (1, 3):
        raise ValueError(f"linear: planes={planes}, wanted 1 or 3")
    out = np.empty((len(x), weights.outputs), np.float32)
    bias = None if bias is None else np.ascontiguousarray(bias, np.float32)
    matrix = weights.struct()
    failed = load(instructions).jaxbench_linear(
        ctypes.byref(matrix), x.ctypes.data, len(x), None if bias is None else bias.ctypes.data, planes,
        threads or usable_cores(), out.ctypes.data,
    )  # fmt: skip
    if failed:
        raise MemoryError(f"linear: no memory for {x.shape} by {weights.inputs} x {weights.outputs}")
    return out


def embed(tokens: Int[np.ndarray, " M"], weights: Packed) -> Float[np.ndarray, "M I"]:
    """Look up rows of a packed embedding, dequantised."""
    tokens = np.ascontiguousarray(tokens, np.int32)
    out, matrix = np.empty((len(tokens), weights.inputs), np.float32), weights.struct()
    load().jaxbench_embed(ctypes.byref(matrix), tokens.ctypes.data, len(tokens), out.ctypes.data)
    return out


def largest(logits: Float[np.ndarray, "M V"], instructions: str | None = None) -> Int[np.ndarray, " M"]:
    """Index of each row's largest value, the lowest index of equal ones; the first NaN if there is one."""
    logits = np.ascontiguousarray(logits, np.float32)
    out = np.empty(len(logits), np.int32)
    load(instructions).jaxbench_largest(logits.ctypes.data, *logits.shape, usable_cores(), out.ctypes.data)
    return out


def draw(
    logits: Float[np.ndarray, "B V"],
    how: Sampling,
    *,
    key: UInt32[np.ndarray, "2"],
    step: int,
    row_ids: Int[np.ndarray, " B"],
    threads: int | None = None,
    instructions: str | None = None,
) -> Int[np.ndarray, " B"]:
    """Sample a token per row like jaxbench.sample.draw with a temperature above 0."""
    logits, key = np.ascontiguousarray(logits, np.float32), np.ascontiguousarray(key, np.uint32)
    out, row_ids = np.empty(len(logits), np.int32), np.ascontiguousarray(row_ids, np.int32)
    if load(instructions).jaxbench_draw(
        logits.ctypes.data, *logits.shape, key.ctypes.data, step, row_ids.ctypes.data, ctypes.byref(how),
        threads or usable_cores(), out.ctypes.data,
    ):  # fmt: skip
        raise MemoryError(f"draw: no memory for logits {logits.shape}")
    return out
