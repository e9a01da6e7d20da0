"""Which devices JAX sees. A command imports it after `process_environment.ensure`, which fixes the
platforms that JAX looks for.

Twin: torch_ref/devices.py.
"""

from __future__ import annotations

import jax

from jaxbench import process_environment


def check_device(device: str) -> None:
    """Check that JAX sees a device.

    Raises:
      ValueError: the device is unknown, not attached, or JAX sees none.
    """
    process_environment.check_attached(device)  # or libtpu would print a dozen lines about the missing TPU
    try:
        jax.devices(device)
    except RuntimeError as error:
        seen = ", ".join(platforms()) or "nothing"
        raise ValueError(
            f"--device={device}: JAX sees no {device} on this machine (it sees {seen}); use --device=cpu, or install "
            f"its packages where one is attached: pip install -c constraints.txt '.[{device}]'"
        ) from error


def platforms() -> list[str]:
    """Kinds of devices that JAX sees, sorted; empty if it cannot start at all."""
    try:
        return sorted({device.platform for device in jax.devices()})
    except RuntimeError:
        return []
