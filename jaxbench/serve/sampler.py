"""From the logits of one position to a token, with each request's own settings (S file).

A token depends on its logits, the request's settings and its place in the answer, and on nothing else of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jaxbench import philox
from jaxbench.native import library
from jaxbench.serve.request import RequestState, Sampling, TokenLogprobs

Array = np.ndarray


def choose(state: RequestState, logits: Float[Array, " V"]) -> tuple[int, TokenLogprobs | None]:
    """Return the next token of a request, and its log-probabilities where they are wanted.

    Raises:
      FloatingPointError: a logit is NaN, or none is finite.
      ValueError: no token follows the request's grammar.
    """
    largest = float(np.max(logits))  # NaN if any logit is
    if not np.isfinite(largest):
        raise FloatingPointError(f"logits: the largest of {len(logits)} is {largest}")
    sampling = state.request.sampling
    changed = logits
    if sampling.changes_logits:
        changed = penalized(logits, sampling, state.tokens, state.tokens[len(state.request.prompt) :])
    marker = state.marker
    if marker is not None and not marker.draws:
        changed = marker(state.tokens, changed)
    if state.constraint is not None:
        changed = state.constraint.masked(changed)
    if marker is not None and marker.draws:
        changed = marker(state.tokens, filtered(changed, sampling))
        sampling = Sampling(temperature=1.0, seed=sampling.seed, choice=sampling.choice)
    token = drawn(changed, sampling, step=state.num_new)
    wanted = state.request.logprobs
    return token, None if wanted is None else logprobs(logits, token, wanted)


def penalized(
    logits: Float[Array, " V"], sampling: Sampling, tokens: Sequence[int], answer: Sequence[int]
) -> Float[Array, " V"]:
    """Apply penalties, as jaxbench.penalties does, and biases."""
    changed = logits.astype(np.float32, copy=True)
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(tokens, np.int64))
        mine, penalty = changed[seen], np.float32(sampling.repetition_penalty)
        changed[seen] = np.where(mine > 0, mine / penalty, mine * penalty)
    if answer and (sampling.frequency_penalty or sampling.presence_penalty):
        seen, counts = np.unique(np.asarray(answer, np.int64), return_counts=True)
        changed[seen] -= (counts * sampling.frequency_penalty + sampling.presence_penalty).astype(np.float32)
    for token, bias in sampling.logit_bias.items():
        changed[token] += np.float32(bias)
    return changed


def drawn(logits: Float[Array, " V"], sampling: Sampling, *, step: int) -> int:
    """Return the most probable token, or a Gumbel-max draw: the bits of sample.draw with the row `choice`."""
    if sampling.temperature == 0.0:
        return int(np.argmax(logits))
    if not library.is_available():
        return int(np.argmax(_gumbel(filtered(logits, sampling), sampling, step)))
    floats = (sampling.temperature, sampling.top_p, sampling.min_p)
    how = library.Sampling(*floats, sampling.top_k, philox.site_id("sample"))
    key, rows = np.array(philox.split_seed(sampling.seed), np.uint32), np.array([sampling.choice], np.int32)
    return int(library.draw(logits[None], how, key=key, step=step, row_ids=rows, threads=1)[0])


def filtered(logits: Float[Array, " V"], sampling: Sampling) -> Float[Array, " V"]:
    """Divide by the temperature; set tokens outside top-k, top-p and min-p to -inf: sample.filter_logits in numpy."""
    scaled = (logits / np.float32(sampling.temperature)).astype(np.float32)
    if 0 < sampling.top_k < len(scaled):
        least = np.partition(scaled, -sampling.top_k)[-sampling.top_k]
        scaled = np.where(scaled >= least, scaled, -np.inf)
    if sampling.top_p < 1.0:
        ordered = np.sort(scaled)[::-1].astype(np.float64)
        probabilities = np.exp(ordered - ordered[0])
        probabilities /= probabilities.sum()
        is_kept = np.cumsum(probabilities) - probabilities < sampling.top_p
        scaled = np.where(scaled >= np.float32(ordered[is_kept][-1]), scaled, -np.inf)
    if sampling.min_p > 0.0:
        scaled = np.where(scaled >= scaled.max() + np.float32(np.log(sampling.min_p)), scaled, -np.inf)
    return scaled


def _gumbel(logits: Float[Array, " V"], sampling: Sampling, step: int) -> Float[Array, " V"]:
    rows = np.array([sampling.choice])
    words = philox.words(sampling.seed, step=step, site="sample", rows=rows, num_elements=len(logits))[0]
    return logits - np.log(-np.log(philox.uniform(words))).astype(np.float32)


def logprobs(logits: Float[Array, " V"], token: int, count: int) -> TokenLogprobs:
    """Return log-probabilities, in float64, of a token and of the `count` most probable ones, in descending order.

    A vocabulary of fewer tokens gives them all.
    """
    wide, count = logits.astype(np.float64), min(count, len(logits))
    peak = wide.max()
    total = peak + np.log(np.exp(wide - peak).sum())
    top = np.argpartition(-wide, count - 1)[:count] if count else np.zeros(0, np.int64)
    top = top[np.lexsort((top, -wide[top]))]
    return TokenLogprobs(float(wide[token] - total), tuple((int(each), float(wide[each] - total)) for each in top))
