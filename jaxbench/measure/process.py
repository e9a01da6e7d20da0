"""The parent's side of a worker process: start it, send one request, wait for one answer (S file).

Requests and answers are JSON lines over the worker's stdin and a private copy of its stdout; whatever libraries print
goes to the worker's log file. A worker that dies or hangs raises a `WorkerError`, which the caller turns into a record.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxbench import process_environment

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venvs"  # made by `make peers`
END_S = 3.0  # seconds that a worker has to end after SIGTERM, and again after SIGKILL


class WorkerError(RuntimeError):
    """A worker failed: `str()` is one line that says what, `fatal` whether the process is gone."""

    def __init__(self, message: str, *, fatal: bool):
        super().__init__(message)
        self.fatal = fatal


class Worker:
    """One live worker process; as a context manager it closes the process on exit.

    Args:
      name: what it measures; used in messages and passed as the module's first argument.
      module: dotted name of the module that calls worker.serve, or a script that does.
      environment: its environment variables, as `environment` returns them.
      log: file that its stderr is appended to.
      threads: the module's second argument.
      timeout_s: seconds that a request may take unless the request sets its own limit.
      python: the interpreter; a peer's own where the peer needs a separate environment.
      root: working folder of the process, where -m finds its module.
    """

    def __init__(
        self,
        name: str,
        module: str | Path,
        *,
        environment: Mapping[str, str],
        log: Path,
        threads: int = 1,
        timeout_s: float,
        python: str | Path = sys.executable,
        root: Path = ROOT,
    ):
        self.name, self.log, self.timeout_s = name, log, timeout_s
        log.parent.mkdir(parents=True, exist_ok=True)
        self._buffer = b""
        called = [str(module)] if isinstance(module, Path) else ["-m", module]
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                [str(python), *called, name, str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                cwd=root,
                start_new_session=True,  # Ctrl-C reaches the parent only, which then closes its workers in order
            )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    @property
    def alive(self) -> bool:
        """True while the process can take requests."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(self, operation: str, *, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Send one request and return its answer.

        Raises:
          WorkerError: the worker fails, dies or takes longer than `timeout_s`.
        """
        line = json.dumps({"operation": operation, **arguments}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise WorkerError(f"{self.name}: worker is gone ({self._last_words()})", fatal=True) from error
        answer = json.loads(self._line(operation, self.timeout_s if timeout_s is None else timeout_s))
        if "error" in answer:
            raise WorkerError(f"{self.name}: {operation}: {answer['error']}", fatal=False)
        return answer

    def close(self) -> None:
        """End the process: ask, then terminate, then kill; never raises."""
        try:
            self._process.stdin.close()
            self._process.wait(timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            end(self._process, grace_s=END_S, killed_s=END_S)
        self._selector.close()
        self._process.stdout.close()

    def _line(self, operation: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not self._selector.select(left):
                end(self._process, grace_s=END_S, killed_s=END_S)
                raise WorkerError(f"{self.name}: {operation} took longer than {timeout_s:.0f} s", fatal=True)
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                self._process.wait()
                raise WorkerError(f"{self.name}: worker died in {operation} ({self._last_words()})", fatal=True)
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        code = self._process.poll()
        status = f"exit code {code}" if code is None or code >= 0 else f"signal {-code}"
        last = last_line(self.log.read_text(errors="replace"), "")
        return status + (f": {last}" if last else "")


def end(process: subprocess.Popen, *, grace_s: float, killed_s: float | None = None) -> None:
    """End a session leader and its process group: SIGTERM first, then SIGKILL if it does not end.

    Args:
      grace_s: seconds that it has to end by itself.
      killed_s: most seconds to wait for its end after SIGKILL; None = until it has ended.
    """
    for number, seconds in ((signal.SIGTERM, grace_s), (signal.SIGKILL, killed_s)):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: PermissionError once the group ended
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def last_line(text: str | None, otherwise: str = "no message") -> str:
    """Return the last non-blank line of a command's output, cut to 300 characters; `otherwise` if there is none."""
    lines = [line for line in (text or "").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else otherwise


def environment(device: str, *, threads: int, library: str = "XLA") -> dict[str, str]:
    """Return a worker's environment variables: jaxbench's own for device and array library, and the thread count."""
    dropped = ["PYTHONWARNINGS"]
    if library == "PyTorch":
        dropped.append(process_environment.ARENAS)
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return inherited | process_environment.environment(device, library=library) | {"OMP_NUM_THREADS": str(threads)}


def peer_python(peer: str) -> Path:
    """Return the interpreter of a peer's own environment.

    Raises:
      ValueError: it is not installed.
    """
    path = PEERS / peer / "bin" / "python"
    if not path.exists():
        raise ValueError(f"{os.path.relpath(path, ROOT)} is not there: run `make peers`")
    return path


def turn(names: Sequence[str], shift: int) -> list[str]:
    """Return the order of the names in launch number `shift`, a row of a Williams square.

    Over as many launches as names, each name comes first equally often. With an even number of names, each also
    directly follows every other once; with an odd number, that holds where half of the rounds run in reverse.

    Source: Williams 1949, Australian Journal of Scientific Research A 2(2):149-168.
    """
    count = len(names)
    zigzag = [(index + 1) // 2 if index % 2 else (count - index // 2) % count for index in range(count)]
    return [names[(place + shift) % count] for place in zigzag]
