"""Keeps JAX, used as a library, from loading libtpu where no TPU is; commands choose by process_environment.ensure."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import jax

from jaxbench import process_environment


def leave_out_if_absent() -> None:
    """Call it before a library function touches a device.

    libtpu is installed to compile for TPUs. Loaded without one it prints six lines of errors, and may wait for the
    cloud's metadata server for half a minute. The user's choice (JAX_PLATFORMS, jax_platforms) stays, and so does
    JAX's own where another accelerator's plugin is installed or JAX has started already.
    """
    if jax.config.jax_platforms or importlib.util.find_spec("libtpu") is None or process_environment.is_tpu_attached():
        return
    if not importlib.metadata.entry_points(group="jax_plugins"):
        jax.config.update("jax_platforms", "cpu")
