"""Integers of weights in a Hugging Face folder: the layout of compressed-tensors, which vLLM and transformers read
(S file).

config.json's `quantization_config` describes the matrices of all linear layers. In safetensors, a matrix `X.weight`
[outputs, inputs] is then stored as:

| tensor | what it is |
|---|---|
| X.weight_packed | int32 [outputs, inputs bits / 32]: codes as a stream of bits, the lowest first (pack-quantized) |
| X.weight_shape | int64 [2]: outputs, inputs |
| X.weight_scale | [outputs, groups], in the scales' type; weight = scale (code - zero) |
| X.weight_zero_point | int32 [outputs bits / 32, groups]: zeros packed along the outputs, if not `symmetric` |
| X.weight | int8 [outputs, inputs], instead of the first two (int-quantized); zeros are then int8 [outputs, groups] |
| X.input_scale | float32 [1]: the step of 8-bit inputs, only with a static scale |

Packed codes are unsigned: signed ones have 2^(bits-1) added.
Source: https://github.com/vllm-project/compressed-tensors (0.20), compressors/pack_quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from jaxbench.config import shown
from jaxbench.quantization import grids
from jaxbench.quantization.grids import Grid, Quantized

METHOD = "compressed-tensors"
FORMATS = ("pack-quantized", "int-quantized")


class Layout(NamedTuple):
    """Contents of quantization_config."""

    grid: Grid  # its scale_dtype is that of the tensors
    format: str
    activations: str  # float, dynamic (by token), static, or other: 8 bits that only load_checkpoint leaves out


def described(grid: Grid, activations: str) -> dict[str, Any]:
    """Make the quantization_config of a model whose linear layers, except the head, are on a grid.

    Raises:
      ValueError: the layout does not support this grid.
    """
    if grid.type != "int":
        raise ValueError(f"compressed-tensors: codes of type {grid.type} are not written here, wanted integers")
    if grid.zero == "least":
        raise ValueError(f"compressed-tensors: zero={grid.zero} has no place in the layout, wanted none or integer")
    weights = {
        "num_bits": grid.bits, "type": "int", "symmetric": grid.zero == "none", "dynamic": False,
        "strategy": "channel" if grid.group_size is None else "group", "group_size": grid.group_size,
    }  # fmt: skip
    inputs = None
    if activations != "float":
        is_dynamic = activations == "dynamic"
        inputs = {
            "num_bits": 8, "type": "int", "symmetric": True, "dynamic": is_dynamic,
            "strategy": "token" if is_dynamic else "tensor", "group_size": None,
        }  # fmt: skip
    format = "pack-quantized" if activations == "float" else "int-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": METHOD, "format": format, "quantization_status": "compressed", "ignore": ["lm_head"],
        "kv_cache_scheme": None, "config_groups": {"group_0": group | {"format": format}},
    }  # fmt: skip


def layout(values: Mapping[str, Any], source: Path) -> Layout:
    """Parse a quantization_config; the scales' type comes with the tensors.

    Raises:
      ValueError: a method, format, or kind of scheme that this file does not read; the message names it.
    """

    def refuse(what: str, value: Any, wanted: str) -> ValueError:
        return ValueError(f"{source}: quantization_config has {what}={shown(value)}, wanted {wanted}")

    if values.get("quant_method") != METHOD:
        raise refuse("quant_method", values.get("quant_method"), METHOD)
    if values.get("format") not in FORMATS:
        raise refuse("format", values.get("format"), " or ".join(FORMATS))
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not isinstance(group := next(iter(groups.values())), dict):
        raise refuse("config_groups", groups, "one group")
    if group.get("targets") != ["Linear"]:
        raise refuse("targets", group.get("targets"), "['Linear']")
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or weights.get("type", "int") != "int":
        raise refuse("weights", weights, "integers")
    bits, size, strategy = weights.get("num_bits"), weights.get("group_size"), weights.get("strategy")
    if not isinstance(bits, int) or not 2 <= bits <= 8:
        raise refuse("num_bits", bits, "2 to 8")
    if strategy not in ("group", "channel") or (strategy == "group") != (isinstance(size, int) and size > 0):
        raise refuse("strategy", f"{strategy} with group_size={size}", "group with a size, or channel")
    grid = Grid(bits, size if strategy == "group" else None, "none" if weights.get("symmetric", True) else "integer")
    for name, value in (("kv_cache_scheme", values.get("kv_cache_scheme")),
                        ("transform_config", values.get("transform_config")),
                        ("output_activations", group.get("output_activations"))):  # fmt: skip
        if value:
            raise refuse(name, value, "null: a model with it computes another function")
    if inputs is None:
        return Layout(grid, values["format"], "float")
    if not isinstance(inputs, dict) or inputs.get("num_bits") != 8 or inputs.get("type") != "int":
        raise refuse("input_activations", inputs, "integers of 8 bits, or null")
    is_dynamic = inputs.get("dynamic", False)
    strategy = "token" if is_dynamic is True else "tensor"
    is_known = isinstance(is_dynamic, bool) and (inputs.get("strategy") or strategy) == strategy
    if not is_known or inputs.get("symmetric", True) is not True:
        return Layout(grid, values["format"], "other")
    return Layout(grid, values["format"], "dynamic" if is_dynamic else "static")


def stored(matrix: Quantized, format: str) -> dict[str, np.ndarray]:
    """Tensors of a matrix by the last part of their names."""
    import ml_dtypes

    grid = matrix.grid
    kind = ml_dtypes.bfloat16 if grid.scale_dtype == "bfloat16" else np.dtype(grid.scale_dtype)
    scales = {"weight_scale": matrix.scales.astype(kind)}
    if format == "int-quantized":
        return scales | {"weight": matrix.codes}
    offset = 0 if grid.zero == "integer" else 2 ** (grid.bits - 1)
    codes = (matrix.codes.astype(np.int16) + offset).astype(np.uint8)
    tensors = scales | {"weight_packed": packed(codes, grid.bits), "weight_shape": np.array(codes.shape, np.int64)}
    if grid.zero == "integer":
        zeros = packed(np.ascontiguousarray(matrix.zeros.T).astype(np.uint8), grid.bits)
        tensors["weight_zero_point"] = np.ascontiguousarray(zeros.T)
    return tensors


def packed(codes: np.ndarray, bits: int) -> Int32[np.ndarray, "rows words"]:
    """Pack rows of unsigned codes as bit streams, lowest bit first, padded with 0 to whole words."""
    stream = np.unpackbits(codes[:, :, None], axis=2, count=bits, bitorder="little").reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(stream, axis=1, bitorder="little").view("<i4").astype(np.int32)


def unpacked(words: Int32[np.ndarray, "rows words"], bits: int, count: int) -> Int[np.ndarray, "rows count"]:
    """Unpack the first `count` codes of each row."""
    raw = np.ascontiguousarray(words.astype("<i4")).view(np.uint8)
    stream = np.unpackbits(raw, axis=1, count=count * bits, bitorder="little").reshape(len(words), count, bits)
    return np.packbits(stream, axis=2, bitorder="little")[:, :, 0]


class Folder(NamedTuple):
    """A folder's tensors, with matrices reassembled."""

    shapes: dict[str, tuple[int, ...]]  # by tensor names of a float folder
    matrices: dict[str, Callable[[], Quantized]]  # by those names, the quantised ones
    input_ranges: dict[str, Callable[[], float]]  # static: the |x| that becomes 127


