"""Keep JAX, used as a library, from loading libtpu without a TPU; commands use process_environment.ensure instead."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import jax

from jaxbench import process_environment


def leave_out_if_absent() -> None:
    """Restrict JAX to CPUs if libtpu is there without a TPU; call it before a library function touches a device.

    libtpu may be installed to compile for TPUs. Loaded without a TPU it prints six lines of errors, and may wait half a
    minute for the cloud's metadata server. The user's choice (JAX_PLATFORMS, jax_platforms) is kept, and so is JAX's
    own if another accelerator's plugin is installed or JAX has started already.
    """
    if jax.config.jax_platforms or importlib.util.find_spec("libtpu") is None or process_environment.is_tpu_attached():
        return
    if not importlib.metadata.entry_points(group="jax_plugins"):
        jax.config.update("jax_platforms", "cpu")
