"""Compress a file that need not fit in memory, nor its vectors: they are saved in parts.

Data flow: pieces of the file -> a stream that compresses chunks as they fill up -> parts of two thousand vectors, each
a file with the stream's state after it -> one file of all parts, which are then removed. A killed run resumes after its
last part, and writes the same bytes as an uninterrupted run, except for the time it took.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxbench import outputs, store
from jaxbench.compress import document, product
from jaxbench.compress.auto import AutoCompressor, StreamingCompressor
from jaxbench.pretrained import safetensors_files
from jaxbench.text import stream as text_stream

PART = 2048  # least vectors of a part: 2.4 MB in bfloat16, from 64 KB of text at 8 tokens per vector
KEY = "compressed_part"


class Written(NamedTuple):
    """A compressed file."""

    tokens: int
    vectors: int
    seconds: float  # of compressing, over all runs
    bytes: int  # of the file of vectors
    resumed_at: int  # byte of the text at which this run resumed


class _Part(NamedTuple):
    path: Path
    first: int  # index of its first vector
    end: int  # index after its last vector
    state: dict[str, Any]  # of the stream after it
    byte: int  # of the text, after what was read
    is_last: bool


def compress_file(
    compressor: AutoCompressor, source: Path, output: Path, *, sha256: str, dtype: document.Dtype, workdir: Path,
    part: int = PART, progress: Callable[[int], Any] = lambda count: None,
) -> Written:  # fmt: skip
    """Compress a text file into a file of vectors.

    Args:
      sha256: of the text: a run resumes only with the text that it began with.
      workdir: of the parts, which is removed at the end.
      part: least vectors of a part.
      progress: called with the number of bytes read.

    Raises:
      ValueError: the text has no tokens, or too few for product codes, or is not UTF-8, or workdir holds the parts of
        another run.
    """
    claimed = f"{sha256}-{compressor.id}-{compressor.ratio}-{dtype}"
    if workdir.exists():
        store.claim(workdir, claimed)
    parts = _found(workdir)
    state, resumed_at = (parts[-1].state, parts[-1].byte) if parts else ({}, 0)
    stream = StreamingCompressor.resumed(compressor, state) if parts else StreamingCompressor(compressor)
    progress(at := resumed_at)

    def keep(is_last: bool) -> None:
        store.claim(workdir, claimed)
        first = parts[-1].end if parts else 0
        path = workdir / f"part-{len(parts):06d}.safetensors"
        parts.append(_Part(path, first, stream.vectors, stream.state(), at, is_last))
        _write(parts[-1], stream.take(), dtype)

    if not (parts and parts[-1].is_last):
        for text, end in text_stream.read(source, start=at):
            stream.add_chunk(text)
            progress(end - at)
            at = end
            if stream.vectors - (parts[-1].end if parts else 0) >= part:
                keep(is_last=False)
        stream.close()
        if dtype == "pq":  # before anything is saved, so that a run with another --dtype is free to start
            product.check(stream.vectors, compressor.config.decoder.d_model)
        keep(is_last=True)
    about = {
        "ratio": compressor.ratio, "original_length": stream.tokens, "processing_time": stream.seconds,
        "model_sha256": compressor.model_sha256, "compressor_id": compressor.id,
    }  # fmt: skip
    size = document.write(output, _columns(parts, dtype), {"dtype": dtype, **about})
    _remove(workdir, parts)
    return Written(stream.tokens, stream.vectors, stream.seconds, size, resumed_at)


def _write(part: _Part, made: Any, dtype: document.Dtype) -> None:
    tensors = {"starts": made.starts, "positions": made.positions}
    tensors |= document.stored(made.vectors, "float32" if dtype == "pq" else dtype)  # codes are learned from all parts
    about = {name: value for name, value in part._asdict().items() if name != "path"}
    outputs.save_tensors(part.path, tensors, {KEY: json.dumps(about)})


def has_parts(workdir: Path) -> bool:
    """True if another run would resume after a part."""
    return any(workdir.glob("part-*.safetensors"))


def _found(workdir: Path) -> list[_Part]:
    """Saved parts, in order.

    Raises:
      ValueError: one is damaged.
    """
    found = []
    for path in sorted(workdir.glob("part-*.safetensors")):
        about, _ = safetensors_files.annotated(path, KEY)
        found.append(_Part(path=path, **about))
    return found


def _columns(parts: list[_Part], dtype: document.Dtype) -> dict[str, document.Column]:
    """The tensors of the whole file, in the order of document.save, read part by part as they are written."""

    def read(name: str) -> Iterator[np.ndarray]:
        for part in parts:
            yield safetensors_files.opened([part.path])[2](name)

    def taken(places: np.ndarray) -> np.ndarray:
        rows: list[Any] = [None] * len(places)
        for part, vectors in zip(parts, read("vectors")):
            for i in np.flatnonzero((places >= part.first) & (places < part.end)):
                rows[i] = vectors[places[i] - part.first]
        return np.stack(rows)

    count = parts[-1].end
    shapes, types, _ = safetensors_files.opened([parts[0].path])
    kinds = {kind: np.dtype(name) for name, kind in document.KINDS.items()}
    columns = {
        name: document.Column(kinds[types[name]], (count, *shapes[name][1:]), read(name))
        for name in ("positions", "vectors", "scales")
        if name in shapes
    }
    if dtype == "pq":
        centroids = product.learned(count, taken)
        del columns["vectors"]
        codes = (product.coded(vectors, centroids) for vectors in read("vectors"))
        columns["codes"] = document.Column(np.dtype(np.uint8), (count, len(centroids)), codes)
        columns["centroids"] = document.Column.of(centroids.astype(kinds["BF16"]))
    columns["edges"] = document.edges(count, read("starts"), parts[-1].state["characters"])
    return columns


def _remove(workdir: Path, parts: list[_Part]) -> None:
    """Remove the parts, the last first: those that a killed process leaves are a beginning, which a run resumes."""
    for path in (*(part.path for part in reversed(parts)), workdir / "config_id"):
        path.unlink(missing_ok=True)
    if not any(workdir.iterdir()):
        workdir.rmdir()
