"""Run a decoder layer by layer and collect statistics of each matrix's inputs: calibration in PyTorch.

Twin: jaxbench/quantization/inputs.py. Rows have no padding; float32 throughout.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from jaxbench import rotary
from jaxbench.config import Compute, TransformerConfig
from jaxbench.quantization.statistics import BINS, LOWEST, PER_OCTAVE, SOURCES, InputStatistics
from torch_ref import functional, nn
from torch_ref.attention import Context, Spans
from torch_ref.transformer import Block


class LayerByLayer:
    """The layers of a decoder, called one at a time."""

    def __init__(self, config: TransformerConfig):
        self.config = config

    @torch.no_grad()
    def layer(
        self, index: int, params: Mapping[str, np.ndarray], hidden: Float[np.ndarray, "B T D"], *, histogram: bool
    ) -> tuple[Float[np.ndarray, "B T D"], dict[str, InputStatistics]]:
        """Residual stream after a layer, and statistics of its matrices' inputs, named as in SOURCES.

        Args:
          params: of the layer, by name within it.
          histogram: also collect the one of |x|, which takes longer than all the rest; otherwise it stays 0.
        """
        with torch.device("meta"):
            block = Block(self.config.at_layer(index), Compute())
        block, seen = nn.load_params(block, params), {}

        def hook(name: str, module: torch.nn.Module, args: tuple) -> None:
            seen[name] = InputStatistics(
                args[0].shape[0] * args[0].shape[1], *(part.numpy() for part in _statistics(args[0], histogram))
            )

        for name in set(SOURCES.values()):
            block.get_submodule(name).register_forward_pre_hook(functools.partial(hook, name))
        out, _ = block(torch.tensor(hidden), self._context(hidden), (0, 0))
        return out.numpy(), seen

    def _context(self, hidden: np.ndarray) -> Context:
        config = self.config
        positions = torch.arange(hidden.shape[1])[None].expand(*hidden.shape[:2])

        def angles(theta: float, scaling) -> tuple[Tensor, Tensor]:
            frequencies = rotary.frequencies(config.head_dim, theta, scaling)
            return functional.rotary_angles(positions, frequencies, dtype="float32")

        is_rotary, local = config.position == "rotary", config.local_rope_theta
        return Context(
            Spans(positions, positions), angles(config.rope_theta, config.rope_scaling) if is_rotary else None, None,
            None, None if local is None else angles(local, None),
        )  # fmt: skip


def _statistics(x: Float[Tensor, "*rows I"], histogram: bool) -> tuple[Tensor, ...]:
    """The fields of InputStatistics except the count."""
    x = x.reshape(-1, x.shape[-1])
    size = x.abs()
    counts = torch.zeros(BINS, dtype=torch.int32)
    if histogram:
        place = torch.floor((torch.log2(size) - LOWEST) * PER_OCTAVE)  # -inf of zeros is clipped into the first bin
        counts = torch.bincount(place.clamp(0, BINS - 1).to(torch.int64).reshape(-1), minlength=BINS).to(torch.int32)
    return x.T @ x, size.sum(dim=0), size.amax(dim=0), counts
