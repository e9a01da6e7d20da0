"""Checkpoints as packed matrices: with the numbers of their file, or quantised (S file).

A GGUF file's Q8_0, Q4_0 and Q4_1 blocks and a folder's integers on the same grids (quantization/blocks.py) are repacked
directly, without dequantising; float tensors keep their values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxbench.config import TransformerConfig
from jaxbench.native import formats, library
from jaxbench.native.library import Packed
from jaxbench.pretrained import assets, families, gguf_config, gguf_file, weights
from jaxbench.process_environment import usable_cores
from jaxbench.quantization import blocks, grids
from jaxbench.quantization.recipe import QuantizedModel

FILE = "file"  # weights stay as the file has them
CACHE_TYPES = library.CACHE_TYPES
PLANES = {"float32": 3, "int8": 1, "bfloat16": 1}  # of activations: integers of 24 or 8 bits, or bfloat16
WEIGHTS = (FILE, *formats.FORMATS)


class PackedCheckpoint(NamedTuple):
    """A model in the form that native kernels read."""

    config: TransformerConfig
    matrices: dict[str, Packed]  # by module name; outputs x inputs
    vectors: dict[str, np.ndarray]  # norms, biases, learned positions by parameter name, float32
    tokenizer: Path  # what load_tokenizer reads
    source: str
    sha256: str

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads: all matrices and vectors, but only one row of an untied embedding."""
        tied = self.config.tie_embeddings
        matrices = sum(m.data.nbytes for name, m in self.matrices.items() if tied or name != "embed")
        return matrices + sum(v.nbytes for v in self.vectors.values())


class Settings(NamedTuple):
    """How kernels compute; only `planes` affects the result."""

    planes: int = 3  # 3 = float32 activations; 1 = 8 bits by integer weights, bfloat16 by bfloat16 ones
    threads: int = 0  # at most this many; 0 = all


def checked(checkpoint: PackedCheckpoint, cache_dtype: str, activations: str, threads: int) -> Settings:
    """Check the settings of a decoder's kernels and return them.

    Raises:
      ValueError: one of them is unknown, or layers are of a workload's own kind.
    """
    if cache_dtype not in CACHE_TYPES:
        raise ValueError(f"native: cache_dtype={cache_dtype!r} is not one of {', '.join(CACHE_TYPES)}")
    if activations not in PLANES:
        raise ValueError(f"native: activations={activations!r} is not one of {', '.join(PLANES)}")
    if threads < 0:
        raise ValueError(f"native: threads={threads}, wanted at least 0 (0 = all)")
    if not checkpoint.config.is_causal:
        raise ValueError(f"native: is_causal={checkpoint.config.is_causal}: native blocks are causal")
    if checkpoint.config.layer_kind is not None:
        raise ValueError(f"native: layers of kind {checkpoint.config.layer_kind!r} have no native block")
    found = {matrix.format for matrix in checkpoint.matrices.values()}
    wanted = {"int8": set(formats.FORMATS[2:]), "bfloat16": {"bfloat16"}}.get(activations, found)
    if not found & wanted:
        raise ValueError(
            f"native: activations={activations} go with weights in {', '.join(sorted(wanted))}, got {found}"
        )
    return Settings(PLANES[activations], threads)


def load(spec: str | Path | None = None, *, weights_as: str = FILE) -> PackedCheckpoint:
    """Load a model and pack it.

    Args:
      spec: as load_checkpoint takes it.
      weights_as: "file" keeps a GGUF file's own numbers and a folder's float32 or bfloat16; a format quantises to it.

    Raises:
      ValueError: see load_checkpoint; an unknown format; a width that the format's groups do not divide.
      NotAvailable: the kernels are not available here.
    """
    if weights_as not in WEIGHTS:
        raise ValueError(f"weights={weights_as!r} is not one of {', '.join(WEIGHTS)}")
    if weights_as == FILE and spec in (None, "default"):
        return _load_default()
    if weights_as == FILE:
        path = weights.resolve(spec)
        return _load_folder(path) if path.is_dir() else _load_gguf(path)
    checkpoint = weights.load_checkpoint(spec)
    return pack_params(
        checkpoint.config, checkpoint.params, weights_as=weights_as,
        tokenizer=checkpoint.tokenizer, source=checkpoint.source, sha256=checkpoint.sha256,
    )  # fmt: skip


