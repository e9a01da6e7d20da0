"""MorphMark in JAX: moves to green tokens a share of red probability that rises with theirs. Twin: torch_ref."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxbench.watermark.device import kgw
from jaxbench.watermark.device.contract import Position, State
from jaxbench.watermark.schemes.contract import Scheme


class Mark(kgw.Mark):
    """MorphMark on a device."""

    def apply(self, state: State, logits: Float[Array, "B V"], at: Position) -> tuple[State, Float[Array, "B V"]]:
        """Return state and logits of the marked distribution; logsumexp and the rows not marked stay the same."""
        is_green = self.green_tokens(state, at)
        green = jnp.sum(jnp.where(is_green, jax.nn.softmax(logits, axis=-1), 0), axis=-1, keepdims=True)
        green = jnp.minimum(green, 1)
        r = strength(green, self.scheme)
        raised, lowered = jnp.log1p(r * (1 - green) / jnp.where(green > 0, green, 1)), jnp.log1p(-r)
        return state, jnp.where(r > 0, logits + jnp.where(is_green, raised, lowered), logits)


def strength(green_probability: Float[Array, "B 1"], scheme: Scheme) -> Float[Array, "B 1"]:
    """Return r, the share of the red tokens' probability that moves to the green ones (schemes/morphmark.py)."""
    scaled = scheme.k * green_probability
    r = {"linear": lambda x: x, "exp": jnp.expm1, "log": jnp.log1p}[scheme.form](scaled)
    return jnp.where(green_probability < scheme.p_0, 0, jnp.minimum(r, 1))
