"""MorphMark: green lists with a strength that follows the green tokens' probability (S file).

Source: Wang et al. 2025, ACL, arXiv:2505.11541 (linear, exponential and logarithmic form; MarkLLM has them too). Where
the green tokens of a step have the probability P, they get the share r = f(P) of what the red ones have: P + r (1 - P)
in all, nothing where P < p_0. A context that leaves little to green tokens is left almost alone, so that quality
suffers less than from KGW's bias for the same evidence. Which tokens are green, and the test, are KGW's.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float
from pydantic import Field

from jaxbench.watermark.reference import ContextRule
from jaxbench.watermark.schemes.green_count import GreenScheme


class MorphMark(GreenScheme):
    """Green lists of adaptive strength."""

    scheme: Literal["morphmark"] = "morphmark"
    gamma: float = Field(default=0.5, gt=0, lt=1)  # expected share of green tokens
    form: Literal["linear", "exp", "log"] = "exp"  # f(P): k P, exp(k P) - 1, log(k P + 1), at most 1
    k: float = Field(default=1.3, gt=0, le=100)  # of f
    p_0: float = Field(default=0.15, ge=0, le=1)  # probability of green tokens below which a step is not marked
    context: ContextRule = ContextRule()

    device: ClassVar[str] = "morphmark"


def strength(green_probability: Float[np.ndarray, "*shape"], scheme: MorphMark) -> Float[np.ndarray, "*shape"]:
    """r, the share of the red tokens' probability that the green ones get."""
    p, k = np.asarray(green_probability, np.float64), scheme.k
    r = {"linear": k * p, "exp": np.expm1(k * p), "log": np.log1p(k * p)}[scheme.form]
    return np.where(p < scheme.p_0, 0.0, np.minimum(r, 1.0))


def reweight(
    probabilities: Float[np.ndarray, "*shape V"], is_green: Bool[np.ndarray, "*shape V"], scheme: MorphMark
) -> Float[np.ndarray, "*shape V"]:
    """Marked distribution, in float64: green tokens times 1 + r (1 - P) / P, red ones times 1 - r."""
    p = probabilities.astype(np.float64)
    green = np.where(is_green, p, 0).sum(axis=-1, keepdims=True)
    r = strength(green, scheme)
    return p * np.where(is_green, 1 + r * (1 - green) / np.where(green > 0, green, 1), 1 - r)
