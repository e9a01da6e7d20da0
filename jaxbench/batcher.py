"""Requests gathered into batches by size or time (S file).

Requests wait until max_batch_size of them are there or the oldest has waited timeout_ms; then one thread runs them as
one batch. Every request has its own result: a batch that fails is run again one request at a time, so that only the
request at fault gets the error; a request that is cancelled, or whose time is over before its batch starts, is left
out, and nobody else's result changes.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A request that waits."""

    request: Any
    future: futures.Future
    since: float  # seconds by the clock
    deadline: float | None  # after which it is no longer wanted


class Batcher:
    """Runs requests in batches on a thread of its own."""

    def __init__(
        self,
        run: Callable[[list], Sequence],
        *,
        max_batch_size: int,
        timeout_ms: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Start the thread.

        Args:
          run: computes a list of requests; returns their results in the same order.
          max_batch_size: most requests of a batch, > 0.
          timeout_ms: longest that a request waits for others, milliseconds, >= 0.
          clock: seconds.

        Raises:
          ValueError: a limit is out of range.
        """
        if max_batch_size < 1:
            raise ValueError(f"batcher: max_batch_size={max_batch_size} must be at least 1")
        if not timeout_ms >= 0:
            raise ValueError(f"batcher: timeout_ms={timeout_ms} must be at least 0")
        self._run, self._size, self._patience, self._clock = run, max_batch_size, timeout_ms / 1e3, clock
        self._waiting: collections.deque[Entry] = collections.deque()
        self._changed, self._is_closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="batcher", daemon=True)
        self._thread.start()

    def submit(self, request: Any, *, timeout_s: float | None = None) -> futures.Future:
        """Queue a request; its future gets the result, or the error that this request alone ends with.

        Args:
          request: what `run` takes a list of.
          timeout_s: seconds after which the request is given up with TimeoutError if its batch has not started.

        Raises:
          ValueError: the batcher is closed, or timeout_s is not positive.
        """
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"batcher: timeout_s={timeout_s} must be above 0")
        now = self._clock()
        entry = Entry(request, futures.Future(), now, None if timeout_s is None else now + timeout_s)
        with self._changed:
            if self._is_closed:
                raise ValueError(f"batcher: closed, request {request!r:.80} comes too late")
            self._waiting.append(entry)
            self._changed.notify()
        return entry.future

    def map(self, requests: Sequence) -> list:
        """Return the results of requests in their order; the first error among them is raised when all are done."""
        pending = [self.submit(request) for request in requests]
        futures.wait(pending)
        return [future.result() for future in pending]

    def close(self) -> None:
        """Finish what waits, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            live = [entry for entry in batch if self._is_wanted(entry)]
            if live:
                self._finish(live)

    def _next(self) -> list[Entry] | None:
        """Wait for a batch and take it; None when the batcher is closed and nothing waits."""
        with self._changed:
            while True:
                if self._waiting:
                    left = self._waiting[0].since + self._patience - self._clock()
                    if len(self._waiting) >= self._size or left <= 0 or self._is_closed:
                        return [self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))]
                    self._changed.wait(left)
                elif self._is_closed:
                    return None
                else:
                    self._changed.wait()

    def _is_wanted(self, entry: Entry) -> bool:
        """Tell whether a request is still to be computed; from here on it can no longer be cancelled."""
        if not entry.future.set_running_or_notify_cancel():
            return False
        if entry.deadline is not None and self._clock() >= entry.deadline:
            waited = self._clock() - entry.since
            entry.future.set_exception(TimeoutError(f"batcher: given up after waiting {waited:.3f} s for its batch"))
            return False
        return True

    def _finish(self, batch: list[Entry]) -> None:
        """Give every request of a batch its result or its error."""
        try:
            results = self._computed(batch)
        except Exception as error:  # noqa: BLE001 - whatever a request raises is that request's answer
            if len(batch) == 1:
                batch[0].future.set_exception(error)
                return
            for entry in batch:
                self._finish([entry])
            return
        for entry, result in zip(batch, results, strict=True):
            entry.future.set_result(result)

    def _computed(self, batch: list[Entry]) -> Sequence:
        results = self._run([entry.request for entry in batch])
        if len(results) != len(batch):
            raise ValueError(f"batcher: run returned {len(results)} results for {len(batch)} requests")
        return results


def generation(generator: Any, *, max_new_tokens: int, seed: int) -> Callable[[list], list]:
    """Return what a batcher runs to generate: prompts (lists of ids) to their new tokens.

    Args:
      generator: a Generator of either backend. Every row draws as row 0 of its seed, so that a request's tokens depend
        neither on the batch it lands in nor on its place there.
      max_new_tokens: of each request.
      seed: of every request's draws.
    """

    def run(requests: list) -> list:
        found = generator(requests, max_new_tokens=max_new_tokens, seed=seed, row_ids=[0] * len(requests))
        return [row[:number].tolist() for row, number in zip(found.tokens, found.lengths, strict=True)]

    return run
