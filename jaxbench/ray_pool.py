"""Process many items with single-threaded actors on a Ray cluster (S file; extra `ray`): a variant of worker_pool.

Items are sent to the actors and results sent back: other machines need none of this one's files except those that a
worker opens itself, under the same path.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxbench import worker_pool

# Ray puts sockets into the folder for temporary files, under names of 66 characters; a socket's path has at most 107.
LONGEST_FOLDER = 40
RETRIES = 3  # of an item whose actor died while working on it


def start(processes: int) -> None:
    """Join the Ray cluster of the environment (RAY_ADDRESS), or start one of `processes` CPUs on this machine.

    Raises:
      ValueError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError(f"engine: ray cannot be imported ({error}); pip install -e '.[ray]'") from error
    if not ray.is_initialized():
        options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        named = os.environ.get("TMPDIR")
        if named is not None and len(named) > LONGEST_FOLDER:
            del os.environ["TMPDIR"]  # Ray then takes its own default
        try:
            with warnings.catch_warnings():
                # JAX warns once it has a backend, but what Ray forks calls exec at once
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                # an existing cluster has its own number of CPUs
                ray.init(**({} if os.environ.get("RAY_ADDRESS") else {"num_cpus": processes}), **options)
        finally:
            if named is not None:
                os.environ["TMPDIR"] = named


def results(worker: Callable[[Any], Any], items: Iterable[Any], *, processes: int) -> Iterator[Any]:
    """Yield the result of `worker` for each item, in any order; each of `processes` actors has a copy of the worker.

    Only as many items are taken as actors hold, so that there may be more of them than fit in memory. An actor gets
    its first item once it runs, and others to queue with its first result: a cluster with fewer free cores than
    `processes` does all the work with those that it has, and a few items are spread over as many actors. An actor
    whose machine fails restarts elsewhere; an error of the worker is raised here.

    Raises:
      ChildProcessError: an item ended its actor on every try; the items that the actor held are named.
    """
    start(processes)
    import ray

    actor = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=RETRIES)(_Actor)
    actors = [actor.remote(worker) for _ in range(processes)]
    running: dict[Any, tuple[Any, Any]] = {}  # pending result: its actor and item; an actor's are in its own order
    starting, left, proven = {each.started.remote(): each for each in actors}, iter(items), set()
    try:
        while starting or running:
            (done,), _ = ray.wait([*starting, *running])
            if done in starting:
                idle, count = starting.pop(done), 1
            else:
                idle, found = _result(running, done)
                yield found
                count = 1 if idle in proven else worker_pool.IN_FLIGHT
                proven.add(idle)
            for item in itertools.islice(left, count):
                running[idle.work.remote(item)] = idle, item
            if not running:  # no item is left
                return
    finally:
        for each in actors:
            ray.kill(each)


def _result(running: dict[Any, tuple[Any, Any]], done: Any) -> tuple[Any, Any]:
    """Remove a finished result from `running`, and return its actor and the result."""
    import ray

    actor = running[done][0]
    try:
        found = ray.get(done)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # as raised by the worker, without the actor's traceback in its text
    except ray.exceptions.RayActorError as error:
        raise killed([item for other, item in running.values() if other == actor]) from error
    del running[done]
    return actor, found


def killed(items: Sequence[Any]) -> ChildProcessError:
    """Error for an actor that one of its items ended on every try: a finished result may be lost with it."""
    named = " or ".join(str(item)[:120] for item in items)
    return ChildProcessError(
        f"{worker_pool.KILLED}: {named} ended its Ray actor {RETRIES + 1} times, most likely because memory ran out; "
        "finished parts are kept; take fewer processes, or leave it out"
    )


class _Actor:
    """One process of one thread."""

    def __init__(self, worker: Callable[[Any], Any]):
        os.environ.update(worker_pool.one_thread())
        self._worker = worker

    def started(self) -> None:
        """Return once this process runs."""

    def work(self, item: Any) -> Any:
        return self._worker(item)
