"""Penalties on tokens in a row already, and biases, before temperature and filters. Twin: jaxbench/penalties.py."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jaxbench.prompts import SamplingParams


def penalize(
    logits: Float[Tensor, "B V"],
    tokens: Int[Tensor, "B W"],
    lengths: Int[Tensor, " B"],
    *,
    step: int | Int[Tensor, ""],
    sampling: SamplingParams,
) -> Float[Tensor, "B V"]:
    """Apply a step's penalties: repetition to prompt and answer, then frequency and presence to the answer; add biases.

    Args:
      lengths: tokens of each row so far, the last `step` of them its answer.
    """
    if sampling.repetition_penalty != 1.0:
        logits = penalize_repetition(logits, tokens, lengths, penalty=sampling.repetition_penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        weights = {"frequency": sampling.frequency_penalty, "presence": sampling.presence_penalty}
        logits = penalize_frequency(logits, tokens, lengths - step, lengths, **weights)
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias)
        bias = torch.tensor(values, dtype=logits.dtype, device=logits.device)
        logits = logits.index_add(1, torch.tensor(ids, device=logits.device), bias.expand(len(logits), -1))
    return logits


def penalize_repetition(
    logits: Float[Tensor, "B V"], tokens: Int[Tensor, "B W"], lengths: Int[Tensor, " B"], *, penalty: float
) -> Float[Tensor, "B V"]:
    """Divide positive and multiply negative logits of tokens already present (Keskar et al. 2019, arXiv:1909.05858)."""
    index = torch.arange(tokens.shape[1], device=tokens.device)[None, :]
    counts = _counts(logits, tokens, index < lengths[:, None])
    return torch.where(counts > 0, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalize_frequency(
    logits: Float[Tensor, "B V"],
    tokens: Int[Tensor, "B W"],
    starts: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    *,
    frequency: float,
    presence: float,
) -> Float[Tensor, "B V"]:
    """Subtract from each logit `frequency` times the token's count in [starts, lengths), and `presence` if it occurs.

    Source: OpenAI's API reference, frequency_penalty and presence_penalty.
    """
    index = torch.arange(tokens.shape[1], device=tokens.device)[None, :]
    counts = _counts(logits, tokens, (index >= starts[:, None]) & (index < lengths[:, None]))
    return logits - (counts * frequency + (counts > 0) * presence)


def _counts(
    logits: Float[Tensor, "B V"], tokens: Int[Tensor, "B W"], is_counted: Bool[Tensor, "B W"]
) -> Float[Tensor, "B V"]:
    """Count each token among those of its row that are counted; ids past the vocabulary stand for vectors."""
    is_counted = is_counted & (tokens < logits.shape[1])
    index = torch.where(is_counted, tokens, 0).to(torch.int64)
    return torch.zeros_like(logits).scatter_add_(1, index, is_counted.to(logits.dtype))
