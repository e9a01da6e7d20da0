"""Classify which tokens of a response are hallucinated: a reader whose upper blocks have adapters, in PyTorch.

Twin: jaxbench/hallucination/tuned_reader.py, which has the data flow. Axis letters: L tuned blocks, P tokens of the
prompt, M responses of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jaxbench import philox, rotary
from jaxbench.config import Compute
from jaxbench.hallucination.token_inputs import RESPONSE_WEIGHT
from jaxbench.hallucination.tuned_inputs import MAX_RESPONSES, Arrays, TunedConfig
from torch_ref import functional, nn
from torch_ref.attention import SHARED, Context, Spans
from torch_ref.hallucination.token_classifier import masked_mean
from torch_ref.lora import layers


class Batch(NamedTuple):
    """Rows of responses, with their prompts' keys and values."""

    stream: Float[Tensor, "B T D"]  # residual stream before the first tuned block
    keys: Float[Tensor, "B L K H P"]  # of the prompt, by tuned block
    values: Float[Tensor, "B L K P H"]
    prompt_positions: Int[Tensor, "B P"]  # -1 = padding
    positions: Int[Tensor, "B T"]  # of the responses' tokens, after the prompt; -1 = padding
    segments: Int[Tensor, "B T"]  # index of the response in its row
    mask: Bool[Tensor, "B T"]  # True for tokens
    labels: Float[Tensor, "B T"]  # 1 = hallucinated


class TunedReader(torch.nn.Module):
    """Upper blocks of a decoder with adapters, and a head of one logit."""

    def __init__(self, config: TunedConfig, compute: Compute):
        super().__init__()
        decoder, dtype = config.adapted, compute.dtype
        blocks = [layers.make_layer(decoder.at_layer(i), i, compute) for i in config.blocks]
        self.layers = torch.nn.ModuleList(blocks)
        self.final_norm = nn.norm(decoder.norm, decoder.d_model, eps=decoder.norm_eps, dtype=dtype)
        self.head = nn.Linear(decoder.d_model, 1, use_bias=True, dtype=dtype)
        self.frequencies = self.local_frequencies = None
        if decoder.position == "rotary":
            self.frequencies = rotary.frequencies(decoder.head_dim, decoder.rope_theta, decoder.rope_scaling)
        if decoder.local_rope_theta is not None:
            self.local_frequencies = rotary.frequencies(decoder.head_dim, decoder.local_rope_theta, None)
        self.sites = philox.dropout_sites(decoder.num_layers)[config.first : config.blocks.stop]
        self.dtype = str(dtype)

    def forward(self, batch: Batch, *, dropout: Any = None) -> Float[Tensor, "B T"]:
        """Log-odds that each token is hallucinated; dropout is (Philox key, step), None outside training."""
        rows, num_prompt = batch.prompt_positions.shape
        shared = torch.full((rows, num_prompt), SHARED, dtype=batch.segments.dtype, device=batch.segments.device)
        spans = Spans(
            batch.positions, torch.cat([batch.prompt_positions, batch.positions], dim=1),
            batch.segments, torch.cat([shared, batch.segments], dim=1),
        )  # fmt: skip
        angles = [
            None if each is None else functional.rotary_angles(batch.positions, each, dtype=self.dtype)
            for each in (self.frequencies, self.local_frequencies)
        ]
        context = Context(spans, angles[0], num_prompt, dropout, angles[1])
        room, kind = (0, batch.positions.shape[1]), getattr(torch, self.dtype)
        keys = F.pad(batch.keys.to(kind), room)
        values = F.pad(batch.values.to(kind), (0, 0, *room))
        x = batch.stream.to(kind)
        for i, (layer, sites) in enumerate(zip(self.layers, self.sites)):
            # A copy per block: attention writes into it, and must not change what other blocks' gradients need.
            cached = tuple(each[:, i].clone().reshape(-1, *each.shape[3:]) for each in (keys, values))
            x, _ = layer(x, context, sites, cached)
        return self.head(self.final_norm(x))[:, :, 0]


def predict(model: TunedReader, batch: Batch, *, dropout: Any = None) -> Float[Tensor, "B T"]:
    """Token logits of a batch; 0 at padding."""
    return model(batch, dropout=dropout).masked_fill(~batch.mask, 0.0)


def loss_of(output: Float[Tensor, "B T"], batch: Batch) -> Float[Tensor, ""]:
    """Mean binary cross-entropy of tokens, plus RESPONSE_WEIGHT times that of responses, nats, in at least float32."""
    wide = output.to(torch.promote_types(output.dtype, torch.float32))
    labels = batch.labels.to(wide.dtype)
    of_tokens = masked_mean(F.softplus(wide) - labels * wide, batch.mask)
    numbers = torch.arange(MAX_RESPONSES, device=batch.segments.device)
    member = batch.mask[:, :, None] & (batch.segments[:, :, None] == numbers)
    is_response = member.any(dim=1)
    member = member | ~is_response[:, None]  # absent responses get a logit too, which no mean includes
    logits = torch.logsumexp(wide[:, :, None].masked_fill(~member, -torch.inf), dim=1) - 1.0
    logits = logits.masked_fill(~is_response, 0.0)
    wrong = labels[:, :, None].masked_fill(~member, 0.0).amax(dim=1)
    return of_tokens + RESPONSE_WEIGHT * masked_mean(F.softplus(logits) - wrong * logits, is_response)


def loss_fn(model: TunedReader, batch: Batch, *, dropout: Any = None) -> Float[Tensor, ""]:
    """The model's loss on a batch, nats."""
    return loss_of(predict(model, batch, dropout=dropout), batch)


def build(
    config: TunedConfig, params: Mapping[str, np.ndarray], *, dtype: str = "float32", device: str = "cpu"
) -> TunedReader:
    """Build the tuned reader of a configuration with `params`, cast to dtype.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; all names are listed.
    """
    with torch.device("meta"):
        model = TunedReader(config, Compute(dtype=dtype))
    return nn.load_params(model, params, device=device)


def scorer(model: TunedReader) -> Callable[[Arrays], Float[np.ndarray, "B T"]]:
    """Return a function from rows to token logits in float64."""
    device = model.head.kernel.device

    @torch.no_grad()
    def score(arrays: Arrays) -> np.ndarray:
        return predict(model, Batch(*(torch.from_numpy(each).to(device) for each in arrays))).double().numpy(force=True)

    return score
