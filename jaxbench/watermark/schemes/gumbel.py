"""Gumbel: sampling with keyed instead of random Gumbel noise (S file).

The next token is the argmax of logit - log(-log u), where u is each token's keyed uniform: on average over keys, its
distribution is the model's. Detection sums -log(1 - u) of the tokens, standard exponentials under the null. Source:
Aaronson 2022, "My AI safety lecture for UT Effective Altruism".
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import numpy as np
import pydantic
from jaxtyping import Float, Int, UInt32
from pydantic import Field

from jaxbench import philox
from jaxbench.watermark import null_distributions, reference
from jaxbench.watermark.reference import ContextRule, Halves, Keys, Seeds, Text, Words
from jaxbench.watermark.schemes.contract import Scheme, Statistic

MIN_SHARE = 1e-4  # of either key; for a smaller share, the exact tail is a series of up to billions of terms
CONTEXT_DOMAIN, TOKEN_DOMAIN = 0x574D4358, 0x574D544B  # of vLLM's function


class Gumbel(Scheme):
    """Keyed Gumbel noise."""

    scheme: Literal["gumbel"] = "gumbel"
    context: ContextRule = ContextRule(kind="left", width=4)
    prf: Literal["jaxbench", "vllm"] = "jaxbench"  # vllm: bit-compatible with vLLM's philox4x32-10-v1
    dual_key_alpha: float = Field(default=0.0, ge=0, le=1)  # share of steps with the second key, 0 = one key
    deduplicate: bool = True  # draw with ordinary randomness after a context that the row has already used
    payload_bits: int = Field(default=0, ge=0, le=16)  # a message of this many bits, 0 = none

    draws: ClassVar[bool] = True
    ignores_seed: ClassVar[bool] = True
    device: ClassVar[str] = "gumbel"
    word_fields: ClassVar[tuple[str, ...]] = ("context", "prf")

    @pydantic.model_validator(mode="after")
    def _check(self) -> Gumbel:
        if self.is_vllm and (self.context.kind != "left" or self.payload_bits):
            raise ValueError(
                f"gumbel: prf=vllm knows context.kind=left and payload_bits=0, got context.kind={self.context.kind}, "
                f"payload_bits={self.payload_bits}"
            )
        if self.dual_key_alpha not in (0.0, 1.0) and not MIN_SHARE <= self.dual_key_alpha <= 1.0 - MIN_SHARE:
            raise ValueError(
                f"gumbel: dual_key_alpha={self.dual_key_alpha:g}, wanted 0, 1, or a share of "
                f"{MIN_SHARE} to {1 - MIN_SHARE}"
            )
        return self

    @property
    def is_vllm(self) -> bool:
        """Whether words come from vLLM's function."""
        return self.prf == "vllm"

    @property
    def context_length(self) -> int:
        """Tokens that must precede a marked position: none for vLLM's function, which marks the first one too."""
        return 0 if self.is_vllm else self.context.length

    def text_words(self, key: Keys, text: Text) -> tuple[Words, Seeds]:
        """Return the words and seeds of the tokens; contexts of vLLM's function start with the continuation."""
        if not self.is_vllm:
            return super().text_words(key, text)
        pair, width, tokens = reference.halves(key, 2), self.context.width, text.tokens
        contexts = reference.windows(tokens, width, fill=-1)
        place = np.arange(tokens.shape[1])[:, None] + np.arange(-width, 0)[None, :]
        states = vllm_state(np.where(place[None] >= text.prompt[:, None, None], contexts, -1), pair)
        return vllm_token_words(states, tokens, pair), states

    def complements(self, words: UInt32[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """1 - u of each word, exact in float64, with u as the function `prf` defines it."""
        k = (words >> np.uint32(8)).astype(np.float64)
        if self.is_vllm:
            return (2.0**24 - k) / (2.0**24 + 1.0)
        return (2.0**24 - 0.5 - k) * 2.0**-24

    def statistic(self, vocab_size: int) -> ExponentialSum:
        """The sum of -log(1 - u)."""
        return ExponentialSum(self)

    def neural_evidence(self, words: UInt32[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
        """Uniform of the word; with two keys, of the first key's word."""
        return philox.uniform(words)

    def shade(self, words: UInt32[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """Uniform of the token's word."""
        return 1.0 - self.complements(words)


@dataclasses.dataclass(frozen=True)
class ExponentialSum(Statistic):
    """The sum of -log(1 - u); with two keys (1 - alpha) A + alpha B. Null: a gamma, or a weighted sum of two."""

    scheme: Gumbel
    is_continuous: ClassVar[bool] = True

    def token_scores(self, evidence: reference.Evidence) -> Float[np.ndarray, "N T"]:
        """-log(1 - u) of each scored token."""
        value = -np.log(self.scheme.complements(evidence.words))
        if evidence.second_words is not None:
            alpha = self.scheme.dual_key_alpha
            value = (1.0 - alpha) * value - alpha * np.log(self.scheme.complements(evidence.second_words))
        return np.where(evidence.scored, value, 0.0)

    def total(self, evidence: reference.Evidence) -> Float[np.ndarray, " N"]:
        """Sum of the token scores."""
        total = self._sum(evidence.words, evidence.scored)
        if evidence.second_words is None:
            return total
        alpha = self.scheme.dual_key_alpha
        return (1.0 - alpha) * total + alpha * self._sum(evidence.second_words, evidence.scored)

    def _sum(self, words: np.ndarray, scored: np.ndarray) -> np.ndarray:
        """Sum of -log(1 - u) over scored positions [N]; eight factors, a product > 2**-208, share one logarithm."""
        values = np.where(scored, self.scheme.complements(words), 1.0)
        values = np.pad(values, ((0, 0), (0, -values.shape[1] % 8)), constant_values=1.0)
        return -np.log(values.reshape(len(values), -1, 8).prod(axis=2)).sum(axis=1)

    def moments(self) -> tuple[float, float]:
        """Mean 1, and the variance (1 - alpha)^2 + alpha^2, which is 1 with one key."""
        alpha = self.scheme.dual_key_alpha
        return 1.0, (1.0 - alpha) ** 2 + alpha**2

    def tail(self, total: Float[np.ndarray, " N"], num_scored: Int[np.ndarray, " N"]) -> null_distributions.Tail:
        """Tail of the gamma distribution, or of the sum of two."""
        return null_distributions.dual_gamma(total, num_scored, self.scheme.dual_key_alpha)


# vLLM's function philox4x32-10-v1 (vLLM 0.33, vllm/v1/watermarking/prfs/philox.py): h tokens of context, -1 before the
# text's start, are folded, four at a time, into a state of four words that starts as (CONTEXT_DOMAIN, h, 0, 0); one
# block gives the words of four consecutive tokens. The uniform of a word w is ((w >> 8) + 1) / (2**24 + 1).


def vllm_state(contexts: np.ndarray, key: Halves) -> np.ndarray:
    """Fold contexts [.. h], oldest token first, into states [.. 4] (uint32) under a key's halves (broadcast)."""
    contexts = np.asarray(contexts).astype(np.uint32)
    width, (low, high) = contexts.shape[-1], key
    words = tuple(np.full(contexts.shape[:-1], word, np.uint32) for word in (CONTEXT_DOMAIN, width, 0, 0))
    for offset in range(0, width, 4):
        places = range(offset, offset + 4)
        block = [contexts[..., i] if i < width else np.uint32(philox.MASK32 - i % 4) for i in places]
        words = philox.philox4x32(tuple(w ^ b for w, b in zip(words, block)), (low ^ np.uint32(offset), high))
    return np.stack(np.broadcast_arrays(*words), axis=-1)


def vllm_token_words(states: np.ndarray, tokens: np.ndarray, key: Halves) -> np.ndarray:
    """Word (uint32) of each token [..] given its context's state [.. 4]."""
    tokens, (low, high) = np.asarray(tokens).astype(np.uint32), key
    counter = (tokens >> 2, states[..., 0], states[..., 1], states[..., 2])
    words = philox.philox4x32(counter, (low ^ states[..., 3], high ^ np.uint32(TOKEN_DOMAIN)))
    return reference.pick_word(words, tokens)
