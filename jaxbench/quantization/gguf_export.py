"""Rewrite a GGUF file with its matrices in another format, for llama.cpp and the native kernels (S file)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxbench import outputs
from jaxbench.native import formats
from jaxbench.pretrained import families, gguf_config, gguf_file, weights
from jaxbench.quantization import blocks
from jaxbench.quantization.recipe import QuantizedModel

# llama.cpp's codes for a file whose matrices are mostly of one type (llama_ftype).
FILE_TYPES = {"float32": 0, "q4_0": 2, "q4_1": 3, "q8_0": 7, "bfloat16": 32}
WITH_TYPE = ("q8_0", "q4_0", "q4_1")  # grids.NAMED
GGUF_NAMES = {"float32": "F32", "bfloat16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}


class Written(NamedTuple):
    """Result of an export."""

    path: Path
    bytes: int
    errors: dict[str, float]  # by tensor: relative 2-norm of the rounding error


def check(source: str | Path | None, output: str | Path, *, overwrite: bool) -> tuple[Path, Path]:
    """Check the paths of source and output before anything is computed, and return them.

    Raises:
      ValueError: the source is a folder or missing, or the output exists already or cannot be written.
    """
    path = weights.resolve(source)
    if path.is_dir():
        raise ValueError(f"--model={source} is a folder, and only GGUF files are written as GGUF; pass a GGUF file")
    return path, outputs.check_file(output, [path], overwrite=overwrite)


def export(
    source: str | Path | None,
    output: str | Path,
    *,
    format: str,
    embedding: str | None = None,
    quantized: QuantizedModel | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Written:
    """Write a GGUF file whose matrices are rounded to a format; metadata, tokenizer and vectors are unchanged.

    Args:
      source: a GGUF file, or "default".
      format: of the layers' matrices: q8_0, q4_0, q4_1, bfloat16 or float32.
      embedding: of the embedding and of an untied head; None = q8_0 with formats of four bits, else the layers' own.
      quantized: the source's model on the grids of those formats: its numbers are written unchanged.

    Raises:
      ValueError: the source is no GGUF file or damaged, a format is unknown, the groups do not divide a matrix's rows,
        `quantized` is on grids that GGUF has no type for, or the output exists already.
    """
    embedding = embedding or ("q8_0" if format.startswith("q4") else format)
    for name, value in (("format", format), ("embedding", embedding)):
        if value not in GGUF_NAMES:
            raise ValueError(f"--{name}={value!r} is not one of {', '.join(GGUF_NAMES)}")
    path, output = check(source, output, overwrite=overwrite)
    file = gguf_file.read(path)
    config = gguf_config.config_from_gguf(file)  # raises for models that no decoder here supports
    family = families.GGUF_FAMILIES[file.metadata["general.architecture"]]
    tensors = weights.Tensors(path, {name: info.shape for name, info in file.tensors.items()}, file.tensor)
    jobs = weights.plan(tensors, config, family)
    matrices = _matrices(file)
    for name in matrices:
        wanted = embedding if _is_embedding(name) else format
        if wanted in formats.BLOCK_BYTES and file.tensors[name].shape[-1] % formats.GROUP:
            width = file.tensors[name].shape[-1]
            raise ValueError(f"--format={wanted}: groups of {formats.GROUP} do not divide {name}'s rows of {width}")
    made = None if quantized is None else {job.name: _tensor_of(quantized, job) for job in jobs}

    def tensor(name: str) -> tuple[np.ndarray, str, float | None]:
        if made is not None:
            return made[name] if name in made else (_raw(file, name), _kind(file, name), None)
        if name not in matrices:
            return _raw(file, name), _kind(file, name), None
        return _rounded(file, name, GGUF_NAMES[embedding if _is_embedding(name) else format])

    with outputs.whole(output) as temporary:
        errors = _write(file, temporary, tensor, FILE_TYPES[format], say)
    return Written(output, output.stat().st_size, errors)


def _matrices(file: gguf_file.GgufFile) -> set[str]:
    """Names of the tensors that are matrices of the decoder."""
    rules = families.GGUF_FAMILIES[file.metadata["general.architecture"]].rules
    kinds = {rule.theirs.partition("{i}")[2] or rule.theirs for rule in rules if rule.kind in ("linear", "interleaved")}
    kinds.add("token_embd")
    return {
        name
        for name, info in file.tensors.items()
        if len(info.shape) == 2 and name.endswith(".weight") and any(name[: -len(".weight")].endswith(k) for k in kinds)
    }


def _is_embedding(name: str) -> bool:
    return name in ("token_embd.weight", "output.weight")


def _raw(file: gguf_file.GgufFile, name: str) -> np.ndarray:
    info = file.tensors[name]
    return np.frombuffer(file.content, np.uint8, info.size, info.offset)


def _kind(file: gguf_file.GgufFile, name: str) -> str:
    """Return a tensor's type by its name in the `gguf` package."""
    import gguf

    return gguf.GGMLQuantizationType(file.tensors[name].kind).name


