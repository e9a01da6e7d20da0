"""A compressed text: its vectors, what each stands for, and the file that holds them (S file).

The file is safetensors. Vectors lie in it as float32, bfloat16 or, with a scale a vector, int8. Its metadata say which
decoder and which compressor they were made with: no other reads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int32, Int64
from safetensors.numpy import save_file

from jaxbench import outputs
from jaxbench.pretrained import safetensors_files

FORMAT = 1
Dtype = Literal["float32", "bfloat16", "int8"]
DTYPES = ("float32", "bfloat16", "int8")


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
    tensors = {"spans": np.ascontiguousarray(result.spans), "positions": np.ascontiguousarray(result.positions)}
    if dtype == "int8":
        scales = np.abs(result.vectors).max(axis=1, initial=0.0, keepdims=True).astype(np.float32) / 127
        codes = np.rint(result.vectors / np.where(scales == 0, 1, scales))
        tensors |= {"vectors": codes.astype(np.int8), "scales": scales}
    else:
        kind = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
        tensors["vectors"] = np.ascontiguousarray(result.vectors.astype(kind))
    with outputs.whole(path) as temporary:
        save_file(tensors, temporary, {"compressed_text": json.dumps(about)})
    return Path(path).stat().st_size


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
    vectors = tensors["vectors"].astype(np.float32) * tensors.get("scales", np.float32(1))
    sizes = [len(vectors), len(tensors["spans"]), len(tensors["positions"])]
    if len(set(sizes)) > 1 or not np.isfinite(vectors).all():
        raise ValueError(f"compressed text: {path} is damaged: {sizes} vectors, spans and positions, or no numbers")
    return CompressionResult(vectors, tensors["spans"], tensors["positions"], **{name: about[name] for name in ABOUT})
