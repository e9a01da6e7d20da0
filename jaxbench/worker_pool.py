"""Process many items on this machine, in several single-threaded processes or with one thread per device (S file).

If programs have serial parts, several single-threaded processes have more throughput than one multi-threaded one.
"""

from __future__ import annotations

import concurrent.futures.process
import contextlib
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

IN_FLIGHT = 3  # items per process, waiting or in progress
KILLED = "a worker process was killed"  # jobs/work.py reruns a command that ends with this


def one_thread() -> dict[str, str]:
    """Return the environment variables of a process of one thread; further flags of XLA are kept."""
    flags = [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"]
    return {
        "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        "XLA_FLAGS": " ".join(filter(None, flags)),
    }  # fmt: skip


def results(worker: Callable[[Any], Any], items: Iterable[Any], *, processes: int) -> Iterator[Any]:
    """Yield the result of `worker` for each item, in order of completion; every process has a pickled copy of it.

    A process ends with its parent, however that ends. An error of the worker is raised here; waiting items are dropped.

    Raises:
      ChildProcessError: a process was killed.
    """
    context = multiprocessing.get_context("spawn")
    with (
        _environment(one_thread()),  # the processes read it as they start
        concurrent.futures.ProcessPoolExecutor(processes, context, _start, (worker, os.getpid())) as pool,
    ):
        try:
            yield from _completed(pool, _work, items, processes)
        except concurrent.futures.process.BrokenProcessPool as error:
            raise ChildProcessError(
                f"{KILLED}: one of {processes} ended in the middle of its work, most likely because memory ran out; "
                "finished parts are kept; take fewer processes, or free some memory"
            ) from error


def by_threads(workers: Sequence[Callable[[Any], Any]], items: Iterable[Any]) -> Iterator[Any]:
    """Yield the results of workers in this process, each of which has one item at a time, in order of completion.

    For workers with a device each. An error of one is raised here, and waiting items are dropped.
    """
    if len(workers) == 1:
        yield from map(workers[0], items)
        return
    free: queue.SimpleQueue[Callable[[Any], Any]] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def work(item: Any) -> Any:
        worker = free.get()
        try:
            return worker(item)
        finally:
            free.put(worker)

    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
        yield from _completed(pool, work, items, len(workers))


def _completed(
    pool: concurrent.futures.Executor, work: Callable[[Any], Any], items: Iterable[Any], workers: int
) -> Iterator[Any]:
    """Yield results in order of completion, with a few items in flight."""
    waiting: set[concurrent.futures.Future] = set()
    try:
        for item in items:
            waiting.add(pool.submit(work, item))
            if len(waiting) >= IN_FLIGHT * workers:
                done, waiting = concurrent.futures.wait(waiting, return_when="FIRST_COMPLETED")
                yield from (future.result() for future in done)
        yield from (future.result() for future in concurrent.futures.as_completed(waiting))
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    kept = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_worker: Callable[[Any], Any] | None = None


def _start(worker: Callable[[Any], Any], parent: int) -> None:
    global _worker
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    _worker = worker


def end_with(parent: int) -> None:
    """End this process when its parent is gone: a killed parent cannot tell it to."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _work(item: Any) -> Any:
    assert _worker is not None
    return _worker(item)
