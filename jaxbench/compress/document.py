"""A compressed text: its vectors, what each stands for, and the file that holds them (S file).

The file is safetensors. Vectors lie in it as float32, bfloat16, with a scale a vector int8, or as product codes
(product.py). Its metadata say which decoder and which compressor they were made with: no other reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int32, Int64
from safetensors.numpy import save_file

from jaxbench import outputs
from jaxbench.compress import product
from jaxbench.pretrained import safetensors_files

FORMAT = 2
Dtype = Literal["float32", "bfloat16", "int8", "pq"]
DTYPES = ("float32", "bfloat16", "int8", "pq")


class CompressionResult(NamedTuple):
    """A text as vectors that a decoder reads where token embeddings stand."""

    vectors: Float32[np.ndarray, "M D"]
    spans: Int64[np.ndarray, "M 2"]  # characters of the text that each vector stands for: from, to
    positions: Int32[np.ndarray, " M"]  # of each among the text's tokens: the middle of its group
    ratio: int  # tokens a vector stands for; fewer at the end of a text
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
        """Tokens over vectors: the ratio, but for what the last group of a text or of a chunk lacks."""
        return self.original_length / max(1, self.compressed_length)


def save(path: str | Path, result: CompressionResult, *, dtype: Dtype = "bfloat16") -> int:
    """Write a compressed text, whole or not at all; its bytes.

    Raises:
      ValueError: dtype is not one of DTYPES.
    """
    if dtype not in DTYPES:
        raise ValueError(f"compressed text: dtype={dtype}; wanted one of {', '.join(DTYPES)}")
    about = {
        "format": FORMAT, "dtype": dtype, **{name: getattr(result, name) for name in ABOUT},
    }  # fmt: skip
    edges = np.append(result.spans[:, 0], result.spans[-1:, 1]).astype(np.int32)  # a span ends where the next begins
    tensors = {"edges": edges, "positions": np.ascontiguousarray(result.positions)}
    tensors |= stored(result.vectors, dtype)
    with outputs.whole(path) as temporary:
        save_file(tensors, temporary, {"compressed_text": json.dumps(about)})
    return Path(path).stat().st_size


def stored(vectors: Float32[np.ndarray, "M D"], dtype: Dtype) -> dict[str, np.ndarray]:
    """Vectors as the tensors of a file.

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
    """The vectors of a file's tensors."""
    if "codes" in tensors:
        return product.dequantized(product.Codes(tensors["codes"], tensors["centroids"].astype(np.float32)))
    return tensors["vectors"].astype(np.float32) * tensors.get("scales", np.float32(1))


ABOUT = ("ratio", "original_length", "processing_time", "model_sha256", "compressor_id")


def load(path: str | Path) -> CompressionResult:
    """Read a compressed text.

    Raises:
      ValueError: the file is missing, damaged, no compressed text, or of another version's format.
    """
    if not Path(path).is_file():
        raise ValueError(f"compressed text: {path} is no file; `compress.py compress` makes one")
    about, tensors = safetensors_files.annotated(Path(path), "compressed_text")
    if about.get("format") != FORMAT:
        raise ValueError(f"compressed text: {path} has format {about.get('format')}; wanted {FORMAT}")
    vectors = restored(tensors)
    edges = tensors["edges"].astype(np.int64)
    sizes = [len(vectors), len(edges) - 1, len(tensors["positions"])]
    if len(set(sizes)) > 1 or not np.isfinite(vectors).all():
        raise ValueError(f"compressed text: {path} is damaged: {sizes} vectors, spans and positions, or no numbers")
    return CompressionResult(
        vectors,
        np.stack([edges[:-1], edges[1:]], axis=1),
        tensors["positions"],
        **{name: about[name] for name in ABOUT},
    )
