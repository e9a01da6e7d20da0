"""The Equinox side of the parity engine: logits, gradients, training and decoding; its modules stay closed."""

from __future__ import annotations

from jaxbench.parity import flax_side


class Side(flax_side.Side):
    """One case's model in one dtype. Float64 needs `jax.enable_x64(True)` around every call."""

    name = "equinox"
    package = "jaxbench.eqx"
    is_captured = False
