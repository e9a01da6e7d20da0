"""Bugs of gate P9 in the hallucination lab's token scores: those of released detectors, and similar ones.

From ReDeEP's code and its descendants: the divergence with swapped arguments, the lens without the final norm,
attention over the whole prompt, scores of the slot after the one that predicts, a divergence of a distribution from
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from jaxbench.hallucination import layout
from jaxbench.parity.injection import Mutation
from torch_ref import attention, dilated_convolution, transformer
from torch_ref.hallucination import reader, token_classifier, token_scores, tuned_reader


def _swapped(original: Callable, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergences of the mean from both, which have no upper bound."""
    p, q = F.softmax(left, dim=-1), F.softmax(right, dim=-1)
    mean = 0.5 * (p + q)
    return 0.5 * (torch.sum(mean * torch.log(mean / p), dim=-1) + torch.sum(mean * torch.log(mean / q), dim=-1))


def _whole_prompt(original: Callable, weights: Any, mask: Any, prompt: reader.Prompt, *args: Any) -> Any:
    return original(weights, mask, prompt._replace(is_context=torch.ones_like(prompt.is_context)), *args)


def _one_late(original: Callable, model: Any, prompt: Any, responses: reader.Responses, trace: Any, *args: Any) -> Any:
    """Give every slot the rows of the next slot."""
    late = trace._replace(stream=torch.roll(trace.stream, -1, dims=2))
    return original(model, prompt, responses, late, *args)


def _without_norm(original: Callable, model: Any, *args: Any) -> Any:
    norm, model.final_norm = model.final_norm, torch.nn.Identity()
    try:
        return original(model, *args)
    finally:
        model.final_norm = norm


def _no_segments(original: Callable, spans: attention.Spans, *how: Any) -> torch.Tensor:
    """Let a response attend to others in its row."""
    return original(spans._replace(query_segments=None, key_segments=None), *how)


def _padding_counts(original: Callable, logits: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
    """Count padding as tokens of a response."""
    return original(logits, torch.ones_like(is_token))


def _one_response(original: Callable, output: torch.Tensor, batch: tuned_reader.Batch) -> torch.Tensor:
    """Treat all responses of a row as one."""
    return original(output, batch._replace(segments=torch.zeros_like(batch.segments)))


_TOKENS, _TUNED = "hallucination/tokens", "hallucination/tuned"
_LLAMA, _MISTRAL = "hallucination/llama", "hallucination/mistral"
_LENS = (token_scores, "parametric_scores")

HALLUCINATION_BUGS = (
    Mutation("lens-divergence-swapped", _LLAMA, (token_scores, "jensen_shannon"), _swapped),
    Mutation("lens-divergence-with-itself", _LLAMA, (token_scores, "jensen_shannon"),
             lambda original, left, right: original(left, left)),
    Mutation("lens-without-final-norm", _LLAMA, _LENS, _without_norm),
    Mutation("lens-behind-the-next-attention", _LLAMA, _LENS,
             lambda original, model, trace, *args: original(
                 model, trace._replace(stream=torch.cat([trace.stream[:1], trace.middle])), *args)),
    Mutation("context-is-the-whole-prompt", _LLAMA, (token_scores, "_of_weights"), _whole_prompt),
    Mutation("slot-after-the-one-that-predicts", _LLAMA, (token_scores, "attention_scores"), _one_late),
    Mutation("one-attended-token-less", _LLAMA, (token_scores, "kth_largest"),
             lambda original, values, k: original(values, torch.clamp(k - 1, min=1))),
    Mutation("responses-see-each-other", _LLAMA, (attention, "attention_mask"), _no_segments),
    Mutation("share-rounded-up", _LLAMA, (layout, "num_attended"),
             lambda original, num_context, share: original(num_context, share) + 1, side="shared"),
    Mutation("window-ignored", _MISTRAL, (token_scores, "attention_mask"),
             lambda original, spans, window: original(spans, None)),
    Mutation("padding-counts-in-responses", _TOKENS, (token_classifier, "response_logits"), _padding_counts),
    Mutation("convolution-looks-the-other-way", _TOKENS, (dilated_convolution, "shifted"),
             lambda original, x, places: original(x, -places)),
    Mutation("tuned-responses-see-each-other", _TUNED, (attention, "attention_mask"), _no_segments),
    Mutation("tuned-row-is-one-response", _TUNED, (tuned_reader, "loss_of"), _one_response),
    Mutation("branches-in-one", _LLAMA, (transformer.Block, "feed"),
             lambda original, self, x, *args: x),
)  # fmt: skip
