"""MorphMark in PyTorch: moves to green tokens a share of red probability that rises with theirs. Twin: jaxbench."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from jaxbench.watermark.device.contract import Position, State
from jaxbench.watermark.schemes.contract import Scheme
from torch_ref.watermark.device import kgw


class Mark(kgw.Mark):
    """MorphMark on a device."""

    def apply(self, state: State, logits: Float[Tensor, "B V"], at: Position) -> tuple[State, Float[Tensor, "B V"]]:
        """Return state and logits of the marked distribution; logsumexp and the rows not marked stay the same."""
        is_green = self.green_tokens(state, at)
        green = torch.where(is_green, torch.softmax(logits, dim=-1), 0).sum(dim=-1, keepdim=True)
        green = torch.clamp(green, max=1)
        r = strength(green, self.scheme)
        raised, lowered = torch.log1p(r * (1 - green) / torch.where(green > 0, green, 1)), torch.log1p(-r)
        return state, torch.where(r > 0, logits + torch.where(is_green, raised, lowered), logits)


def strength(green_probability: Float[Tensor, "B 1"], scheme: Scheme) -> Float[Tensor, "B 1"]:
    """Return r, the share of the red tokens' probability that moves to the green ones (schemes/morphmark.py)."""
    scaled = scheme.k * green_probability
    r = {"linear": lambda x: x, "exp": torch.expm1, "log": torch.log1p}[scheme.form](scaled)
    return torch.where(green_probability < scheme.p_0, 0, torch.clamp(r, max=1))
