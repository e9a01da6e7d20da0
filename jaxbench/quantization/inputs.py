"""Run a decoder layer by layer and collect statistics of each matrix's inputs: calibration in Flax.

Twin: torch_ref/quantization/inputs.py. Rows have no padding; float32 throughout.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxbench import functional, nn, parameters, rotary
from jaxbench.attention import Context, Spans
from jaxbench.config import Compute, TransformerConfig
from jaxbench.quantization.statistics import BINS, LOWEST, PER_OCTAVE, SOURCES, InputStatistics
from jaxbench.training.intercept import intercepted, nnx_modules
from jaxbench.transformer import Block


class LayerByLayer:
    """The layers of a decoder, called one at a time."""

    def __init__(self, config: TransformerConfig):
        self.config = config
        blocks = [nnx.eval_shape(lambda i=i: Block(config.at_layer(i), Compute())) for i in range(config.num_layers)]
        self.graphs = [parameters.split(block)[0] for block in blocks]

    def layer(
        self, index: int, params: Mapping[str, np.ndarray], hidden: Float[np.ndarray, "B T D"], *, histogram: bool
    ) -> tuple[Float[np.ndarray, "B T D"], dict[str, InputStatistics]]:
        """Residual stream after a layer, and statistics of its matrices' inputs, named as in SOURCES.

        Args:
          params: of the layer, by name within it.
          histogram: also collect the one of |x|, which takes longer than all the rest; otherwise it stays 0.
        """
        leaves = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
        out, found = _layer(self.graphs[index], leaves, self._context(index, hidden), jnp.asarray(hidden), histogram)
        count = hidden.shape[0] * hidden.shape[1]
        return np.asarray(out), {
            name: InputStatistics(count, *(np.asarray(part) for part in parts)) for name, parts in found.items()
        }

    def _context(self, index: int, hidden: np.ndarray) -> Context:
        config = self.config
        positions = jnp.broadcast_to(jnp.arange(hidden.shape[1]), hidden.shape[:2])

        def angles(theta: float, scaling) -> tuple[Array, Array]:
            frequencies = rotary.frequencies(config.head_dim, theta, scaling)
            return functional.rotary_angles(positions, frequencies, dtype="float32")

        is_rotary, local = config.position == "rotary", config.local_rope_theta
        return Context(
            Spans(positions, positions), angles(config.rope_theta, config.rope_scaling) if is_rotary else None, None,
            None, None if local is None else angles(local, None),
        )  # fmt: skip


def _statistics(x: Float[Array, "*rows I"], histogram: bool) -> tuple[Array, ...]:
    """The fields of InputStatistics except the count."""
    x = x.reshape(-1, x.shape[-1])
    size = jnp.abs(x)
    counts = jnp.zeros((BINS,), jnp.int32)
    if histogram:
        place = jnp.floor((jnp.log2(size) - LOWEST) * PER_OCTAVE)  # -inf of zeros is clipped into the first bin
        counts = jnp.bincount(jnp.clip(place, 0, BINS - 1).astype(jnp.int32).reshape(-1), length=BINS)
    return x.T @ x, size.sum(axis=0), size.max(axis=0), counts


@jax.jit(static_argnames=("histogram",))
def _layer(graph, params: dict[str, Array], context: Context, hidden: Array, histogram: bool):
    block, seen = parameters.merge(graph, params), {}

    def handler(name: str, call, args: tuple, kwargs: dict):
        if name in SOURCES.values():
            seen[name] = _statistics(args[0], histogram)
        return call(*args, **kwargs)

    linears = [(name, module) for name, module in nnx_modules(block, root="block") if isinstance(module, nn.Linear)]
    with intercepted(linears, handler):
        out, _ = block(hidden, context, (0, 0))
    return out, seen
