"""Work on many items by actors of one thread each on a Ray cluster (S file; extra `ray`): worker_pool's other form.

Items travel to the actors and results back: other machines need none of this one's files but those that a worker opens
itself, under the same path.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxbench import worker_pool

# Ray puts sockets into the folder for temporary files, under names of 66 characters; a socket's path has at most 107.
LONGEST_FOLDER = 40


def start(processes: int) -> None:
    """Join the Ray cluster of the environment (RAY_ADDRESS), else start one of `processes` on this machine.

    Raises:
      ValueError: Ray is not installed.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ValueError(f"engine: ray cannot be imported ({error}); pip install 'jaxbench[ray]'") from error
    if not ray.is_initialized():
        options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        named = os.environ.get("TMPDIR")
        if named is not None and len(named) > LONGEST_FOLDER:
            del os.environ["TMPDIR"]  # Ray then takes its own default
        try:
            # a cluster that is there has its own number
            ray.init(**({} if os.environ.get("RAY_ADDRESS") else {"num_cpus": processes}), **options)
        finally:
            if named is not None:
                os.environ["TMPDIR"] = named
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def results(worker: Callable[[Any], Any], items: Iterable[Any], *, processes: int) -> Iterator[Any]:
    """Yield what `worker`, of which each of `processes` actors has a copy, makes of each item, in any order.

    No more items are taken than actors hold, so that there may be more of them than fit in memory. An actor whose
    machine fails starts anew elsewhere; an error of the worker is raised here.
    """
    start(processes)
    import ray

    actor = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)(_Actor)
    actors = [actor.remote(worker) for _ in range(processes)]
    running: dict[Any, Any] = {}
    try:
        for number, item in enumerate(items):
            if number < worker_pool.IN_FLIGHT * processes:
                idle = actors[number % processes]
            else:
                (done,), _ = ray.wait(list(running))
                idle = running.pop(done)
                yield _result(done)
            running[idle.work.remote(item)] = idle
        while running:
            (done,), _ = ray.wait(list(running))
            del running[done]
            yield _result(done)
    finally:
        for each in actors:
            ray.kill(each)


def _result(reference: Any) -> Any:
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # as the worker raised it, without the actor's traceback in its text


class _Actor:
    """One process of one thread."""

    def __init__(self, worker: Callable[[Any], Any]):
        os.environ.update(worker_pool.ONE_THREAD)
        self._worker = worker

    def work(self, item: Any) -> Any:
        return self._worker(item)
