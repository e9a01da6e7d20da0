"""A compressed text: its vectors, what each stands for, and the file that holds them (S file).

The file is safetensors. It stores vectors as float32, bfloat16, int8 with one scale per vector, or product codes
(product.py). Its metadata identify the decoder and the compressor that they were made with: no other reads them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int32, Int64

from jaxbench import outputs
from jaxbench.compress import product
from jaxbench.pretrained import safetensors_files

FORMAT = 2
Dtype = Literal["float32", "bfloat16", "int8", "pq"]
DTYPES = ("float32", "bfloat16", "int8", "pq")
KINDS = {"float32": "F32", "bfloat16": "BF16", "int8": "I8", "uint8": "U8", "int32": "I32", "int64": "I64"}


class CompressionResult(NamedTuple):
    """A text as vectors that a decoder reads like token embeddings."""

    vectors: Float32[np.ndarray, "M D"]
    spans: Int64[np.ndarray, "M 2"]  # characters of the text that each vector stands for: from, to
    positions: Int32[np.ndarray, " M"]  # of each, in tokens of the text: the middle of its group
    ratio: int  # tokens per vector; fewer at the end of a text
    original_length: int  # tokens
    processing_time: float  # seconds, tokenising included
    model_sha256: str  # of the decoder
    compressor_id: str  # of the weights that made the vectors

    @property
    def compressed_length(self) -> int:
        """Number of vectors."""
        return len(self.vectors)

    @property
    def compression_ratio(self) -> float:
        """Tokens per vector: the ratio, or less if the last group is not full."""
        return self.original_length / max(1, self.compressed_length)


def save(path: str | Path, result: CompressionResult, *, dtype: Dtype = "bfloat16") -> int:
    """Write a compressed text atomically and return the file's size in bytes.

    Raises:
      ValueError: dtype is not one of DTYPES, or there are no vectors.
    """
    if dtype not in DTYPES:
        raise ValueError(f"compressed text: dtype={dtype}; wanted one of {', '.join(DTYPES)}")
    if not len(result.vectors):
        raise ValueError(f"compressed text: {len(result.vectors)} vectors; wanted one at least")
    tensors = {"positions": result.positions, **stored(result.vectors, dtype)}
    columns = {name: Column.of(value) for name, value in tensors.items()}
    columns["edges"] = edges(len(result.vectors), [result.spans[:, 0]], int(result.spans[-1, 1]))
    return write(path, columns, {"dtype": dtype, **{name: getattr(result, name) for name in ABOUT}})


class Column(NamedTuple):
    """A tensor of a file, as consecutive parts of its rows."""

    dtype: np.dtype
    shape: tuple[int, ...]
    parts: Iterable[np.ndarray]

    @classmethod
    def of(cls, value: np.ndarray) -> Column:
        """Make a column of a whole tensor."""
        return cls(value.dtype, value.shape, [value])


def edges(count: int, starts: Iterable[Int64[np.ndarray, " M"]], end: int) -> Column:
    """Start of each vector's characters, and the last one's end: a span ends where the next begins."""
    kind = np.dtype(np.int32 if end < 2**31 else np.int64)
    return Column(kind, (count + 1,), itertools.chain(starts, [np.array([end])]))


def write(path: str | Path, columns: Mapping[str, Column], about: Mapping[str, Any]) -> int:
    """Write a file of tensors that need not fit in memory, atomically; return its size in bytes.

    safetensors' own writer needs the tensors in memory. The format is 8 bytes for the header's length, the header in
    JSON, and the tensors' bytes one after another.
    """
    header: dict[str, Any] = {"__metadata__": {"compressed_text": json.dumps({"format": FORMAT, **about})}}
    at = 0
    for name, column in columns.items():
        size = math.prod(column.shape) * column.dtype.itemsize
        header[name] = {"dtype": KINDS[column.dtype.name], "shape": column.shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with outputs.whole(path) as temporary, open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for column in columns.values():
            for part in column.parts:
                file.write(np.ascontiguousarray(part, column.dtype).tobytes())
        if file.tell() != 8 + len(text) + at:
            raise ValueError(f"compressed text: {file.tell()} bytes were written; wanted {8 + len(text) + at}")
    return Path(path).stat().st_size


def stored(vectors: Float32[np.ndarray, "M D"], dtype: Dtype) -> dict[str, np.ndarray]:
    """Return vectors as the tensors of a file.

    Raises:
      ValueError: they are too few for dtype=pq.
    """
    if dtype == "pq":
        codes = product.quantized(vectors)
        return {"codes": codes.numbers, "centroids": codes.centroids.astype(ml_dtypes.bfloat16)}
    if dtype == "int8":
        scales = np.abs(vectors).max(axis=1, initial=0.0, keepdims=True).astype(np.float32) / 127
        numbers = np.rint(vectors / np.where(scales == 0, 1, scales))
        return {"vectors": numbers.astype(np.int8), "scales": scales}
    kind = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    return {"vectors": np.ascontiguousarray(vectors.astype(kind))}


def restored(tensors: Mapping[str, np.ndarray]) -> Float32[np.ndarray, "M D"]:
    """Return the vectors of a file's tensors."""
    if "codes" in tensors:
        return product.dequantized(product.Codes(tensors["codes"], tensors["centroids"].astype(np.float32)))
    return tensors["vectors"].astype(np.float32) * tensors.get("scales", np.float32(1))


