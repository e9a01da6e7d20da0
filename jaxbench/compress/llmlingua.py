"""Shorten texts with LLMLingua in a separate process, over the decoder that reads them (S file)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxbench.measure import process
from jaxbench.pretrained import weights

PEER, TIMEOUT_S = "llmlingua", 3600.0
TOGETHER = 10  # texts per request


class Shortener:
    """LLMLingua, started on the first call."""

    def __init__(self, python: Path, folder: Path, checkpoint: weights.Checkpoint, tokenizer: Any, threads: int):
        self._python, self._folder, self._checkpoint, self._tokenizer, self._threads = (
            python,
            folder,
            checkpoint,
            tokenizer,
            threads,
        )
        self._worker: process.Worker | None = None

    def __call__(self, texts: Sequence[str], ratio: int) -> list[str]:
        """Shorten texts to about 1/ratio of their tokens."""
        if self._worker is None:
            self._worker = self._started()
        found: list[str] = []
        for first in range(0, len(texts), TOGETHER):
            part = list(texts[first : first + TOGETHER])
            found += self._worker.request("compress", texts=part, ratio=ratio)["texts"]
        return found

    def _started(self) -> process.Worker:
        folder = self._folder / "model"
        if not (folder / "tokenizer.json").exists():
            weights.save_checkpoint(folder, self._checkpoint.config, self._checkpoint.params)
            self._tokenizer.save(folder)
        environment = process.environment("cpu", threads=self._threads, library="PyTorch")
        module, log = "jaxbench.compress.study.llmlingua_worker", self._folder / "llmlingua.log"
        worker = process.Worker(
            PEER, module, environment=environment, log=log, threads=self._threads, timeout_s=TIMEOUT_S,
            python=self._python,
        )  # fmt: skip
        worker.request("start", model=str(folder))
        return worker

    def close(self) -> None:
        """End its process."""
        if self._worker is not None:
            self._worker.close()


@contextlib.contextmanager
def shortener(
    folder: Path, checkpoint: weights.Checkpoint, tokenizer: Any, *, threads: int
) -> Iterator[Shortener | None]:
    """Yield LLMLingua if `make peers` has installed it, else None."""
    try:
        python = process.peer_python(PEER)
    except ValueError as error:
        print(f"LLMLingua is left out: {error}")
        yield None
        return
    with contextlib.closing(Shortener(python, folder, checkpoint, tokenizer, threads)) as found:
        yield found
