"""Workers of a queue: each runs one job at a time in its own process, and records how it ends (S file)."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxbench import worker_pool
from jaxbench.jobs import queue
from jaxbench.jobs.queue import COMMANDS, HERE, Entry, Queue
from jaxbench.measure import process

log = logging.getLogger("jaxbench.jobs")

POLL_S = 0.2  # between checks of a running command
BROKEN = -1  # exit code of a command that could not be started
GRACE_S = 10.0  # for a command to end by itself
PAUSE_S = 5.0  # before a command that broke is run again, twice as long each time, up to queue.MOST_PAUSE_S
HOUR_S = 3600.0
FINAL = {1: "a gate failed", 2: "its input is bad"}  # exit codes after which a retry would end alike,
# unless the log has one of these texts: an error that no command expects, a full disk, too little memory
PASSING = (
    "Traceback (most recent call last)", "error: cannot write", "error: out of memory", f"error: {worker_pool.KILLED}",
)  # fmt: skip
# or says that a model hub was not reached or is overloaded (pretrained/weights.py); that it lacks the model is final
UNREACHED = re.compile(
    r"fetching it as a hub id failed \((?:\w+: )?(?:Got: )?"
    r"(?:\w*(?:Connect|Connection|Read|Write|Proxy|Protocol)(?:Error|Timeout)|(?:\w+ error ')?(?:429|5\d\d)\b)"
)
TAIL_BYTES = 2**16  # of a command's log that are read back
# A process that ends with its worker, however that ends: by prctl(PR_SET_PDEATHSIG, SIGKILL), where available.
WITH_PARENT = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class Workers:
    """Workers of a queue, as threads of this process, until they are told to end or no job is left."""

    def __init__(
        self, held: Queue, *, count: int = 1, poll_s: float = 1.0, niceness: int = 0, keep_s: float | None = None,
        until_empty: bool = False,
    ):  # fmt: skip
        """Prepare them.

        Args:
          poll_s: between checks for a new job.
          niceness: of the jobs' processes, 0 to 19; 19 yields to everything else.
          keep_s: remove jobs that ended longer ago; None = none.
          until_empty: end when no job waits or runs, here or elsewhere.
        """
        self._queue, self._poll_s, self._niceness, self._keep_s = held, poll_s, niceness, keep_s
        self._until_empty, self._stop, self._cleaned = until_empty, threading.Event(), float("-inf")
        self._ended_threads = [threading.Event() for _ in range(count)]
        self._threads = [threading.Thread(target=self._thread, args=(i,), daemon=True) for i in range(count)]
        self.failed = 0  # jobs that failed here

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Take no new job; running ones are ended and wait again, and their attempt is not counted."""
        self._stop.set()

    def join(self) -> None:
        """Wait for the workers to end; if a signal handler's exception ends the wait, it may be repeated."""
        # Not by Thread.join: up to Python 3.12, one that such an exception ends takes the thread for ended, and the
        # next returns at once.
        for ended in self._ended_threads:
            while not ended.wait(0.2):  # with a timeout, so that signals are handled
                pass

    def _thread(self, number: int) -> None:
        try:
            self._work(number)
        finally:
            self._ended_threads[number].set()

    def _work(self, number: int) -> None:
        name = f"{socket.gethostname()} {os.getpid()}-{number}"
        while not self._stop.is_set():
            try:
                is_idle = self._turn(name)
                if is_idle and self._until_empty and not self._left():
                    return
            except Exception:  # a full disk, a folder that is gone: the next turn may succeed
                log.exception("worker", extra={"fields": {"worker": name}})
                is_idle = True
            if is_idle:
                self._stop.wait(self._poll_s)

    def _left(self) -> bool:
        return bool(self._queue.unfinished())

    def _turn(self, name: str) -> bool:
        """Run the next job; True where there is none."""
        if self._keep_s is not None and time.monotonic() > self._cleaned + min(HOUR_S, self._keep_s):
            self._cleaned = time.monotonic()
            for id in self._queue.remove_older(self._keep_s):
                log.info("job removed", extra={"fields": {"job": id}})
        with self._queue.claimed(name) as entry:
            if entry is None:
                return True
            if entry.progress.state in queue.ENDED:
                self.failed += 1
                log.error("job failed", extra={"fields": {"job": entry.job.id, "note": entry.progress.note}})
                return False
            self._run(entry)
        return False

    def _run(self, entry: Entry) -> None:
        about = {"job": entry.job.id, "title": entry.job.title, "attempt": entry.progress.attempts}
        log.info("job started", extra={"fields": about})
        started = time.monotonic()
        cwd, asked, code = str(entry.folder) if entry.job.is_in_its_folder else entry.job.cwd, "", BROKEN
        with open(entry.log, "ab") as output:
            begin = output.tell()
            try:
                child = subprocess.Popen(
                    command(entry), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    cwd=cwd, start_new_session=True,
                )  # fmt: skip
            except OSError as error:  # its folder is gone
                output.write(f"it cannot be started: {error}\n".encode(errors="replace"))
            else:
                if self._niceness:
                    with contextlib.suppress(AttributeError, OSError):
                        os.setpriority(os.PRIO_PROCESS, child.pid, self._niceness)
                asked = self._wait(child, entry.folder / "cancel")
                code = child.returncode
        about |= {"seconds": round(time.monotonic() - started, 3), "exit_code": code}
        self._ended(entry, code, asked, said(entry.log, begin), about)

    def _wait(self, child: subprocess.Popen[bytes], marker: Path) -> str:
        """Wait for a command's end; return "stop" or "cancel" if that was asked for, else ""."""
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(POLL_S)
                return ""
            asked = "cancel" if marker.exists() else "stop" if self._stop.is_set() else ""
            if asked:
                process.end(child, grace_s=GRACE_S)
                return asked

    def _ended(self, entry: Entry, code: int, asked: str, text: str, about: dict[str, Any]) -> None:
        attempts, last = entry.progress.attempts, process.last_line(text, "it said nothing")
        if code == 0:  # also if it was asked to end too late
            state, note = "done", ""
        elif asked == "cancel":
            state, note = "cancelled", "cancelled while it ran"
        elif asked == "stop":
            queue.postpone(entry, 0.0, attempts=attempts - 1)
            log.info("job interrupted", extra={"fields": about})
            return
        elif is_final(code, text) or attempts >= entry.job.most_attempts:
            state, note = "failed", f"{FINAL[code] if is_final(code, text) else 'it broke'}: {last}"
            self.failed += 1
        else:
            queue.postpone(entry, PAUSE_S * 2 ** (attempts - 1), attempts=attempts, note=last)
            log.warning("job broke", extra={"fields": about})
            return
        queue.end(entry, state, exit_code=code, note=note)
        log.log(logging.ERROR if state == "failed" else logging.INFO, f"job {state}", extra={"fields": about})


def command(entry: Entry) -> list[str]:
    """Return the command line of the process that runs a job."""
    folder = str(entry.folder) if entry.job.is_in_its_folder else HERE  # other commands may have its text as their own
    first, *rest = (word.replace(HERE, folder) for word in entry.job.words)
    return tied([str(COMMANDS / Path(first).name), *rest])


def tied(words: Sequence[str]) -> list[str]:
    """Return the command line of a Python script that Linux kills (SIGKILL) when the thread that starts it ends."""
    return [sys.executable, "-c", WITH_PARENT, str(os.getpid()), *words]


def is_final(code: int, text: str) -> bool:
    """Return whether the same command would end alike again; text: the end of its log."""
    return code in FINAL and not any(word in text for word in PASSING) and not UNREACHED.search(text)


def said(path: Path, begin: int = 0) -> str:
    """Return the end of what a command wrote to its log, from byte `begin` on."""
    with open(path, "rb") as file:
        file.seek(max(begin, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")
