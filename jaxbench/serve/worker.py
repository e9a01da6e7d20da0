"""The engine in a process of its own, and the server's end of the line to it (S file).

A worker that dies takes with it what it was computing and nothing else: its requests end with an error, another one is
started, and requests are refused until it is ready.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import multiprocessing
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from jaxbench import worker_pool
from jaxbench.serve.engine import Engine, Event, QueueFull
from jaxbench.serve.marking import Watermarks
from jaxbench.serve.request import Request
from jaxbench.serve.settings import EngineConfig, load_engine

STATS_S = 0.5  # between two reports of an engine that has nothing to do
BUSY_STATS_S = 0.1  # between its numbers while it is busy


class Report(NamedTuple):
    """What a worker says."""

    kind: str  # loading | ready | events | failed
    events: tuple[Event, ...] = ()
    about: dict[str, Any] = {}  # loading: done, total; ready: of the model; events: the engine's stats, or nothing
    error: str = ""


def work(config: EngineConfig, line: Connection, watermarks: Watermarks | None = None) -> None:
    """Serve requests that come down the line until it ends."""
    try:
        engine = load_engine(config, watermarks=watermarks, progress=lambda done, total: line.send(
            Report("loading", about={"done": done, "total": total})
        ))  # fmt: skip
    except Exception as error:
        line.send(Report("failed", error=f"{type(error).__name__}: {error}"))
        return
    runner = engine.runner
    about = {
        "max_seq_len": runner.max_seq_len, "vocab_size": runner.vocab_size, "block_size": runner.block_size,
        "cache_tokens": (runner.num_blocks - 1) * runner.block_size, "cache_bytes": runner.cache_bytes,
        "grammars": engine.has_grammars,
    }  # fmt: skip
    line.send(Report("ready", about=about))
    told = 0.0
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            told = _turn(engine, line, told)


def _turn(engine: Engine, line: Connection, told: float = 0.0) -> float:
    """Take what has come, compute a step, and tell what happened; when the engine's numbers were told last.

    told: the same of the turn before. A token does not wait for numbers that nobody reads so often.
    """
    was_busy, events = engine.is_busy, []
    _take(engine, line, events, 0 if was_busy else STATS_S)
    until = time.monotonic() + engine.limits.max_wait_ms / 1e3
    while not was_busy and engine.is_busy and (left := until - time.monotonic()) > 0:
        if engine.scheduler.num_waiting_tokens >= engine.limits.max_batch_tokens:
            break
        if _is_there(line, min(left, BUSY_STATS_S)):
            _take(engine, line, events, 0)
        elif left > BUSY_STATS_S:  # it waits, and does not hang
            line.send(Report("events", about=engine.stats()))
    if engine.is_busy:
        events += engine.step()
    now = time.monotonic()
    is_due = now - told >= BUSY_STATS_S or not engine.is_busy
    if events or is_due:
        line.send(Report("events", tuple(events), engine.stats() if is_due else {}))
    return now if is_due else told


def _take(engine: Engine, line: Connection, events: list[Event], seconds: float) -> None:
    """Take all orders that are there, or the first that comes within so many seconds and those behind it."""
    while _is_there(line, seconds):
        seconds = 0
        name, value = line.recv()
        if name == "end":
            raise EOFError
        if name == "add":
            events += _added(engine, value)
        elif event := engine.cancel(value):
            events.append(event)


def _is_there(line: Connection, seconds: float) -> bool:
    """True where there is something to receive within so many seconds.

    Asked in every step: Connection.poll makes a selector of Python objects each time.
    """
    poller = select.poll()
    poller.register(line, select.POLLIN)
    return bool(poller.poll(1e3 * seconds))


def _added(engine: Engine, request: Request) -> list[Event]:
    try:
        engine.add(request)
    except (ValueError, QueueFull) as error:
        return [Event(request.id, None, None, "error", str(error))]
    return []


class Supervisor:
    """Keeps a worker alive, and hands its reports on; one that says nothing for too long is killed.

    A worker that is ready is heard in the event loop itself: a token wakes one thread on its way to the client.
    """

    def __init__(
        self, config: EngineConfig, listen: Callable[[Report], Any], loop: asyncio.AbstractEventLoop,
        watermarks: Watermarks | None = None,
    ):  # fmt: skip
        """Start the first worker. listen: called in the loop with every report; a worker's death is a report too."""
        self._config, self._listen, self._loop, self._watermarks = config, listen, loop, watermarks
        self._heard = 0.0
        self._orders: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        self._ready: int | None = None  # number of the worker that takes orders
        self._line: Connection | None = None
        self._ending = threading.Event()
        self.num_started = 0
        self.process: Any = None
        atexit.register(self._kill)  # before multiprocessing's own hook, which would wait for the worker for ever
        threading.Thread(target=self._write, daemon=True).start()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def send(self, name: str, value: Any) -> bool:
        """Send an order, ("add", Request) or ("cancel", id), without waiting; False where no worker is ready."""
        number = self._ready
        if number is None:
            return False
        self._orders.put((number, name, value))
        return True

    def _write(self) -> None:
        """Hand orders to the worker that they are for: a busy one reads between its steps alone."""
        while True:
            number, name, value = self._orders.get()
            line = self._line
            if line is not None and number == self.num_started:
                with contextlib.suppress(OSError):
                    line.send((name, value))

    def end(self) -> None:
        """End the worker, at once where it does not end by itself."""
        self._ending.set()
        if self.send("end", None) and self.process is not None:
            self.process.join(5)
        self._kill()
        self._thread.join(5)

    def _kill(self) -> None:
        self._ending.set()
        if self.process is not None and self.process.is_alive():
            self.process.kill()

    def _watch(self) -> None:
        """Start workers one after another, and wait until each dies; one that cannot load is the last."""
        wait = 0.0
        while not self._ending.wait(wait):
            began, last, why = time.monotonic(), "", ""
            try:
                self._line = line = self._start()
                while last != "ready":
                    report = line.recv()
                    last = report.kind
                    self._ready = self.num_started if last == "ready" else None
                    self._say(report)
                self._listen_until_gone(line)
            except EOFError:
                self.process.join(5)
                why = f"the worker ended with exit code {self.process.exitcode}"
            except TimeoutError as error:
                why = f"the worker hangs and is killed: {error}"
            except OSError as error:
                why = f"the worker cannot be started or heard: {error}"
            self._ready = None
            if last == "failed":
                return
            if self.process is not None and self.process.is_alive():
                self.process.kill()
            if self._ending.is_set() or self._loop.is_closed():
                return
            self._say(Report("died", error=why))
            wait = 0.0 if time.monotonic() - began > 10 else min(10.0, 2 * wait + 0.5)

    def _say(self, report: Report) -> None:
        """Hand a report to the loop, from a thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._listen, report)

    def _listen_until_gone(self, line: Connection) -> None:
        """Let the loop hear a worker until it is gone.

        Raises:
          EOFError: it is gone, the loop is closed, or the server ends.
          TimeoutError: it says nothing for too long.
        """
        number, lost = line.fileno(), threading.Event()

        def begin() -> None:
            self._loop.add_reader(number, self._hear, line, lost)
            os.set_blocking(number, True)  # uvloop makes it non-blocking, and Connection knows no such thing

        self._heard = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(begin)
        was_alive = True
        try:
            while not lost.wait(min(1.0, self._config.hang_s / 4)):
                is_alive = self.process.is_alive()
                if self._ending.is_set() or self._loop.is_closed() or not (is_alive or was_alive):
                    break  # of a dead worker the loop has had time to hear the last
                was_alive = is_alive
                is_late = time.monotonic() - self._heard > self._config.hang_s
                if is_late and not _is_there(line, 0):  # where something is there, it is the loop that is late
                    raise TimeoutError(f"no sign of life for {self._config.hang_s:g} s")
            raise EOFError
        finally:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.remove_reader, number)

    def _hear(self, line: Connection, lost: threading.Event) -> None:
        """Take what a worker says, in the loop; all of it: of a broken line the loop tells but once."""
        try:
            while not lost.is_set() and _is_there(line, 0):
                report = line.recv()
                self._heard = time.monotonic()
                self._listen(report)
        except (EOFError, OSError):
            self._loop.remove_reader(line.fileno())
            lost.set()

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        arguments = (self._config, there, os.getpid(), self._watermarks)
        self.process = context.Process(target=_run, args=arguments, daemon=True)
        self.process.start()
        there.close()
        self.num_started += 1
        return here


def _run(config: EngineConfig, line: Connection, parent: int, watermarks: Watermarks | None) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when it ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=worker_pool.end_with, args=(parent,), daemon=True).start()
    work(config, line, watermarks)
