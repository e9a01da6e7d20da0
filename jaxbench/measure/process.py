"""The parent's side of a worker: start it, send one request, wait for one answer (S file).

Requests and answers are JSON lines over the worker's stdin and a private copy of its stdout; whatever libraries print
goes to the worker's log file. A worker that dies or hangs becomes a `WorkerError` that the caller turns into a record.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


class WorkerError(RuntimeError):
    """A worker failed: `str()` is one line that says what, `fatal` whether the process is gone."""

    def __init__(self, message: str, *, fatal: bool):
        super().__init__(message)
        self.fatal = fatal


class Worker:
    """One live worker process of one arm; `command` is what to run where that is not bench/worker.py."""

    def __init__(self, arm: str, *, environment: dict[str, str], log: Path, threads: int, command: Sequence[str] = ()):
        self.arm, self.log = arm, log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._buffer = b""
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                command or [sys.executable, "-m", "jaxbench.bench.worker", arm, str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                cwd=Path(__file__).resolve().parents[2],
                start_new_session=True,  # Ctrl-C reaches the parent only, which then closes its workers in order
            )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    @property
    def alive(self) -> bool:
        """Tell whether the process can still take requests."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def request(self, operation: str, *, timeout_s: float, **arguments) -> dict:
        """Send one request and return its answer; WorkerError when it fails, dies or takes longer than `timeout_s`."""
        line = json.dumps({"operation": operation, **arguments}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise WorkerError(f"{self.arm}: worker is gone ({self._last_words()})", fatal=True) from error
        answer = json.loads(self._line(operation, timeout_s))
        if "error" in answer:
            raise WorkerError(f"{self.arm}: {operation}: {answer['error']}", fatal=False)
        return answer

    def close(self) -> None:
        """End the process: ask, then terminate, then kill; never raises."""
        try:
            self._process.stdin.close()
            self._process.wait(timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            self._end()
        self._selector.close()
        self._process.stdout.close()

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(timeout=3)
                return
            except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                continue

    def _line(self, operation: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not self._selector.select(left):
                self._end()
                raise WorkerError(f"{self.arm}: {operation} took longer than {timeout_s:.0f} s", fatal=True)
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                self._process.wait()
                raise WorkerError(f"{self.arm}: worker died in {operation} ({self._last_words()})", fatal=True)
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        code = self._process.poll()
        status = f"exit code {code}" if code is None or code >= 0 else f"signal {-code}"
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return status + (f": {lines[-1].strip()[:200]}" if lines else "")
