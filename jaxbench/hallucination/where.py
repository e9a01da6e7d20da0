"""Where a reader runs: kind and number of devices, blocks in host memory; and the flags for it (S file).

Nothing here affects features, so it is not part of their cache key.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

from absl import flags

from jaxbench import cli, process_environment

VALUES = flags.FLAGS


class Where(NamedTuple):
    """Where a reader runs."""

    device: str = "cpu"  # or gpu, tpu
    devices: int | None = None  # of this process, each with all weights and its own responses; None = all
    offload_layers: int = 0  # last blocks whose weights stay in host memory and go to the device for their calls


def define() -> None:
    """Define the flags of a command that reads."""
    cli.define_device()
    flags.DEFINE_integer("devices", None, "that read, in one process (unset: every GPU or TPU; one CPU)", lower_bound=1)
    about = "last blocks whose weights stay in the host's memory, for a model that a device cannot hold"
    flags.DEFINE_integer("offload_layers", 0, about, lower_bound=0)


def chosen() -> tuple[Where, int]:
    """Return the flags' choice, and the number of processes: one with several devices or an accelerator.

    Raises:
      ValueError: several processes, or Ray, were asked for with these.
    """
    is_shared = VALUES.device != "cpu" or (VALUES.devices or 1) > 1
    for name, plain in (("processes", 1), ("engine", "local")):
        if is_shared and name in VALUES and VALUES[name].present and VALUES[name].value != plain:
            asked = f"--device={VALUES.device}" if VALUES.device != "cpu" else f"--devices={VALUES.devices}"
            raise ValueError(f"--{name}={VALUES[name].value}: {asked} is for one process, which uses all of them")
    devices = VALUES.devices or (1 if VALUES.device == "cpu" else None)
    return Where(VALUES.device, devices, VALUES.offload_layers), 1 if is_shared else VALUES.processes


def start(package: str = "jaxbench") -> None:
    """Restart this process, once, as --device needs it; package: whose modules run, JAX's or PyTorch's.

    Raises:
      ValueError: the library sees no such device.
    """
    library = "PyTorch" if package == "torch_ref" else "XLA"
    process_environment.ensure(VALUES.device, library=library)
    importlib.import_module(f"{package}.devices").check_device(VALUES.device)
