"""Ray Data as the engine of bulk detection, for many machines (S file; extra `ray`).

Every machine must see the input files and the output's folder under the same paths. A plain file is cut into chunks
that any machine reads by itself; a .gz file, which has to be read from its start, is one piece of work.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from jaxbench import ray_pool, worker_pool
from jaxbench.text import lines
from jaxbench.watermark.bulk import bulk_detection


def engine(
    worker: bulk_detection.Worker, paths: list[str], *, processes: int, skip: frozenset[str]
) -> Iterator[dict[str, Any]]:
    """Yield the reports of all chunks, done by `processes` Ray actors; give it to bulk.run as its engine.

    Uses the Ray cluster of the environment (RAY_ADDRESS), else starts one on this machine.

    Raises:
      ValueError: Ray is not installed.
    """
    ray_pool.start(processes)
    import ray

    pieces = list(_pieces(paths, skip))
    if not pieces:
        return
    blocks = ray.data.from_items(pieces, override_num_blocks=len(pieces))
    reports = blocks.map_batches(
        _Actor,
        fn_constructor_args=(worker, skip),
        batch_size=1,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=processes),
        num_cpus=1,
        max_task_retries=ray_pool.RETRIES,  # without end otherwise
    )
    for row in reports.iter_rows():
        yield json.loads(row["report"])


class _Actor:
    """One process of one thread that scores pieces."""

    def __init__(self, worker: bulk_detection.Worker, skip: frozenset[str]):
        os.environ.update(worker_pool.ONE_THREAD)
        self._worker, self._skip = worker, skip

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        reports = []
        for piece in batch["piece"]:
            chunk = lines.Chunk(*json.loads(piece))
            whole = lines.chunks(chunk.path, chunk.file) if chunk.size < 0 else [chunk]
            reports += [json.dumps(self._worker(chunk)) for chunk in whole if chunk.name not in self._skip]
        return {"report": reports}


def _pieces(paths: list[str], skip: frozenset[str]) -> Iterator[dict[str, str]]:
    for file, path in enumerate(paths):
        if path.endswith(".gz"):
            chunks: Any = [lines.Chunk(path, file, 0, 1, 0, -1)]
        else:
            chunks = lines.chunks(path, file)
        yield from ({"piece": json.dumps(chunk)} for chunk in chunks if chunk.size < 0 or chunk.name not in skip)
