"""Shared by the commands that read answers: extract the features of all of them, showing progress (S file)."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

from jaxbench import cli, terminal
from jaxbench.hallucination import extract
from jaxbench.hallucination.extract import Item, Store
from jaxbench.hallucination.reader_settings import ReaderSettings
from jaxbench.hallucination.where import Where

PACKAGES = {"flax": "jaxbench", "torch": "torch_ref"}  # --backend -> package whose modules run


def read(
    items: Sequence[Item], settings: ReaderSettings, store: Store, *, package: str, where: Where, processes: int
) -> str:
    """Read the items that are not in the store yet, showing progress; return a summary in words.

    Raises:
      ValueError: as extract.load_readers, or a response has more tokens than half the window.
    """
    work = extract.groups(items, store)
    cli.keep(f"finished responses are in {store.folder}; the same command goes on")
    reading: dict[str, Any] = {"package": package, "where": where}
    if processes > 1:
        worker = extract.Worker(settings, store, functools.partial(extract.load_reader, **reading))
        results = extract.run(work, worker, processes=processes)
    else:
        results = extract.run_by_device(work, settings, store, **reading)
    total = sum(len(group.keys) for group in work)
    print(f"{len(items)} responses, {total} of them to be read", flush=True)
    started, done = time.monotonic(), 0
    with terminal.progress(total) as advance:
        for count in results:
            done += count
            advance(count)
    seconds = time.monotonic() - started
    rate = f", {60 * done / seconds:.1f} responses a minute" if done else ""
    cut = extract.num_with_cut_context(items, store)
    lost = f"; the contexts of {cut} of {len(items)} did not fit the window and lost their ends" if cut else ""
    return f"{done} responses in {seconds:.0f} s{rate}{lost}"
