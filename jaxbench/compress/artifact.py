"""A trained compressor in one file, small enough to ship: differences from the decoder's layers in few bits (S file).

Encoder kernels are stored as differences from the decoder's, in BITS bits with one scale per GROUP inputs. Connector
kernels are stored in the same way, but not as differences; the decoder's adapters in FINE_BITS; small tensors in
float32. The local head, which is only used in training, is left out unless requested. The file identifies the decoder
by its checksum and fits no other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxbench import outputs
from jaxbench.compress.config import CompressorConfig, is_trained, parameter_shapes
from jaxbench.pretrained import assets, safetensors_files, weights
from jaxbench.quantization import grids

FORMAT = 1
SHIPPED = Path(__file__).parents[1] / "pretrained/assets_data/rfcc-base.safetensors"
SHIPPED_SHA256 = "f1d177b4a705dec6830baae07431673f9329c38a78bf81d9ee6af8fa8fbba2e8"
BITS, FINE_BITS = 4, 8  # of encoder and connector kernels, of the other kernels
GROUP = 192  # inputs that share a scale
META = {"config": dict, "model_sha256": str, "about": dict}  # besides the format


class Trained(NamedTuple):
    """A compressor's parameters without the decoder's own, and what they were trained with."""

    config: CompressorConfig
    params: dict[str, np.ndarray]  # float32 by dotted name
    model_sha256: str
    id: str  # start of the file's SHA-256
    about: dict[str, Any]  # steps, tokens, figures


def save(
    path: str | Path, config: CompressorConfig, params: Mapping[str, np.ndarray], checkpoint: weights.Checkpoint,
    *, about: Mapping[str, Any], bits: int = BITS, local: bool = False,
) -> int:  # fmt: skip
    """Write trained parameters atomically and return the file's size in bytes.

    Args:
      about: steps, tokens, figures: any JSON values.
      bits: of differences, 2 to 8.
      local: also store the local head.
    """
    tensors: dict[str, np.ndarray] = {}
    for name, value in params.items():
        if name.startswith("local.") and not local:
            continue
        base = checkpoint.params.get(name.removeprefix("encoder."))
        value = np.asarray(value, np.float32)
        change = value if base is None else value - base
        if name.endswith(".kernel"):
            is_large = name.startswith(("encoder.", "connector."))
            grid = grids.Grid(bits if is_large else FINE_BITS, math.gcd(GROUP, change.shape[0]))
            matrix = grids.nearest(change.T, grid, rule="mse")
            tensors[f"{name}:codes"] = _packed(matrix.codes) if grid.bits <= 4 else matrix.codes
            tensors[f"{name}:scales"] = matrix.scales.astype(np.float16)
        else:
            tensors[name] = np.ascontiguousarray(change)
    meta = {
        "format": FORMAT, "config": config.model_dump(mode="json", exclude={"decoder"}),
        "model_sha256": checkpoint.sha256, "about": dict(about),
    }  # fmt: skip
    outputs.save_tensors(path, tensors, {"compressor": json.dumps(meta)})
    return Path(path).stat().st_size


def describe(path: str | Path | None = None) -> dict[str, Any]:
    """Return the metadata of a weights file.

    Raises:
      ValueError: the file is missing, damaged or not a compressor.
    """
    path, sha256, meta, _ = _read(path)
    about = {"file": str(path), "bytes": path.stat().st_size, "id": sha256[:12]}
    return about | {name: meta["config"][name] for name in ("num_layers", "ratios")} | {"about": meta["about"]}


def load(path: str | Path | None, checkpoint: weights.Checkpoint) -> Trained:
    """Read trained parameters for a decoder; None = the shipped ones.

    Raises:
      ValueError: the file is missing, damaged, not a compressor, or made for another decoder.
    """
    path, sha256, meta, tensors = _read(path)
    if meta["model_sha256"] != checkpoint.sha256:
        raise ValueError(
            f"compressor: {path} was trained for a decoder with SHA-256 {meta['model_sha256'][:12]}, and "
            f"{checkpoint.source} has {checkpoint.sha256[:12]}"
        )
    try:
        config = CompressorConfig(decoder=checkpoint.config, **meta["config"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"compressor: {path} is damaged, or of another version: config {meta['config']}") from error
    shapes, params = parameter_shapes(config), {}
    names = {name.partition(":")[0] for name in tensors}
    odd = names ^ {name for name in shapes if is_trained(name) and (name in names or not name.startswith("local."))}
    if odd:
        raise ValueError(f"compressor: {path} is damaged: {len(odd)} parameters too many or too few, as {min(odd)}")
    for name in names:
        value = _values(tensors, name, path)
        base = checkpoint.params.get(name.removeprefix("encoder."))
        if value.shape != shapes[name] or not np.isfinite(value).all():
            raise ValueError(f"compressor: {path} is damaged: {name} has {value.shape}, or is not finite")
        params[name] = value if base is None else value + base
    return Trained(config, params, checkpoint.sha256, sha256[:12], meta["about"])


def _read(path: str | Path | None) -> tuple[Path, str, dict[str, Any], dict[str, np.ndarray]]:
    """A file's path, checksum, metadata and tensors."""
    is_shipped, path = path is None, SHIPPED if path is None else Path(path)
    if not path.is_file():
        raise ValueError(f"compressor: {path} is no file; `compress.py train` makes one")
    sha256 = assets.sha256_file(path)
    if is_shipped and sha256 != SHIPPED_SHA256:
        raise ValueError(f"compressor: {path} is damaged: SHA-256 {sha256}, wanted {SHIPPED_SHA256}")
    meta, tensors = safetensors_files.annotated(path, "compressor")
    if meta.get("format") != FORMAT:
        raise ValueError(f"compressor: {path} has format {meta.get('format')}; wanted {FORMAT}")
    bad = [name for name, kind in META.items() if not isinstance(meta.get(name), kind)]
    if bad or not {"num_layers", "ratios"} <= set(meta["config"]):
        raise ValueError(f"compressor: {path} is damaged: {bad or ['config']} of its metadata {sorted(meta)}")
    return path, sha256, meta, tensors


def _values(tensors: Mapping[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    """A stored tensor in float32; kernels as (in, out)."""
    if name in tensors:
        return tensors[name].astype(np.float32)
    codes, scales = (tensors.get(f"{name}:{part}", np.zeros(0)) for part in ("codes", "scales"))
    if not (codes.ndim == scales.ndim == 2 and len(codes) == len(scales)):
        raise ValueError(f"compressor: {path} is damaged: {name} has codes {codes.shape}, scales {scales.shape}")
    scales = scales.astype(np.float32)
    is_packed = codes.dtype == np.uint8
    grid = grids.Grid(4 if is_packed else 8)
    matrix = grids.Quantized(grid, _unpacked(codes) if is_packed else codes, scales, None)
    return np.ascontiguousarray(grids.dequantized(matrix).T)


def _packed(codes: np.ndarray) -> np.ndarray:
    """Pack codes -8 to 7, two per byte."""
    halves = (codes + 8).astype(np.uint8)
    return halves[:, ::2] | (halves[:, 1::2] << 4)


def _unpacked(pairs: np.ndarray) -> np.ndarray:
    return np.stack([pairs & 15, pairs >> 4], axis=2).reshape(len(pairs), -1).astype(np.int8) - 8
