"""Ray as the engine of bulk detection, for many machines (S file; extra `ray`).

Every machine must see the input files and the output's folder under the same paths. A plain file is cut into chunks
that any machine can read directly; a .gz file, which has to be read from its start, is one piece of work.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from jaxbench import ray_pool
from jaxbench.text import lines
from jaxbench.watermark.bulk import bulk_detection


def engine(
    worker: bulk_detection.Worker, paths: list[str], *, processes: int, skip: frozenset[str]
) -> Iterator[dict[str, Any]]:
    """Yield the reports of all chunks, processed by `processes` Ray actors; pass it to bulk_detection.run as `engine`.

    Uses the Ray cluster of the environment (RAY_ADDRESS), else starts one on this machine.

    Raises:
      ValueError: Ray is not installed.
      ChildProcessError: a piece killed its actor on every attempt; the message names it.
    """
    for reports in ray_pool.results(
        functools.partial(_scored, worker, skip), _pieces(paths, skip), processes=processes
    ):
        yield from reports


def _scored(worker: bulk_detection.Worker, skip: frozenset[str], piece: lines.Chunk) -> list[dict[str, Any]]:
    """Return the reports of a piece's chunks."""
    chunks = lines.chunks(piece.path, piece.file) if piece.size < 0 else [piece]
    return [worker(chunk) for chunk in chunks if chunk.name not in skip]


def _pieces(paths: list[str], skip: frozenset[str]) -> Iterator[lines.Chunk]:
    """Yield the unfinished chunks of plain files, and compressed files as chunks of size -1."""
    for file, path in enumerate(paths):
        if path.endswith(".gz"):
            yield lines.Chunk(path, file, 0, 1, 0, -1)
        else:
            yield from (chunk for chunk in lines.chunks(path, file) if chunk.name not in skip)
