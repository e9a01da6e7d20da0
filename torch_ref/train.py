"""The decoder's loss and the batches it takes. Twin: jaxbench/train.py. The optimiser step: optimizer_step.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_ref import functional


class Batch(NamedTuple):
    """One step's data."""

    tokens: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]  # the token that follows
    positions: Int[Tensor, "B T"] | None  # -1 = padding; None = 0, 1, ... in every row, one document each
    mask: Bool[Tensor, "B T"]  # True where the target counts
    segments: Int[Tensor, "B T"] | None = None  # packed documents; None = one document a row


def cross_entropy(
    logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Mean cross-entropy of the targets where mask is True, in nats per token.

    Computed in at least float32; 0 if no target counts. A target that does not count may be any number, but its logits
    must still be finite, or gradients are not: masking them would read all logits once more.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    known = torch.where(mask, targets, 0).flatten().long()  # targets may be any number if mask is False, such as -100
    losses = F.cross_entropy(wide, known, reduction="none").reshape(mask.shape)
    count = mask.sum().clamp(min=1).to(wide.dtype)
    return torch.where(mask, losses, losses.new_zeros(())).sum() / count


def predict(model: Any, batch: Batch, *, dropout: functional.DropoutStream | None = None) -> Float[Tensor, "B T V"]:
    """Logits [B T V] of a model on a batch; dropout: None = off."""
    return model(batch.tokens, batch.positions, segments=batch.segments, dropout=dropout)


def loss_of(output: Float[Tensor, "B T V"], batch: Batch) -> Float[Tensor, ""]:
    """Cross-entropy of the logits that `predict` returns, in nats per token."""
    return cross_entropy(output, batch.targets, batch.mask)


def loss_fn(model: Any, batch: Batch, *, dropout: functional.DropoutStream | None = None) -> Float[Tensor, ""]:
    """Training loss of a model on a batch, in nats per token, plus auxiliary losses, as jaxbench.train.loss_fn."""
    if not model.auxiliary_weight:
        return loss_of(predict(model, batch, dropout=dropout), batch)
    hidden, cache = model.features(batch.tokens, batch.positions, segments=batch.segments, dropout=dropout)
    auxiliary = sum(layer.loss for layer in cache.memory if layer is not None)
    return loss_of(model.logits(hidden), batch) + model.auxiliary_weight * auxiliary
