"""A GGUF file written again with its matrices in another format, for llama.cpp and for the native kernels (S file)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxbench import outputs
from jaxbench.native import formats
from jaxbench.pretrained import families, gguf_config, gguf_file, weights

# Names that llama.cpp has for a file whose matrices are mostly of a type (llama_ftype).
FILE_TYPES = {"float32": 0, "q4_0": 2, "q4_1": 3, "q8_0": 7, "bfloat16": 32}
GGUF_NAMES = {"float32": "F32", "bfloat16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}


class Written(NamedTuple):
    """What an export did."""

    path: Path
    source_bytes: int
    bytes: int
    errors: dict[str, float]  # by tensor: relative 2-norm of what rounding changed


def export(
    source: str | Path | None,
    output: str | Path,
    *,
    format: str,
    embedding: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Written:
    """Write a GGUF file whose matrices are rounded to a format; metadata, tokenizer and vectors stay as they are.

    Args:
      source: a GGUF file, or "default".
      format: of the layers' matrices: q8_0, q4_0, q4_1, bfloat16 or float32.
      embedding: of the embedding and of an untied head; None = q8_0 with formats of four bits, else the layers' own.

    Raises:
      ValueError: the source is no GGUF file or damaged, a format is unknown, the groups do not divide a matrix's rows,
        or the output is there.
    """
    embedding = embedding or ("q8_0" if format.startswith("q4") else format)
    for name, value in (("format", format), ("embedding", embedding)):
        if value not in GGUF_NAMES:
            raise ValueError(f"--{name}={value!r} is not one of {', '.join(GGUF_NAMES)}")
    path = weights.resolve(source)
    if path.is_dir():
        raise ValueError(f"--model={source} is a folder, and only GGUF files are written as GGUF; pass a GGUF file")
    output = outputs.check_file(output, [path], overwrite=overwrite)
    file = gguf_file.read(path)
    config = gguf_config.config_from_gguf(file)  # refuses what no decoder here reads
    family = families.GGUF_FAMILIES[file.metadata["general.architecture"]]
    tensors = weights.Tensors(path, {name: info.shape for name, info in file.tensors.items()}, file.tensor)
    weights.plan(tensors, config, family)
    matrices = _matrices(file)
    for name in matrices:
        wanted = embedding if _is_embedding(name) else format
        if wanted in formats.BLOCK_BYTES and file.tensors[name].shape[-1] % formats.GROUP:
            width = file.tensors[name].shape[-1]
            raise ValueError(f"--format={wanted}: groups of {formats.GROUP} do not divide {name}'s rows of {width}")
    with outputs.whole(output) as temporary:
        errors = _write(file, temporary, matrices, format, embedding, say)
    return Written(output, path.stat().st_size, output.stat().st_size, errors)


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


def _write(file, path: Path, matrices: set[str], format: str, embedding: str, say) -> dict[str, float]:
    """Write the file; relative error of each matrix that was rounded."""
    import gguf

    reader = gguf.GGUFReader(str(file.path))
    writer = gguf.GGUFWriter(path, arch=file.metadata["general.architecture"])
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(FILE_TYPES[format])
    errors = {}
    for i, name in enumerate(file.tensors):
        info = file.tensors[name]
        raw = np.frombuffer(file.content, np.uint8, info.size, info.offset)
        if name in matrices:
            wanted = gguf.GGMLQuantizationType[GGUF_NAMES[embedding if _is_embedding(name) else format]]
            if info.kind != wanted:
                values = file.tensor(name)
                if not np.isfinite(values).all():
                    raise ValueError(f"{file.path}: tensor {name} has NaN or infinite values, {format} has none")
                raw = gguf.quants.quantize(values, wanted)
                errors[name] = _relative(gguf.quants.dequantize(raw, wanted), values)
        else:
            wanted = gguf.GGMLQuantizationType(info.kind)
        shape = gguf.quant_shape_to_byte_shape(info.shape, wanted)
        writer.add_tensor(name, np.ascontiguousarray(raw).view(np.uint8).reshape(shape), raw_dtype=wanted)
        say(f"{i + 1} of {len(file.tensors)} tensors: {name}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return errors


def _relative(value: np.ndarray, reference: np.ndarray) -> float:
    norm = float(np.linalg.norm(reference))
    return float(np.linalg.norm(value - reference)) / norm if norm else 0.0


def summary(written: Written) -> dict[str, Any]:
    """Sizes and errors of an export, for a table or JSON."""
    values = list(written.errors.values())
    return {
        "bytes": written.bytes,
        "source_bytes": written.source_bytes,
        "rounded": len(values),
        "error_median": float(np.median(values)) if values else 0.0,
        "error_largest": max(values, default=0.0),
    }
