"""The Equinox side of the parity engine: one case run with jaxbench/eqx, captured without changing the models."""

from __future__ import annotations

from jaxbench.parity import flax_side
from jaxbench.training.intercept import equinox_modules


class Side(flax_side.Side):
    """One case's model in one dtype. Float64 needs `jax.enable_x64(True)` around every call."""

    name = "equinox"
    package = "jaxbench.eqx"
    modules_of = staticmethod(equinox_modules)