def opened(
    shapes: Mapping[str, tuple[int, ...]],
    types: Mapping[str, str],
    read: Callable[[str], np.ndarray],
    plan: Layout,
    source: Path,
) -> Folder:
    """Reassemble the matrices of a folder's tensors.

    Args:
      shapes, types: by tensor; types by their safetensors names.
      read: returns a tensor's values as stored.

    Returns:
      The tensors; a part that belongs to no matrix is one of them, under its own name, which no float folder has.

    Raises:
      ValueError: a part of a matrix is missing or does not fit the rest, or a matrix is there twice.
    """  # fmt: skip
    found, matrices, input_ranges, used = {}, {}, {}, set()
    for name, shape in shapes.items():
        module, _, part = name.rpartition(".")
        if part in PARTS:
            continue
        if f"{module}.weight" in found and part in ("weight", "weight_packed"):
            raise ValueError(f"{source}: holds {module}.weight and {module}.weight_packed, wanted one of them")
        if part == "input_scale" and plan.activations != "float":
            input_ranges[f"{module}.weight"] = lambda n=name: 127 * float(read(n).reshape(-1)[0])
        elif part == "weight_packed" or (part == "weight" and types[name] == "I8"):
            parts = ["weight_scale", *(["weight_shape"] if part == "weight_packed" else [])]
            parts += ["weight_zero_point"] if plan.grid.zero == "integer" else []
            missing = [other for other in parts if f"{module}.{other}" not in shapes]
            if missing:
                raise ValueError(f"{source}: {name} stands without {', '.join(f'{module}.{m}' for m in missing)}")
            _check_types(module, [part, *parts], types, source)
            whole = shape if part == "weight" else tuple(int(n) for n in read(f"{module}.weight_shape").reshape(-1))
            found[f"{module}.weight"] = whole
            matrices[f"{module}.weight"] = _reader(module, part, whole, shapes, types, read, plan.grid, source)
            used |= {f"{module}.{other}" for other in parts}
            zeros = f"{module}.weight_zero_point"
            if zeros in shapes and zeros not in used and not read(zeros).any():  # a symmetric grid's, written by some
                used.add(zeros)
        else:
            found[name] = shape
    found |= {name: shapes[name] for name in shapes if name.rpartition(".")[2] in PARTS and name not in used}
    return Folder(found, matrices, input_ranges)


