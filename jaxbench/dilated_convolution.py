"""A residual layer over a token's neighbourhood: norm, convolution with three taps, GELU, in Flax NNX.

Twin: torch_ref/dilated_convolution.py. For small models of tokens and texts: the watermark lab's neural detector, the
hallucination lab's token classifier.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float

from jaxbench import functional, nn


class DilatedConvolution(nnx.Module):
    """Norm, convolution over a token and its neighbours `dilation` places before and after it, GELU."""

    def __init__(
        self, d_model: int, *, dilation: int, norm_eps: float, dtype: str, dropout: float = 0.0, site: int = 0
    ):
        self.norm = nn.RMSNorm(d_model, eps=norm_eps, dtype=dtype)
        self.conv = nn.Linear(3 * d_model, d_model, use_bias=True, dtype=dtype)
        self.dilation, self.dropout, self.site = dilation, dropout, site

    def __call__(
        self, x: Float[Array, "B T D"], is_token: Bool[Array, "B T"], stream: functional.DropoutStream | None = None
    ) -> Float[Array, "B T D"]:
        """Residual stream; padding counts as zeros. stream: of dropout, None = none."""
        hidden = jnp.where(is_token[:, :, None], self.norm(x), jnp.zeros((), x.dtype))
        taps = (shifted(hidden, self.dilation), hidden, shifted(hidden, -self.dilation))
        added = gelu(self.conv(jnp.concatenate(taps, axis=-1)))
        return x + functional.dropout(added, self.dropout, stream, site=self.site)


def shifted(x: Float[Array, "B T D"], places: int) -> Float[Array, "B T D"]:
    """Shift x to later positions (to earlier ones if negative), filling with zeros."""
    places = max(-x.shape[1], min(places, x.shape[1]))
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (places, -places, 0), (0, 0, 0)))


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU in its tanh form, rounded once."""
    return jax.nn.gelu(x.astype(jnp.promote_types(x.dtype, jnp.float32)), approximate=True).astype(x.dtype)
