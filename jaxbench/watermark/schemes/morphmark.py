"""MorphMark: green lists with a strength that adapts to the green tokens' probability (S file).

Source: Wang et al. 2025, ACL, arXiv:2505.11541 (linear, exponential and logarithmic form; MarkLLM has them too). If the
green tokens of a step have the total probability P, they get a share r = f(P) of the red tokens' probability, which
makes P + r (1 - P); r = 0 if P < p_0. A step whose green tokens are improbable thus changes little, so that quality
suffers less than from KGW's bias for the same evidence. Green tokens and the test are those of KGW.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float
from pydantic import Field

from jaxbench.watermark.reference import ContextRule
from jaxbench.watermark.schemes.green_count import MIN_GAMMA, GreenScheme


class MorphMark(GreenScheme):
    """Green lists of adaptive strength."""

    scheme: Literal["morphmark"] = "morphmark"
    gamma: float = Field(default=0.5, ge=MIN_GAMMA, lt=1)  # expected share of green tokens
    form: Literal["linear", "exp", "log"] = "exp"  # f(P): k P, exp(k P) - 1, log(k P + 1), at most 1
    k: float = Field(default=1.3, gt=0, le=100)  # the constant in f
    p_0: float = Field(default=0.15, ge=0, le=1)  # a step with a lower probability of green tokens is not marked
    context: ContextRule = ContextRule()

    device: ClassVar[str] = "morphmark"


def strength(green_probability: Float[np.ndarray, "*shape"], scheme: MorphMark) -> Float[np.ndarray, "*shape"]:
    """Return r, the share of the red tokens' probability that moves to the green ones."""
    p, k = np.asarray(green_probability, np.float64), scheme.k
    r = {"linear": k * p, "exp": np.expm1(k * p), "log": np.log1p(k * p)}[scheme.form]
    return np.where(p < scheme.p_0, 0.0, np.minimum(r, 1.0))


def reweight(
    probabilities: Float[np.ndarray, "*shape V"], is_green: Bool[np.ndarray, "*shape V"], scheme: MorphMark
) -> Float[np.ndarray, "*shape V"]:
    """Return the marked distribution, in float64: green tokens times 1 + r (1 - P) / P, red ones times 1 - r."""
    p = probabilities.astype(np.float64)
    green = np.where(is_green, p, 0).sum(axis=-1, keepdims=True)
    r = strength(green, scheme)
    return p * np.where(is_green, 1 + r * (1 - green) / np.where(green > 0, green, 1), 1 - r)