def pack_params(
    config: TransformerConfig,
    params: Mapping[str, np.ndarray],
    *,
    weights_as: str,
    tokenizer: Path | None = None,
    source: str = "",
    sha256: str = "",
) -> PackedCheckpoint:
    """Pack parameters by dotted name, kernels (in, out)."""
    check_widths(config, weights_as)

    def rows(name: str) -> formats.Rows:
        kernel = np.asarray(params[name], np.float32)
        return quantized(kernel if name == "embed.embedding" else kernel.T, weights_as)

    made = pack_rows(config, {name.rpartition(".")[0]: functools.partial(rows, name) for name in params
                              if _is_matrix(name)}, params)  # fmt: skip
    return made._replace(tokenizer=tokenizer, source=source, sha256=sha256)


def pack_rows(
    config: TransformerConfig, rows: Mapping[str, Callable[[], formats.Rows]], params: Mapping[str, np.ndarray]
) -> PackedCheckpoint:
    """Pack matrices, by module name, and keep those parameters that are no matrices."""
    library.load()
    with ThreadPoolExecutor(usable_cores()) as pool:
        matrices = dict(zip(rows, pool.map(lambda make: library.pack(make()), rows.values()), strict=True))
    vectors = {name: np.asarray(value, np.float32) for name, value in params.items() if not _is_matrix(name)}
    return PackedCheckpoint(config, matrices, vectors, None, "", "")


def pack_quantized(model: QuantizedModel) -> PackedCheckpoint:
    """Pack a quantised model; matrices on grids that no format holds are dequantised to float32."""

    def rows(name: str) -> formats.Rows:
        held = blocks.rows(model.matrices[name])
        return quantized(grids.dequantized(model.matrices[name]), "float32") if held is None else held

    def floats(name: str) -> formats.Rows:
        value = np.asarray(model.params[name], np.float32)
        return quantized(value if name == "embed.embedding" else value.T, "float32")

    made = {name: functools.partial(rows, name) for name in model.matrices}
    made |= {n.rpartition(".")[0]: functools.partial(floats, n) for n in model.params if _is_matrix(n)}
    return pack_rows(model.config, made, model.params)


def _is_matrix(name: str) -> bool:
    return name.endswith(".kernel") or name == "embed.embedding"


def check_widths(config: TransformerConfig, format: str) -> None:
    """Check that the groups of a format divide the inputs of the model's matrices.

    Raises:
      ValueError: they do not.
    """
    if format not in formats.BLOCK_BYTES:
        return
    widths = {
        "d_model": config.d_model,
        "num_heads * head_dim": config.num_heads * config.head_dim,
        "d_ff": config.d_ff,
    }
    for name, width in widths.items():
        if width % formats.GROUP:
            raise ValueError(f"weights={format}: groups of {formats.GROUP} do not divide the model's {name}={width}")


def quantized(values: np.ndarray, format: str) -> formats.Rows:
    """Round weights to nearest in a format; return its rows."""
    inputs = values.shape[1]
    if format == "float32":
        return formats.Rows(format, values, None, inputs)
    if format == "bfloat16":
        return formats.Rows(format, formats.as_bfloat16(values), None, inputs)
    if format == "int8":
        return formats.Rows(format, *formats.as_int8(values), inputs)
    from gguf import constants, quants

    return formats.Rows(format, quants.quantize(values, constants.GGMLQuantizationType[format.upper()]), None, inputs)