def _rounded(file: gguf_file.GgufFile, name: str, wanted: str) -> tuple[np.ndarray, str, float | None]:
    """Round a tensor to nearest by ggml's rules: bytes, type, relative error if anything was rounded."""
    import gguf

    if _kind(file, name) == wanted:
        return _raw(file, name), wanted, None
    values, kind = file.tensor(name), gguf.GGMLQuantizationType[wanted]
    if not np.isfinite(values).all():
        raise ValueError(f"{file.path}: tensor {name} has NaN or infinite values, {wanted} has none")
    with np.errstate(over="ignore", invalid="ignore"):  # a scale that overflows is found below
        raw = gguf.quants.quantize(values, kind)
        rounded = gguf.quants.dequantize(raw, kind)
    if not np.isfinite(rounded).all():
        largest = np.abs(values).max()
        raise ValueError(
            f"{file.path}: tensor {name} has weights up to {largest}, too large for the scales of {wanted}"
        )
    return raw, wanted, _relative(rounded, values)


def _tensor_of(model: QuantizedModel, job: weights.Job) -> tuple[np.ndarray, str, float | None]:
    """Take a tensor of the file from a quantised model: bytes, type, error."""
    modules = [name.rpartition(".")[0] for name in job.ours]
    is_matrix = job.ours[0].endswith((".kernel", "embed.embedding"))
    if is_matrix and modules[0] in model.matrices:
        parts = [blocks.rows(model.matrices[module]) for module in modules]
        if any(part is None or part.format not in GGUF_NAMES for part in parts):
            grid = model.matrices[modules[0]].grid
            raise ValueError(f"--output: GGUF has no type here for {job.name} on {grid}; wanted {', '.join(WITH_TYPE)}")
        values, kind = np.concatenate([part.values for part in parts]), GGUF_NAMES[parts[0].format]
        error = max(model.errors[module] for module in modules)
    else:
        parts = [np.asarray(model.params[name], np.float32) for name in job.ours]
        values, kind, error = np.concatenate(parts, axis=-1), "F32", None
        values = values.T if job.rule.kind in ("linear", "interleaved") else values
    if job.rule.kind == "interleaved":  # back to llama.cpp's order: ours is theirs indexed like this
        places = weights.rotate_half_rows(np.arange(len(values)), model.config.head_dim)
        values = values[np.argsort(places)]
    return np.ascontiguousarray(values), kind, error


def _write(
    file: gguf_file.GgufFile, path: Path, tensor: Callable[[str], tuple], file_type: int, say: Callable[[str], None]
) -> dict[str, float]:
    """Write the file; return the relative error of each rounded tensor."""
    import gguf

    reader = gguf.GGUFReader(str(file.path))
    writer = gguf.GGUFWriter(path, arch=file.metadata["general.architecture"])
    if gguf.Keys.General.ALIGNMENT in reader.fields:  # the writer aligns tensors by it; a plain key would not suffice
        writer.add_custom_alignment(reader.alignment)
    own = ("general.architecture", "general.file_type", gguf.Keys.General.ALIGNMENT)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in own:
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    if gguf.Keys.General.QUANTIZATION_VERSION not in reader.fields:  # the format wants it in a file with blocks
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(file_type)
    errors = {}
    for i, name in enumerate(file.tensors):
        raw, type_name, error = tensor(name)
        kind = gguf.GGMLQuantizationType[type_name]
        shape = gguf.quant_shape_to_byte_shape(file.tensors[name].shape, kind)
        writer.add_tensor(name, np.ascontiguousarray(raw).view(np.uint8).reshape(shape), raw_dtype=kind)
        if error is not None:
            errors[name] = error
        say(f"{i + 1} of {len(file.tensors)} tensors: {name}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return errors


def _relative(value: np.ndarray, reference: np.ndarray) -> float:
    norm = float(np.linalg.norm(reference))
    return float(np.linalg.norm(value - reference)) / norm if norm else 0.0


def summary(errors: Mapping[str, float]) -> tuple[float, float]:
    """Median and largest error."""
    values = list(errors.values())
    return float(np.median(values)) if values else 0.0, max(values, default=0.0)
