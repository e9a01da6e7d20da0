"""Score response tokens from a reader's attention, feed-forward layers and logits.

Twin: jaxbench/hallucination/token_scores.py. Everything is in at least float32.
Callers disable gradients: doing so here would add a separate region to every exported graph, slow to fold back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torch_ref import functional
from torch_ref.attention import Spans, attention_mask, attention_weights
from torch_ref.hallucination.reader import Prompt, Responses, Trace

QUERY_TILE = 128  # slots whose attention rows are held at once
LENS_TILE = 64  # slots whose logits over the vocabulary are held at once


class AttentionScores(NamedTuple):
    """Scores of every head at every slot."""

    external: Float[Tensor, "L N B T"]  # external context score, -1 to 1; 0 where no context token is attended to
    context_mass: Float[Tensor, "L N B T"]  # attention weight of all context tokens, 0 to 1
    lookback: Float[Tensor, "L N B T"]  # c / (c + g); c, g: mean weight of context and of generated tokens


def attention_scores(
    model: Any, prompt: Prompt, responses: Responses, trace: Trace, num_attended: Int[Tensor, " B"]
) -> AttentionScores:
    """Score every head, from recomputed attention rows of the responses' tokens.

    num_attended: how many context tokens with the most attention have their mean hidden state compared with the slot's
    own; at least 1, and all that tie with the last of them are included.
    """
    batch, length = responses.tokens.shape
    spans, hidden = trace.context.spans, trace.hidden.to(_wide(trace.hidden))
    size = QUERY_TILE * (4 if torch.compiler.is_exporting() else 1)  # an exported program unrolls all its tiles
    found = []
    for layer, x, key in zip(model.layers, trace.stream[:-1], trace.keys):
        queries = layer.attention.queries(layer.attention_norm(x), trace.context)
        key = key.reshape(batch, -1, *key.shape[1:])
        parts = []
        for start in range(0, length, size):
            part = slice(start, start + size)
            tile = Spans(
                spans.query_positions[:, part], spans.key_positions, spans.query_segments[:, part], spans.key_segments
            )
            mask = attention_mask(tile, layer.attention.sliding_window)
            weights = attention_weights(queries[:, part], key, mask, softcap=layer.attention.softcap).to(hidden.dtype)
            parts.append(_of_weights(weights, mask, prompt, responses, hidden[:, part], num_attended))
        found.append([torch.cat(each, dim=-1).transpose(0, 1) for each in zip(*parts)])
    return AttentionScores(*(torch.stack(each) for each in zip(*found)))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _of_weights(
    weights: Float[Tensor, "B N t S"],
    mask: Tensor,
    prompt: Prompt,
    responses: Responses,
    hidden: Float[Tensor, "B t D"],
    num_attended: Int[Tensor, " B"],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the three scores of one layer's attention rows."""
    states, num_prompt = prompt.hidden, prompt.hidden.shape[1]
    context = torch.where(prompt.is_context[:, None, None, :], weights[..., :num_prompt], 0.0)
    mass = torch.sum(context, dim=-1)
    generated = mask[:, :, num_prompt:] & responses.is_generated[:, None, :]
    num_generated = torch.sum(generated, dim=-1)[:, None]
    new = torch.sum(torch.where(generated[:, None], weights[..., num_prompt:], 0.0), dim=-1)
    old = mass / torch.clamp(torch.sum(prompt.is_context, dim=1), min=1)[:, None, None]
    new = new / torch.clamp(num_generated, min=1)
    total = old + new
    lookback = torch.where(total > 0, old / torch.where(total > 0, total, 1.0), 0.0)

    chosen = (context >= kth_largest(context, num_attended)[..., None]) & (context > 0)
    attended = torch.einsum("BNtP,BPD->BNtD", chosen.to(states.dtype), states).to(hidden.dtype)
    dot = torch.einsum("BNtD,BtD->BNt", attended, hidden)
    length = torch.sqrt(torch.sum(attended**2, dim=-1) * torch.sum(hidden**2, dim=-1)[:, None])
    external = torch.where(length > 0, dot / torch.where(length > 0, length, 1.0), 0.0)
    return external, mass, lookback