def _load_default() -> PackedCheckpoint:
    """Load the default model, packed while its checksum is computed."""
    library.load()
    path, made = assets.default_model_path(), None
    before = _identity(path)
    with ThreadPoolExecutor(1) as beside:
        fetched = beside.submit(assets.fetch_default_model)
        if before is not None:
            try:
                made = _pack_gguf(gguf_file.read(path))
            except ValueError:  # damaged: fetched again by now, or the same error is raised below
                made = None
        fetched.result()
    if made is None or _identity(path) != before:  # not the file whose checksum was verified
        made = _pack_gguf(gguf_file.read(path))
    return made._replace(sha256=assets.MODEL_SHA256)


def _identity(path: Path) -> tuple[int, int] | None:
    found = path.stat() if path.is_file() else None
    return found and (found.st_dev, found.st_ino)


def _load_gguf(path: Path) -> PackedCheckpoint:
    """Load a GGUF file's own numbers; a separate thread computes its checksum meanwhile."""
    file = gguf_file.read(path)
    with ThreadPoolExecutor(1) as beside:
        digest = beside.submit(assets.sha256_file, path)
        return _pack_gguf(file)._replace(sha256=digest.result())


def _pack_gguf(file: gguf_file.GgufFile) -> PackedCheckpoint:
    config = gguf_config.config_from_gguf(file)
    family = families.GGUF_FAMILIES[file.metadata["general.architecture"]]
    tensors = weights.Tensors(file.path, {name: info.shape for name, info in file.tensors.items()}, file.tensor)
    return _pack_file(tensors, config, family, lambda job: gguf_rows(file, job.name), "")


def _load_folder(path: Path) -> PackedCheckpoint:
    """Load a Hugging Face folder's own numbers."""
    tensors, config, family, sha256 = weights.open_folder(path)

    def rows(job: weights.Job) -> formats.Rows:
        if job.name in tensors.matrices and (held := blocks.rows(tensors.matrices[job.name]())) is not None:
            return held
        values = tensors.read(job.name)
        values = np.asarray(values.T if job.rule.kind == "conv1d" else values, np.float32)
        is_narrow = not (np.ascontiguousarray(values).view(np.uint32) & 0xFFFF).any()
        return quantized(values, "bfloat16" if is_narrow else "float32")

    return _pack_file(tensors, config, family, rows, sha256)


def _pack_file(
    tensors: weights.Tensors,
    config: TransformerConfig,
    family: families.Family,
    rows_of: Callable[[weights.Job], formats.Rows],
    sha256: str,
) -> PackedCheckpoint:
    """Pack the matrices that `rows_of` returns, one output per row, and the vectors."""
    library.load()

    def work(job: weights.Job) -> dict[str, Packed | np.ndarray] | None:
        if not _is_matrix(job.ours[0]):
            return weights.values_of(tensors, job, config)
        rows = rows_of(job)
        if job.rule.kind == "interleaved":
            rows = rows._replace(values=weights.rotate_half_rows(rows.values, config.head_dim))
        parts = [rows.values] if len(job.ours) == 1 else np.split(rows.values, np.cumsum(job.widths)[:-1])
        try:
            return {name: library.pack(rows._replace(values=part)) for name, part in zip(job.ours, parts, strict=True)}
        except ValueError:  # NaN or infinite: read_all names all such tensors
            return None

    params = weights.read_all(tensors.source, weights.plan(tensors, config, family), work)
    matrices = {name.rpartition(".")[0]: value for name, value in params.items() if isinstance(value, Packed)}
    vectors = {n: np.asarray(value, np.float32) for n, value in params.items() if not isinstance(value, Packed)}
    return PackedCheckpoint(config, matrices, vectors, tensors.source, tensors.source.name, sha256)


def gguf_rows(file: gguf_file.GgufFile, name: str) -> formats.Rows:
    """Rows of a GGUF tensor as stored; types that no kernel reads are dequantised to float32."""
    info = file.tensors[name]
    kind, *_ = gguf_file.type_of(info.kind)
    if kind in formats.GGUF_TYPES:
        raw = np.frombuffer(file.content, np.uint8, info.size, info.offset).reshape(info.shape[0], -1)
        return formats.Rows(formats.GGUF_TYPES[kind], raw, None, info.shape[1])
    return quantized(file.tensor(name), "bfloat16" if kind == "BF16" else "float32")
