"""A residual layer over a token's neighbourhood: norm, convolution with three taps, GELU, in PyTorch.

Twin: jaxbench/dilated_convolution.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from torch_ref import functional, nn


class DilatedConvolution(torch.nn.Module):
    """Norm, convolution over a token and its neighbours `dilation` places before and after it, GELU."""

    def __init__(
        self, d_model: int, *, dilation: int, norm_eps: float, dtype: str, dropout: float = 0.0, site: int = 0
    ):
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps=norm_eps, dtype=dtype)
        self.conv = nn.Linear(3 * d_model, d_model, use_bias=True, dtype=dtype)
        self.dilation, self.dropout, self.site = dilation, dropout, site

    def forward(
        self, x: Float[Tensor, "B T D"], is_token: Bool[Tensor, "B T"], stream: functional.DropoutStream | None = None
    ) -> Float[Tensor, "B T D"]:
        """Residual stream; padding counts as zeros. stream: of dropout, None = none."""
        hidden = torch.where(is_token[:, :, None], self.norm(x), torch.zeros((), dtype=x.dtype, device=x.device))
        taps = (shifted(hidden, self.dilation), hidden, shifted(hidden, -self.dilation))
        added = gelu(self.conv(torch.cat(taps, dim=-1)))
        return x + functional.dropout(added, self.dropout, stream, site=self.site)


def shifted(x: Float[Tensor, "B T D"], places: int) -> Float[Tensor, "B T D"]:
    """Shift x to later positions (to earlier ones if negative), filling with zeros."""
    places = max(-x.shape[1], min(places, x.shape[1]))
    return F.pad(x, (0, 0, places, -places))


def gelu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """GELU in its tanh form, rounded once."""
    return F.gelu(x.to(torch.promote_types(x.dtype, torch.float32)), approximate="tanh").to(x.dtype)
