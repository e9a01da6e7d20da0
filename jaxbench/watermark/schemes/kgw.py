"""KGW: green lists and a bias on their logits (Kirchenbauer et al. 2023, arXiv:2301.10226), Bernoulli form (S file).

A token is green after a context if its word is below gamma 2^32, independently of other tokens: this needs no
permutation of the vocabulary, and the number of green tokens is exactly binomial.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from jaxbench.watermark.reference import ContextRule
from jaxbench.watermark.schemes.green_count import MAX_BIAS, MIN_GAMMA, GreenScheme


class Kgw(GreenScheme):
    """Green lists and a bias on their logits."""

    scheme: Literal["kgw"] = "kgw"
    gamma: float = Field(default=0.25, ge=MIN_GAMMA, lt=1)  # expected share of green tokens
    delta: float = Field(default=2.0, ge=0, le=MAX_BIAS)  # bias on green logits, nats
    context: ContextRule = ContextRule()
    payload_bits: int = Field(default=0, ge=0, le=16)  # a message of this many bits, 0 = none

    device: ClassVar[str] = "kgw"
