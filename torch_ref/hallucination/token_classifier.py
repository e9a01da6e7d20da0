"""Classify which tokens of a response are hallucinated: a small model on a reader's features of them, in PyTorch.

Twin: jaxbench/hallucination/token_classifier.py, which has the data flow. Axis letters: C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from jaxbench.hallucination.token_inputs import (
    LIMIT,
    RESPONSE_WEIGHT,
    Arrays,
    Scale,
    TokenConfig,
    Trained,
    dropout_sites,
)
from torch_ref import functional, nn
from torch_ref.dilated_convolution import DilatedConvolution, gelu


class Batch(NamedTuple):
    """One step's data."""

    columns: Float[Tensor, "B T C"]  # standardised
    is_token: Bool[Tensor, "B T"]
    labels: Float[Tensor, "B T"]  # 1 = hallucinated


class TokenClassifier(torch.nn.Module):
    """A classifier from columns of tokens to one logit per token."""

    def __init__(self, *, num_columns: int, d_model: int, dilations: Sequence[int], dropout: float, norm_eps: float,
                 dtype: str):  # fmt: skip
        super().__init__()
        self.embed = nn.Linear(num_columns, d_model, use_bias=True, dtype=dtype)
        self.site, *sites = dropout_sites(len(dilations))
        common = {"norm_eps": norm_eps, "dtype": dtype, "dropout": dropout}
        layers = [DilatedConvolution(d_model, dilation=d, site=s, **common) for d, s in zip(dilations, sites)]
        self.layers = torch.nn.ModuleList(layers)
        self.norm = nn.RMSNorm(d_model, eps=norm_eps, dtype=dtype)
        self.head = nn.Linear(d_model, 1, use_bias=True, dtype=dtype)
        self.dropout, self.dtype = dropout, getattr(torch, dtype)

    def forward(
        self, columns: Float[Tensor, "B T C"], is_token: Bool[Tensor, "B T"], *, dropout: Any = None
    ) -> Float[Tensor, "B T"]:
        """Log-odds that each token is hallucinated; dropout is (Philox key, step), None outside training."""
        x = functional.dropout(gelu(self.embed(columns.to(self.dtype))), self.dropout, dropout, site=self.site)
        for layer in self.layers:
            x = layer(x, is_token, dropout)
        return self.head(self.norm(x))[:, :, 0]


def standardised(columns: Float[Tensor, "B T C"], scale: Scale) -> Float[Tensor, "B T C"]:
    """Standardise columns: subtract the mean, divide by the deviation, clip to +-LIMIT; float32."""
    return ((columns.float() - scale.mean) / scale.deviation).clamp(-LIMIT, LIMIT)


def response_logits(logits: Float[Tensor, "B T"], is_token: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Log-odds that each response has a hallucinated token, from its tokens' log-odds; -inf without tokens."""
    return torch.logsumexp(logits.masked_fill(~is_token, -torch.inf), dim=1) - 1.0


def predict(model: TokenClassifier, batch: Batch, *, dropout: Any = None) -> Float[Tensor, "B T"]:
    """Token logits of a batch; 0 at padding."""
    return model(batch.columns, batch.is_token, dropout=dropout).masked_fill(~batch.is_token, 0.0)


def loss_of(output: Float[Tensor, "B T"], batch: Batch) -> Float[Tensor, ""]:
    """Mean binary cross-entropy of tokens, plus RESPONSE_WEIGHT times that of responses, nats, in at least float32.

    A row without tokens only fills up a batch, and does not count as a response.
    """
    wide = output.to(torch.promote_types(output.dtype, torch.float32))
    labels = batch.labels.to(wide.dtype)
    of_tokens = masked_mean(F.softplus(wide) - labels * wide, batch.is_token)
    is_response = batch.is_token.any(dim=1)
    logits = response_logits(wide, batch.is_token | ~is_response[:, None]).masked_fill(~is_response, 0.0)
    of_responses = masked_mean(F.softplus(logits) - labels.amax(dim=1) * logits, is_response)
    return of_tokens + RESPONSE_WEIGHT * of_responses


def masked_mean(x: Float[Tensor, "..."], where: Bool[Tensor, "..."]) -> Float[Tensor, ""]:
    """Mean of x where `where` is true; 0 if it is true nowhere."""
    return x.masked_fill(~where, 0.0).sum() / where.sum().clamp(min=1)


def loss_fn(model: TokenClassifier, batch: Batch, *, dropout: Any = None) -> Float[Tensor, ""]:
    """The model's loss on a batch, nats."""
    return loss_of(predict(model, batch, dropout=dropout), batch)


def build(
    config: TokenConfig, params: Mapping[str, np.ndarray], *, dtype: str = "float32", device: str = "cpu"
) -> TokenClassifier:
    """Build the classifier of a configuration with `params`, cast to dtype.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; all names are listed.
    """
    with torch.device("meta"):
        model = TokenClassifier(**dict(config), dtype=dtype)
    return nn.load_params(model, params, device=device)


def scorer(trained: Trained) -> Callable[[Arrays], Float[np.ndarray, "B T"]]:
    """Return a function from batches to token logits."""
    model, scale = build(trained.config, trained.params), single(trained.scale)

    @torch.no_grad()
    def score(arrays: Arrays) -> np.ndarray:
        batch = Batch(*map(torch.from_numpy, arrays))
        batch = batch._replace(columns=standardised(batch.columns, scale))
        return predict(model, batch).double().numpy()

    return score


def single(scale: Scale) -> Scale:
    """A scale in float32."""
    return Scale(*(torch.from_numpy(each).float() for each in scale))
