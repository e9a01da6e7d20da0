"""Which devices PyTorch sees. Twin: jaxbench/devices.py."""

from __future__ import annotations

import torch

from jaxbench import process_environment


def check_device(device: str) -> None:
    """Check that PyTorch sees a device.

    Raises:
      ValueError: the device is unknown, or PyTorch sees none.
    """
    if device not in process_environment.PLATFORMS:
        raise ValueError(f"--device={device} is unknown, wanted one of {', '.join(process_environment.PLATFORMS)}")
    if device not in platforms():
        seen = ", ".join(platforms())
        raise ValueError(
            f"--device={device}: PyTorch sees no {device} on this machine (it sees {seen}); use --device=cpu, or "
            "install a build of PyTorch for the device where one is attached"
        )


def platforms() -> list[str]:
    """Kinds of devices that PyTorch sees, sorted."""
    return ["cpu", "gpu"] if torch.cuda.is_available() else ["cpu"]
