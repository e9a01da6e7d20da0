"""Bugs of gate P9 in the context compressor: those that the shape of such models invites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from jaxbench.parity.injection import Mutation
from torch_ref import attention, functional, transformer
from torch_ref.compress import compressor


def _first_of_group(original: Callable, x: torch.Tensor, is_token: torch.Tensor, size: int) -> torch.Tensor:
    """Take a group's first token for its mean."""
    return x[:, ::size] * is_token[:, ::size, None]


def _padding_in_means(original: Callable, x: torch.Tensor, is_token: torch.Tensor, size: int) -> torch.Tensor:
    """Divide a short group by all of its places."""
    return original(torch.where(is_token[:, :, None], x, 0.0), torch.ones_like(is_token), size)


def _causal(original: Callable, spans: attention.Spans, sliding_window: int | None, *how: Any) -> torch.Tensor:
    """Let no token see those behind it."""
    return original(spans, sliding_window, True)


def _vectors_of_first_row(original: Callable, self: Any, batch: compressor.Batch) -> torch.Tensor:
    """Let every row read the first one's vectors."""
    found = original(self, batch)
    size = self.decoder.vocab_size
    own = batch.groups.shape[1] * batch.groups.shape[2]
    is_vector = (found >= size) & (found < size + len(found) * own)
    return torch.where(is_vector, size + (found - size) % own, found)


def _gain_twice(original: Callable, self: Any, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hand the local head vectors at the size of embeddings."""
    vectors, _ = original(self, states)
    return vectors, vectors


def _asked_everywhere(original: Callable, output: compressor.Output, batch: compressor.Batch) -> torch.Tensor:
    """Ask the local head for tokens that are not there."""
    return original(output, batch._replace(sampled=batch.sampled.clamp(min=0)))


def _no_teacher(original: Callable, output: compressor.Output, batch: compressor.Batch) -> torch.Tensor:
    return original(output, batch._replace(teacher_tokens=None, teacher_probs=None))


def _one_ratio(original: Callable, self: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Tell the encoder the largest ratio, whatever it is."""
    known, self.known_ratios = self.known_ratios, (0, x.shape[1] // args[1].shape[1])
    try:
        return original(self, x, *args)
    finally:
        self.known_ratios = known


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
    Mutation("local-head-behind-the-gain", _CASE, (compressor.Connector, "forward"), _gain_twice),
    Mutation("local-loss-of-padding", _CASE, _LOSS, _asked_everywhere),
    Mutation("teacher-forgotten", _CASE, _LOSS, _no_teacher),
    Mutation("ratio-of-another", _CASE, (compressor.Encoder, "forward"), _one_ratio),
)  # fmt: skip
