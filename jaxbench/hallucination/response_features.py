"""What a reader finds in one response: the arrays that are cached, pooled and judged (S file).

Axis letters: R tokens of the response, M of them with parametric scores, L layers, N heads, D model width.
"""

from __future__ import annotations

from typing import TypedDict

import numpy as np
from jaxtyping import Float16, Float32, Int32


class ResponseFeatures(TypedDict):
    """Features of one response; token_scores.py has the formulas, losses and entropies are in nats."""

    external: Float16[np.ndarray, "L N R"]  # external context score
    context_mass: Float16[np.ndarray, "L N R"]  # attention weight of all context tokens
    lookback: Float16[np.ndarray, "L N R"]  # lookback ratio
    loss: Float32[np.ndarray, " R"]
    entropy: Float32[np.ndarray, " R"]
    loss_without: Float32[np.ndarray, " R"]  # after the prompt with an empty context, as the next
    entropy_without: Float32[np.ndarray, " R"]
    states: Float16[np.ndarray, "R D"]  # output of one of the reader's blocks; infinite beyond float16's range
    parametric_slots: Int32[np.ndarray, " M"]  # indices of tokens that have parametric scores
    parametric: Float32[np.ndarray, "M L"]  # parametric knowledge score of those tokens
    offsets: Int32[np.ndarray, "R 2"]  # characters of the tokens: start, end
    num_cut: Int32[np.ndarray, ""]  # tokens of the context that did not fit the window


def finite_states(features: ResponseFeatures) -> Float16[np.ndarray, "R D"]:
    """States whose values beyond float16's range, which some models have, are the largest of that range."""
    largest = np.finfo(np.float16).max
    return np.clip(features["states"], -largest, largest)
