"""The scores of token_scores.py as their papers write them: one response, one token, one head at a time (S file).

Plain numpy, unoptimised. Both backends are proved by equality with this (parity/hallucination.py); nothing else uses
it. n runs over the slots that predict a response's tokens, slots over the whole text: the prompt, including its last
token, and the response without its last token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

Vector = Float[np.ndarray, " D"]


def external_context_score(
    attention: Float[np.ndarray, " S"], states: Float[np.ndarray, "S D"], n: int, context: Sequence[int], percent: int
) -> float:
    """Sun et al. 2025, equations 2 and 3: cosine of slot n's last hidden state and the mean of those attended to.

    attention: weights of one head at slot n; context: slots of the context. The most attended `percent` of these count,
    rounded down, at least one.
    """
    weights = sorted((attention[slot] for slot in context), reverse=True)
    num = max(1, len(context) * percent // 100)
    attended = [slot for slot in context if attention[slot] >= weights[num - 1] and attention[slot] > 0]
    if not attended:
        return 0.0
    mean = sum(states[slot] for slot in attended) / len(attended)
    return float(mean @ states[n] / (np.linalg.norm(mean) * np.linalg.norm(states[n])))


def context_mass(attention: Float[np.ndarray, " S"], context: Sequence[int]) -> float:
    """Attention weight of all context tokens."""
    return float(sum(attention[slot] for slot in context))


def lookback_ratio(attention: Float[np.ndarray, " S"], context: Sequence[int], generated: Sequence[int]) -> float:
    """Chuang et al. 2024, section 2: A(context) / (A(context) + A(new)), both of them means.

    generated: slots of the response's tokens that the slot attends to; A(new) is 0 if there are none.
    """
    of_context = sum(attention[slot] for slot in context) / len(context)
    of_new = sum(attention[slot] for slot in generated) / len(generated) if generated else 0.0
    return float(of_context / (of_context + of_new)) if of_context + of_new > 0 else 0.0


def parametric_knowledge_score(before: Vector, behind: Vector, logits: Callable[[Vector], np.ndarray]) -> float:
    """Sun et al. 2025, equation 5: Jensen-Shannon divergence of the lens before and after a feed-forward layer.

    logits: applies the model's final norm and head to one residual state.
    """
    p, q = softmax(logits(before)), softmax(logits(behind))
    middle = (p + q) / 2
    return (relative_entropy(p, middle) + relative_entropy(q, middle)) / 2


def relative_entropy(p: np.ndarray, q: np.ndarray) -> float:
    """Kullback-Leibler divergence of p from q, in nats."""
    return float(sum(a * np.log(a / b) for a, b in zip(p, q) if a > 0))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities of logits."""
    weights = np.exp(logits - np.max(logits))
    return weights / np.sum(weights)


def surprise(logits: np.ndarray, target: int) -> tuple[float, float]:
    """Negative log-probability of a target and entropy, in nats."""
    probs = softmax(logits)
    return float(-np.log(probs[target])), float(-sum(p * np.log(p) for p in probs if p > 0))
