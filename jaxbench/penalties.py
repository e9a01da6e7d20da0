"""Penalties on tokens in a row already, and biases, before temperature and filters. Twin: torch_ref/penalties.py."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxbench.prompts import SamplingParams


def penalize(
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B W"],
    lengths: Int[Array, " B"],
    *,
    step: Int[Array, ""],
    sampling: SamplingParams,
) -> Float[Array, "B V"]:
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
        logits = logits.at[:, jnp.array(ids)].add(jnp.array(values, logits.dtype))
    return logits


def penalize_repetition(
    logits: Float[Array, "B V"], tokens: Int[Array, "B W"], lengths: Int[Array, " B"], *, penalty: float
) -> Float[Array, "B V"]:
    """Divide positive and multiply negative logits of tokens already present (Keskar et al. 2019, arXiv:1909.05858)."""
    is_token = jnp.arange(tokens.shape[1])[None, :] < lengths[:, None]
    rows = jnp.arange(tokens.shape[0])[:, None]
    seen = jnp.zeros(logits.shape, bool).at[rows, tokens].max(is_token)
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalize_frequency(
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B W"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    frequency: float,
    presence: float,
) -> Float[Array, "B V"]:
    """Subtract from each logit `frequency` times the token's count in [starts, lengths), and `presence` if it occurs.

    Source: OpenAI's API reference, frequency_penalty and presence_penalty.
    """
    index = jnp.arange(tokens.shape[1])[None, :]
    is_answer = (index >= starts[:, None]) & (index < lengths[:, None])
    rows = jnp.arange(tokens.shape[0])[:, None]
    counts = jnp.zeros(logits.shape, logits.dtype).at[rows, tokens].add(is_answer.astype(logits.dtype))
    return logits - (counts * frequency + (counts > 0) * presence)
