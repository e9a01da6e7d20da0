"""Which devices JAX sees. A command imports it after `launch.ensure`, which fixes the platforms that JAX looks for."""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
from pathlib import Path

import jax

from jaxbench import launch

GOOGLE, NETWORK_AND_DISK = "0x1ae0", ("0x0042", "0x001f")  # on the PCI bus: a vendor, and its devices that are no TPU


def leave_out_absent_tpu() -> None:
    """Keep JAX from loading libtpu where no TPU is attached; call it before a library function touches a device.

    libtpu is installed to compile for TPUs. Loaded without one it prints six lines of errors, and may wait for the
    cloud's metadata server for half a minute. The user's choice (JAX_PLATFORMS, jax_platforms) stays, and so does
    JAX's own where another accelerator's plugin is installed or JAX has started already.
    """
    if jax.config.jax_platforms or importlib.util.find_spec("libtpu") is None or has_tpu():
        return
    if not importlib.metadata.entry_points(group="jax_plugins"):
        jax.config.update("jax_platforms", "cpu")


def has_tpu() -> bool:
    """Return True where a TPU may be on the PCI bus, without touching it."""
    google = (Path(file).parent for file in glob.glob("/sys/bus/pci/devices/*/vendor") if _word(Path(file)) == GOOGLE)
    return any(_word(folder / "device") not in NETWORK_AND_DISK for folder in google)


def _word(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


def check_device(device: str) -> None:
    """Raise ValueError when no such device is attached."""
    if device not in launch.PLATFORMS:
        raise ValueError(f"--device={device} is unknown, wanted one of {', '.join(launch.PLATFORMS)}")
    try:
        jax.devices(device)
    except RuntimeError as error:
        seen = ", ".join(platforms()) or "nothing"
        raise ValueError(
            f"--device={device}: JAX sees no {device} on this machine (it sees {seen}); use --device=cpu, or install "
            f"its packages where one is attached: pip install -c constraints.txt '.[{device}]'"
        ) from error


def platforms() -> list[str]:
    """Return the kinds of devices that JAX sees, sorted; empty where it cannot start at all."""
    try:
        return sorted({found.platform for found in jax.devices()})
    except RuntimeError:
        return []