def kth_largest(values: Float[Tensor, "B N t P"], k: Int[Tensor, " B"]) -> Float[Tensor, "B N t"]:
    """Return the k-th largest of each row of non-negative values, 1 <= k <= P."""
    if torch.compiler.is_exporting():  # during export, k is not known yet
        place = (k.long() - 1)[:, None, None, None].expand(*values.shape[:-1], 1)
        return torch.gather(torch.sort(values, dim=-1, descending=True).values, -1, place)[..., 0]
    return torch.stack([row.topk(int(count), dim=-1).values[..., -1] for row, count in zip(values, k)])


def lens_logits(model: Any, hidden: Float[Tensor, "R D"]) -> Float[Tensor, "R V"]:
    """Logits of states after the final norm, in at least float32.

    Differs from the twin: with narrow weights, they are rounded to the weights' type, as PyTorch multiplies on a CPU.
    """
    head = model.embed.embedding.T if model.head is None else model.head.kernel
    logits = (hidden @ head).to(_wide(hidden))
    return logits if model.logit_softcap is None else functional.softcap(logits, cap=model.logit_softcap)


def parametric_scores(
    model: Any, trace: Trace, slots: Int[Tensor, " M"], num_slots: Tensor | int
) -> Float[Tensor, "M L"]:
    """Parametric knowledge score of every layer: Jensen-Shannon divergence, in nats, of the logit lens before and
    after its feed-forward layer; 0 to ln 2.

    slots: indices into B * T; only the first num_slots are scored, the rest get zeros. Time grows with num_slots,
    memory only with the vocabulary.
    """
    layers, batch, length, width = trace.middle.shape
    before = trace.middle.reshape(layers, batch * length, width)
    behind = trace.stream[1:].reshape(before.shape)
    found = torch.zeros((len(slots), layers), dtype=_wide(before), device=before.device)
    used = slots[: int(num_slots)]
    for start in range(0, len(used), LENS_TILE):
        part = used[start : start + LENS_TILE]
        for layer in range(layers):
            logits = [lens_logits(model, model.final_norm(each[layer][part][None])[0]) for each in (before, behind)]
            found[start : start + len(part), layer] = jensen_shannon(*logits)
    return found


def jensen_shannon(left: Float[Tensor, "R V"], right: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
    """Jensen-Shannon divergence of the distributions of two rows of logits, in nats."""
    left, right = F.log_softmax(left, dim=-1), F.log_softmax(right, dim=-1)
    p, q = torch.exp(left), torch.exp(right)
    mean = 0.5 * (p + q)
    middle = torch.log(torch.where(mean > 0, mean, 1.0))
    terms = torch.where(p > 0, p * (left - middle), 0.0) + torch.where(q > 0, q * (right - middle), 0.0)
    return 0.5 * torch.sum(terms, dim=-1)


def surprise(
    model: Any, trace: Trace, targets: Int[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Negative log-probability of each slot's target, and entropy of its distribution, in nats."""
    hidden, wanted = trace.hidden.reshape(-1, trace.hidden.shape[-1]), targets.reshape(-1).long()
    losses, entropies = [], []
    for start in range(0, len(hidden), LENS_TILE):
        part = slice(start, start + LENS_TILE)
        log_probs = F.log_softmax(lens_logits(model, hidden[part]), dim=-1)
        probs = torch.exp(log_probs)
        entropies.append(-torch.sum(torch.where(probs > 0, probs * log_probs, 0.0), dim=-1))
        losses.append(-log_probs.gather(1, wanted[part, None])[:, 0])
    return tuple(torch.cat(each).reshape(targets.shape) for each in (losses, entropies))
