"""Bugs of gate P9 in the context compressor: those that such models invite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from jaxbench.parity.injection import Mutation
from torch_ref import attention, functional, transformer
from torch_ref.compress import compressor


def _first_of_group(original: Callable, x: torch.Tensor, is_token: torch.Tensor, size: int) -> torch.Tensor:
    """Take a group's first token instead of its mean."""
    return x[:, ::size] * is_token[:, ::size, None]


def _padding_in_means(original: Callable, x: torch.Tensor, is_token: torch.Tensor, size: int) -> torch.Tensor:
    """Divide a short group's sum by its full size."""
    return original(torch.where(is_token[:, :, None], x, 0.0), torch.ones_like(is_token), size)


def _causal(original: Callable, spans: attention.Spans, sliding_window: int | None, *how: Any) -> torch.Tensor:
    """Let no token attend to later ones."""
    return original(spans, sliding_window, True)


def _vectors_of_first_row(original: Callable, self: Any, batch: compressor.Batch) -> torch.Tensor:
    """Let every row read the first row's vectors."""
    found = original(self, batch)
    size = self.decoder.vocab_size
    own = batch.groups.shape[1] * batch.groups.shape[2]
    is_vector = (found >= size) & (found < size + len(found) * own)
    return torch.where(is_vector, size + (found - size) % own, found)


def _means_as_they_are(original: Callable, self: Any, states: torch.Tensor, *args: Any) -> torch.Tensor:
    """Leave the mean embeddings unscaled."""
    means, ratio = args
    return original(self, states, means / ratio**0.5, ratio)


def _asked_everywhere(original: Callable, output: compressor.Output, batch: compressor.Batch) -> torch.Tensor:
    """Ask the local head for tokens that do not exist."""
    return original(output, batch._replace(sampled=batch.sampled.clamp(min=0)))


def _no_teacher(original: Callable, output: compressor.Output, batch: compressor.Batch) -> torch.Tensor:
    return original(output, batch._replace(teacher_tokens=None, teacher_probs=None))


def _slots_of_another_ratio(original: Callable, self: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Give the encoder the slots of another ratio's groups."""
    known, self.first_slot = self.first_slot, {ratio: first + 1 for ratio, first in self.first_slot.items()}
    try:
        return original(self, x, *args)
    finally:
        self.first_slot = known


_CASE = "compress/frozen"
_MEANS, _LOSS = (compressor, "group_means"), (compressor, "loss_of")

COMPRESS_BUGS = (
    Mutation("group-is-its-first-token", _CASE, _MEANS, _first_of_group),
    Mutation("padding-counts-in-group-means", _CASE, _MEANS, _padding_in_means),
    Mutation("encoder-is-causal", _CASE, (attention, "attention_mask"), _causal),
    Mutation("pooled-queries-not-turned", _CASE, (transformer.Attention, "queries"),
             lambda original, self, x, context: original(self, x, context._replace(angles=None))),
    Mutation("vectors-of-another-row", _CASE, (compressor.Compressor, "_of_table"), _vectors_of_first_row),
    Mutation("vectors-are-scaled-as-tokens", _CASE, (functional, "with_vectors"),
             lambda original, embed, tokens, vectors, size: original(embed, tokens, 2 * vectors, size=size)),
    Mutation("means-are-not-spread", _CASE, (compressor.Connector, "forward"), _means_as_they_are),
    Mutation("local-loss-of-padding", _CASE, _LOSS, _asked_everywhere),
    Mutation("teacher-forgotten", _CASE, _LOSS, _no_teacher),
    Mutation("slots-of-another-ratio", _CASE, (compressor.Encoder, "forward"), _slots_of_another_ratio),
)  # fmt: skip
