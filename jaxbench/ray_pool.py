"""Work on many items by actors of one thread each on a Ray cluster (S file; extra `ray`): worker_pool's other form.

Items travel to the actors and results back: other machines need none of this one's files but those that a worker opens
itself, under the same path.
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
RETRIES = 3  # of an item whose actor died under it


def start(processes: int) -> None:
    """Join the Ray cluster of the environment (RAY_ADDRESS), else start one of `processes` on this machine.

    Raises:
      ValueError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError(f"engine: ray cannot be imported ({error}); pip install 'jaxbench[ray]'") from error
    if not ray.is_initialized():
        options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        named = os.environ.get("TMPDIR")
        if named is not None and len(named) > LONGEST_FOLDER:
            del os.environ["TMPDIR"]  # Ray then takes its own default
        try:
            with warnings.catch_warnings():
                # of JAX, once it has a backend: what Ray forks becomes another program at once
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                # a cluster that is there has its own number
                ray.init(**({} if os.environ.get("RAY_ADDRESS") else {"num_cpus": processes}), **options)
        finally:
            if named is not None:
                os.environ["TMPDIR"] = named


def results(worker: Callable[[Any], Any], items: Iterable[Any], *, processes: int) -> Iterator[Any]:
    """Yield what `worker`, of which each of `processes` actors has a copy, makes of each item, in any order.

    No more items are taken than actors hold, so that there may be more of them than fit in memory. An actor gets its
    first item once it runs, and others to wait for it with its first result: a cluster with fewer free cores than
    `processes` does all the work with those that it has, and a few items lie on as many actors. An actor whose machine
    fails starts anew elsewhere; an error of the worker is raised here.

    Raises:
      ChildProcessError: an item ended its actor each time; those that the actor held are named.
    """
    start(processes)
    import ray

    actor = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=RETRIES)(_Actor)
    actors = [actor.remote(worker) for _ in range(processes)]
    running: dict[Any, tuple[Any, Any]] = {}  # a result to come, its actor and item; an actor's are in its own order
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
    """The actor of a result that is there, which goes from `running`, and the result."""
    import ray

    actor = running[done][0]
    try:
        found = ray.get(done)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # as the worker raised it, without the actor's traceback in its text
    except ray.exceptions.RayActorError as error:
        raise killed([item for other, item in running.values() if other == actor]) from error
    del running[done]
    return actor, found


def killed(items: Sequence[Any]) -> ChildProcessError:
    """What is raised where one of the items that an actor held ended it each time: a result may be lost with it."""
    named = " or ".join(str(item)[:120] for item in items)
    return ChildProcessError(
        f"{worker_pool.KILLED}: {named} ended its Ray actor {RETRIES + 1} times, most likely because memory ran out; "
        "finished parts are kept; take fewer processes, or leave it out"
    )


class _Actor:
    """One process of one thread."""

    def __init__(self, worker: Callable[[Any], Any]):
        os.environ.update(worker_pool.ONE_THREAD)
        self._worker = worker

    def started(self) -> None:
        """Say that this process runs."""

    def work(self, item: Any) -> Any:
        return self._worker(item)