# Metadata of a file besides its format and dtype, with the type of each.
ABOUT = {
    "ratio": int,
    "original_length": int,
    "processing_time": (int, float),
    "model_sha256": str,
    "compressor_id": str,
}
OF_DTYPE = {"int8": ("vectors", "scales"), "pq": ("codes", "centroids")}  # tensors; the others have only vectors


def load(path: str | Path) -> CompressionResult:
    """Read a compressed text.

    Raises:
      ValueError: the file is missing, damaged, not a compressed text, or in another version's format.
    """
    if not Path(path).is_file():
        raise ValueError(f"compressed text: {path} is no file; `compress.py compress` makes one")
    about, tensors = safetensors_files.annotated(Path(path), "compressed_text")
    if about.get("format") != FORMAT:
        raise ValueError(f"compressed text: {path} has format {about.get('format')}; wanted {FORMAT}")
    if fault := _fault(about, tensors):
        raise ValueError(f"compressed text: {path} is damaged: {fault}")
    vectors, edges = restored(tensors), tensors["edges"].astype(np.int64)
    if not np.isfinite(vectors).all():
        raise ValueError(f"compressed text: {path} is damaged: {vectors.shape} vectors, not all of them finite")
    return CompressionResult(
        vectors,
        np.stack([edges[:-1], edges[1:]], axis=1),
        tensors["positions"],
        **{name: about[name] for name in ABOUT},
    )


def _fault(about: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> str:
    """Return what is wrong with a file, as far as it can be seen; nothing = ""."""
    for name, kind in ABOUT.items():
        if not isinstance(about.get(name), kind) or isinstance(about.get(name), bool):
            return f"its {name} is {about.get(name)!r}"
    if about.get("dtype") not in DTYPES or about["ratio"] < 1:
        return f"dtype={about.get('dtype')!r} and ratio={about['ratio']}"
    wanted = {"positions", "edges", *OF_DTYPE.get(about["dtype"], ("vectors",))}
    if set(tensors) != wanted:
        return f"it has {sorted(tensors)}, wanted {sorted(wanted)}"

    def size(name: str, axis: int) -> int:
        shape = tensors[name].shape if name in tensors else ()
        return shape[axis] if axis < len(shape) else 0

    count, pieces = tensors["positions"].size, size("centroids", 0)
    shapes = {
        "positions": (count,), "edges": (count + 1,), "vectors": (count, size("vectors", 1)), "scales": (count, 1),
        "codes": (count, pieces), "centroids": (pieces, product.CENTROIDS, product.PIECE),
    }  # fmt: skip
    bad = [f"{name} {tensors[name].shape}" for name in sorted(wanted) if tensors[name].shape != shapes[name]]
    if bad or not count:
        return f"{count} vectors, and {', '.join(bad) or 'nothing else'}"
    edges, positions = tensors["edges"], tensors["positions"]
    if not (np.issubdtype(edges.dtype, np.integer) and np.issubdtype(positions.dtype, np.integer)):
        return f"edges are {edges.dtype}, positions {positions.dtype}; wanted integers"
    is_risen = (np.diff(edges) >= 0).all() and (np.diff(positions) > 0).all() and edges[0] >= 0 and positions[0] >= 0
    if not is_risen or positions[-1] >= about["original_length"]:
        return f"edges or positions do not rise, or are beyond its {about['original_length']} tokens"
    return ""
