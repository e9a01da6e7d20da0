"""Which devices JAX sees. Import after `launch.ensure`, which fixes the platforms that JAX looks for.

Twin: torch_ref/devices.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

import jax

from jaxbench import launch


def check_device(device: str) -> None:
    """Raise ValueError when no such device is attached."""
    if device not in launch.PLATFORMS:
        raise ValueError(f"--device={device} is unknown, wanted one of {', '.join(launch.PLATFORMS)}")
    try:
        with _only_on_success() if device != "cpu" else contextlib.nullcontext():
            jax.devices(device)
    except RuntimeError as error:
        seen = ", ".join(platforms()) or "nothing"
        raise ValueError(
            f"--device={device}: JAX sees no {device} on this machine (it sees {seen}); use --device=cpu, or install "
            f"its packages where one is attached: pip install -c constraints.txt '.[{device}]'"
        ) from error


@contextlib.contextmanager
def _only_on_success() -> Iterator[None]:
    """Hold back what is written to standard error, by C++ too, and drop it when the block raises.

    libtpu says in a dozen lines that there is no TPU; the error says it in one.
    """
    sys.stderr.flush()
    screen = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except RuntimeError:
            held.truncate(0)
            raise
        finally:
            sys.stderr.flush()
            os.dup2(screen, 2)
            os.close(screen)
            held.seek(0)
            os.write(2, held.read())


def platforms() -> list[str]:
    """Return the kinds of devices that JAX sees, sorted; empty where it cannot start at all."""
    try:
        return sorted({found.platform for found in jax.devices()})
    except RuntimeError:
        return []
