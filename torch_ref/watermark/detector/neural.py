"""A small trained detector on per-token evidence and token ids, in PyTorch.

Twin: jaxbench/watermark/detector/neural.py, which has the data flow. Axis letters: P pooled numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jaxbench.watermark.detector.features import FEATURES, NeuralConfig
from torch_ref import nn
from torch_ref.dilated_convolution import DilatedConvolution, gelu


class Batch(NamedTuple):
    """The data of one step."""

    tokens: Int[Tensor, "B T"]  # -1 = padding
    evidence: Float[Tensor, "B T"]  # in (0, 1), larger = more marked; features.py says how
    scored: Bool[Tensor, "B T"]  # True where the evidence counts
    labels: Float[Tensor, " B"]  # 1 = marked, 0 = not


class NeuralDetector(torch.nn.Module):
    """Maps evidence and tokens to one logit per text."""

    def __init__(self, *, num_rows: int, d_model: int, dilations: Sequence[int], num_pooled: int, d_hidden: int,
                 norm_eps: float, dtype: str):  # fmt: skip
        super().__init__()
        self.embed = nn.Embed(num_rows, d_model, dtype=dtype)
        self.evidence = nn.Linear(FEATURES, d_model, use_bias=True, dtype=dtype)
        layers = [DilatedConvolution(d_model, dilation=d, norm_eps=norm_eps, dtype=dtype) for d in dilations]
        self.layers = torch.nn.ModuleList(layers)
        self.pool = nn.Linear(d_model, num_pooled, use_bias=True, dtype=dtype)
        self.hidden = nn.Linear(3 * num_pooled, d_hidden, use_bias=True, dtype=dtype)
        self.head = nn.Linear(d_hidden, 1, use_bias=True, dtype=dtype)
        self.num_rows, self.dtype = num_rows, dtype

    def forward(
        self, tokens: Int[Tensor, "B T"], evidence: Float[Tensor, "B T"], scored: Bool[Tensor, "B T"]
    ) -> Float[Tensor, " B"]:
        """A logit for each text."""
        rows = table_rows(tokens, self.num_rows)
        x = self.embed(rows) + self.evidence(token_features(evidence, scored, dtype=self.dtype))
        for layer in self.layers:
            x = layer(x, tokens >= 0)
        pooled = pool(self.pool(x), scored)
        return self.head(gelu(self.hidden(pooled)))[:, 0]


def table_rows(tokens: Int[Tensor, "B T"], num_rows: int) -> Int[Tensor, "B T"]:
    """Return each token's row of the token table; padding has row 0."""
    half, tokens = num_rows // 2, tokens.clamp(min=0)
    return torch.where(tokens < half, tokens, half + tokens % (num_rows - half))


def token_features(
    evidence: Float[Tensor, "B T"], scored: Bool[Tensor, "B T"], *, dtype: str
) -> Float[Tensor, "B T F"]:
    """Compute 2 e - 1, -log(1 - e) - 1 (both with mean 0 for uniform e, and 0 where not scored) and `scored`."""
    evidence = evidence.to(torch.promote_types(evidence.dtype, torch.float32))
    parts = (2.0 * evidence - 1.0, -torch.log1p(-evidence) - 1.0, torch.ones_like(evidence))
    zero = torch.zeros((), dtype=evidence.dtype, device=evidence.device)
    return torch.stack([torch.where(scored, part, zero) for part in parts], dim=-1).to(getattr(torch, dtype))


def pool(x: Float[Tensor, "B T P"], scored: Bool[Tensor, "B T"]) -> Float[Tensor, "B Q"]:
    """Compute sum / sqrt(n), mean and log-mean-exp over each text's n scored tokens, Q = 3 P; zeros if n = 0."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    zero = torch.zeros((), dtype=wide.dtype, device=wide.device)
    is_scored = scored[:, :, None]
    count = scored.sum(dim=1).clamp(min=1).to(wide.dtype)[:, None]
    total = torch.where(is_scored, wide, zero).sum(dim=1)
    # In a text without scored tokens, all values are 0, so that no infinity enters a gradient.
    is_open = is_scored | ~scored.any(dim=1)[:, None, None]
    highest = torch.where(is_open, torch.where(is_scored, wide, zero), zero - torch.inf)
    highest = torch.logsumexp(highest, dim=1) - torch.log(count)
    highest = torch.where(scored.any(dim=1)[:, None], highest, zero)
    return torch.cat([total / torch.sqrt(count), total / count, highest], dim=-1).to(x.dtype)


def predict(model: NeuralDetector, batch: Batch, *, dropout: Any = None) -> Float[Tensor, " B"]:
    """Logits of a batch; there is no dropout."""
    return model(batch.tokens, batch.evidence, batch.scored)


def loss_of(output: Float[Tensor, " B"], batch: Batch) -> Float[Tensor, ""]:
    """Mean binary cross-entropy of logits, nats per text, in at least float32."""
    wide = output.to(torch.promote_types(output.dtype, torch.float32))
    labels = batch.labels.to(wide.dtype)
    return (F.softplus(wide) - labels * wide).mean()


def loss_fn(model: NeuralDetector, batch: Batch, *, dropout: Any = None) -> Float[Tensor, ""]:
    """The model's loss on a batch, nats per text."""
    return loss_of(predict(model, batch, dropout=dropout), batch)


def build(
    config: NeuralConfig, params: Mapping[str, np.ndarray], *, dtype: str = "float32", device: str = "cpu"
) -> NeuralDetector:
    """Build a detector with `params`, cast to dtype.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; the message lists all names.
    """
    with torch.device("meta"):
        model = NeuralDetector(**dict(config), dtype=dtype)
    return nn.load_params(model, params, device=device)