PARTS = ("weight_scale", "weight_shape", "weight_zero_point")  # of a matrix, beside its integers
INTEGERS = {"weight": ("I8",), "weight_packed": ("I32",), "weight_shape": ("I64", "I32")}
SCALE_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _check_types(module: str, parts: list[str], types: Mapping[str, str], source: Path) -> None:
    """Raise ValueError if integers of a matrix are of another type; parts: those that it has, its codes first."""
    for part in parts:
        zeros = {"weight_zero_point": ("I8",) if parts[0] == "weight" else ("I32",)}
        found, wanted = types[f"{module}.{part}"], (INTEGERS | zeros).get(part)
        if wanted is not None and found not in wanted:
            raise ValueError(f"{source}: {module}.{part} has type {found}, wanted {' or '.join(wanted)}")


def _reader(module, part, whole, shapes, types, read, grid: Grid, source: Path) -> Callable[[], Quantized]:
    """Make the function that reassembles one matrix; everything but its values is checked now."""
    groups = 1 if grid.group_size is None or len(whole) != 2 else -(-whole[1] // grid.group_size)
    scale_type = types[f"{module}.weight_scale"]
    wanted = {f"{module}.weight_scale": (whole[0], groups) if len(whole) == 2 else None}
    if part == "weight_packed" and len(whole) == 2:
        wanted[f"{module}.weight_packed"] = (whole[0], -(-whole[1] * grid.bits // 32))
        if grid.zero == "integer":
            wanted[f"{module}.weight_zero_point"] = (-(-whole[0] * grid.bits // 32), groups)
    elif len(whole) == 2 and grid.zero == "integer":
        wanted[f"{module}.weight_zero_point"] = (whole[0], groups)
    for name, shape in wanted.items():
        if shapes[name] != shape or min(whole) < 1:
            raise ValueError(f"{source}: {name} has shape {shapes[name]}, wanted {shape} for {bound(whole)} on {grid}")
    if grid.group_size is not None and whole[1] % grid.group_size:  # the package refuses it too
        raise ValueError(
            f"{source}: group_size={grid.group_size} does not divide the {whole[1]} inputs of {module}.weight"
        )
    if scale_type not in SCALE_TYPES:
        raise ValueError(f"{source}: {module}.weight_scale has type {scale_type}, wanted {', '.join(SCALE_TYPES)}")
    grid = grid._replace(scale_dtype=SCALE_TYPES[scale_type])

    def matrix() -> Quantized:
        scales = read(f"{module}.weight_scale").astype(np.float32)
        if part == "weight" and grid.zero == "none":
            return Quantized(grid, read(f"{module}.weight"), scales, None)
        if part == "weight":  # codes and zeros are signed here, and start at 0 on the grid
            offset = 2 ** (grid.bits - 1)
            codes = (read(f"{module}.weight").astype(np.int16) + offset).astype(np.uint8)
            return Quantized(grid, codes, scales, read(f"{module}.weight_zero_point").astype(np.float32) + offset)
        codes = unpacked(read(f"{module}.weight_packed"), grid.bits, whole[1])
        if grid.zero == "integer":
            zeros = unpacked(read(f"{module}.weight_zero_point").T, grid.bits, whole[0]).T
            return Quantized(grid, codes, scales, zeros.astype(np.float32))
        signed = (codes.astype(np.int16) - 2 ** (grid.bits - 1)).astype(np.int8)
        return Quantized(grid, signed, scales, None)

    return matrix


def bound(shape: tuple[int, ...]) -> str:
    """Format a shape as text."""
    return " x ".join(map(str, shape))


def dequantized(matrix: Quantized, name: str, source: Path) -> np.ndarray:
    """Dequantise a matrix to float32 weights.

    Raises:
      ValueError: its scales are not finite.
    """
    check_scales(matrix, name, source)
    return grids.dequantized(matrix)


def check_scales(matrix: Quantized, name: str, source: Path) -> None:
    """Check that a matrix's scales are finite.

    Raises:
      ValueError: they are not.
    """
    if not np.isfinite(matrix.scales).all():
        raise ValueError(f"{source}: the scales of {name} have NaN or infinite values: {matrix.scales.min()}")
