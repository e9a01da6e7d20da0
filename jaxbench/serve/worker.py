"""The engine in its own process, and the server's end of the connection to it (S file).

When a worker dies, only what it was computing is lost: its requests end with an error, another worker is started, and
requests are refused until it is ready.
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

STATS_S = 0.5  # between reports of an idle engine
BUSY_STATS_S = 0.1  # between reports of a busy engine's stats


class Report(NamedTuple):
    """A message from a worker, or about its death."""

    kind: str  # loading | ready | events | failed; from the supervisor: died
    events: tuple[Event, ...] = ()
    about: dict[str, Any] = {}  # loading: done, total; ready: of the model; events: the engine's stats, or nothing
    error: str = ""


def work(config: EngineConfig, line: Connection, watermarks: Watermarks | None = None) -> None:
    """Serve requests that arrive on the connection until it ends."""
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
    """Take waiting orders, compute a step, and report its events; return when the engine's stats were last sent.

    told: the same time from the previous turn. Stats go out less often than tokens, which should not wait for them.
    """
    was_busy, events = engine.is_busy, []
    _take(engine, line, events, 0 if was_busy else STATS_S)
    until = time.monotonic() + engine.limits.max_wait_ms / 1e3
    while not was_busy and engine.is_busy and (left := until - time.monotonic()) > 0:
        if engine.scheduler.num_waiting_tokens >= engine.limits.max_batch_tokens:
            break
        if _is_there(line, min(left, BUSY_STATS_S)):
            _take(engine, line, events, 0)
        elif left > BUSY_STATS_S:  # a sign of life: it waits, and does not hang
            line.send(Report("events", about=engine.stats()))
    if engine.is_busy:
        events += engine.step()
    now = time.monotonic()
    is_due = now - told >= BUSY_STATS_S or not engine.is_busy
    if events or is_due:
        line.send(Report("events", tuple(events), engine.stats() if is_due else {}))
    return now if is_due else told


def _take(engine: Engine, line: Connection, events: list[Event], seconds: float) -> None:
    """Take all waiting orders; where there is none, wait up to `seconds` for the first."""
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
    """True where there is something to receive within `seconds`.

    Called in every step: Connection.poll would build a selector of Python objects each time.
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
    """Keeps a worker alive, and passes its reports on; a worker that is silent for too long is killed.

    The reports of a ready worker are read in the event loop itself: a token wakes one thread on its way to the client.
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
        """Send orders to the worker that they are for, in a thread: a busy worker reads only between its steps."""
        while True:
            number, name, value = self._orders.get()
            line = self._line
            if line is not None and number == self.num_started:
                with contextlib.suppress(OSError):
                    line.send((name, value))

    def end(self) -> None:
        """End the worker; kill it if it is not ready, or does not end by itself within 5 s."""
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
        """Start workers one after another, and wait until each dies; stop after one that cannot load the model."""
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
        """Pass a report to the loop, from a thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._listen, report)

    def _listen_until_gone(self, line: Connection) -> None:
        """Let the loop read a worker's reports until the worker is gone.

        Raises:
          EOFError: it is gone, the loop is closed, or the server ends.
          TimeoutError: it is silent for too long.
        """
        number, lost = line.fileno(), threading.Event()

        def begin() -> None:
            self._loop.add_reader(number, self._hear, line, lost)
            os.set_blocking(number, True)  # uvloop makes it non-blocking, which Connection does not support

        self._heard = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(begin)
        was_alive = True
        try:
            while not lost.wait(min(1.0, self._config.hang_s / 4)):
                is_alive = self.process.is_alive()
                if self._ending.is_set() or self._loop.is_closed() or not (is_alive or was_alive):
                    break  # the loop has had time to read a dead worker's last reports
                was_alive = is_alive
                is_late = time.monotonic() - self._heard > self._config.hang_s
                if is_late and not _is_there(line, 0):  # if there is something to read, the loop is late
                    raise TimeoutError(f"no sign of life for {self._config.hang_s:g} s")
            raise EOFError
        finally:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.remove_reader, number)

    def _hear(self, line: Connection, lost: threading.Event) -> None:
        """Read all waiting reports of a worker, in the loop: it signals a broken connection only once."""
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
