"""The engine in a process of its own, and the server's end of the line to it (S file).

A worker that dies takes with it what it was computing and nothing else: its requests end with an error, another one is
started, and requests are refused until it is ready.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from jaxbench.serve.engine import Engine, Event, QueueFull
from jaxbench.serve.request import Request
from jaxbench.serve.settings import EngineConfig, load_engine

STATS_S = 0.5  # between two reports of an engine that has nothing to do


class Report(NamedTuple):
    """What a worker says."""

    kind: str  # loading | ready | events | failed
    events: tuple[Event, ...] = ()
    about: dict[str, Any] = {}  # loading: done, total; ready: of the model; events: the engine's stats
    error: str = ""


def work(config: EngineConfig, line: Connection) -> None:
    """Serve requests that come down the line until it ends."""
    try:
        engine = load_engine(config, progress=lambda done, total: line.send(
            Report("loading", about={"done": done, "total": total})
        ))  # fmt: skip
    except Exception as error:
        line.send(Report("failed", error=f"{type(error).__name__}: {error}"))
        return
    runner = engine.runner
    about = {
        "max_seq_len": runner.max_seq_len, "vocab_size": runner.vocab_size, "block_size": runner.block_size,
        "cache_tokens": (runner.num_blocks - 1) * runner.block_size, "cache_bytes": runner.cache_bytes,
    }  # fmt: skip
    line.send(Report("ready", about=about))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            _turn(engine, line)


def _turn(engine: Engine, line: Connection) -> None:
    """Take what has come, compute a step, and tell what happened."""
    events = []
    while line.poll(0 if engine.is_busy else STATS_S):
        name, value = line.recv()
        if name == "end":
            raise EOFError
        if name == "add":
            events += _added(engine, value)
        elif event := engine.cancel(value):
            events.append(event)
    if engine.is_busy:
        events += engine.step()
    line.send(Report("events", tuple(events), engine.stats()))


def _added(engine: Engine, request: Request) -> list[Event]:
    try:
        engine.add(request)
    except (ValueError, QueueFull) as error:
        return [Event(request.id, None, None, "error", str(error))]
    return []


class Supervisor:
    """Keeps a worker alive, and hands its reports on."""

    def __init__(self, config: EngineConfig, listen: Callable[[Report], Any]):
        """Start the first worker. listen: called with every report, from a thread; a worker's death is a report too."""
        self._config, self._listen = config, listen
        self._lock = threading.Lock()
        self._line: Connection | None = None
        self._is_ending = False
        self.num_started = 0
        self.process: Any = None
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def send(self, name: str, value: Any) -> bool:
        """Send an order, ("add", Request) or ("cancel", id); False where there is no worker to take it."""
        with self._lock:
            if self._line is None:
                return False
            try:
                self._line.send((name, value))
            except OSError:
                return False
            return True

    def end(self) -> None:
        """End the worker, at once where it does not end by itself."""
        self._is_ending = True
        self.send("end", None)
        if self.process is not None:
            self.process.join(5)
            if self.process.is_alive():
                self.process.kill()
        self._thread.join(5)

    def _watch(self) -> None:
        """Start workers one after another, and listen to each until it dies; one that cannot load is the last."""
        wait = 0.0
        while not self._is_ending:
            time.sleep(wait)
            line = self._start()
            began, last = time.monotonic(), ""
            try:
                while True:
                    report = line.recv()
                    last = report.kind
                    self._listen(report)
            except (EOFError, OSError):
                pass
            with self._lock:
                self._line = None
            if last == "failed" or self._is_ending:
                return
            self.process.join(5)
            self._listen(Report("died", error=f"the worker ended with exit code {self.process.exitcode}"))
            wait = 0.0 if time.monotonic() - began > 10 else min(10.0, 2 * wait + 0.5)

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self.process = context.Process(target=_run, args=(self._config, there, os.getpid()), daemon=True)
        self.process.start()
        there.close()
        self.num_started += 1
        with self._lock:
            self._line = here
        return here


def _run(config: EngineConfig, line: Connection, parent: int) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when it ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    work(config, line)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
