"""The interface of a scheme: the base class of the configurations in this folder, and of their statistics (S file).

A scheme's file overrides only what differs from these defaults. Its counterparts in ../device/ mark logits on a device.
A word is the 32 random bits of a (key, seed, token); reference.py defines words and seeds.
Axis letters: B texts of a batch (N all texts), T tokens, V vocabulary, K keys of a row (1, or 2 of a dual-key scheme).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pydantic
from jaxtyping import Float, Int, UInt32

from jaxbench.config import Base
from jaxbench.watermark import reference
from jaxbench.watermark.null_distributions import Tail
from jaxbench.watermark.reference import Evidence, Keys, Seeds, Text, Words


class Scheme(Base):
    """One watermark scheme: a frozen configuration, and everything specific to it that needs no device.

    Optional fields, which other modules read if a scheme has them: `context` (reference.ContextRule), `payload_bits`
    (messages of that many bits), `dual_key_alpha` (share of steps that use a second key).
    """

    scheme: str  # its name in configurations and commands
    draws: ClassVar[bool] = False  # True: replaces the draw of a token; False: changes the logits before the draw
    ignores_seed: ClassVar[bool] = False  # True: its draw follows from key and context alone
    device: ClassVar[str]  # module of ../device/ (and torch_ref's) that marks logits and reads words on a device
    word_fields: ClassVar[tuple[str, ...]] = ("context",)  # fields that decide its words; detection compiles for these
    key_field: ClassVar[str | None] = None  # field with the only key, of another toolkit's lists; None: takes keys
    is_detection_only: ClassVar[bool] = False  # True: each candidate token has a separate list
    has_list_words: ClassVar[bool] = False  # True: its words are only 0 and RED, so that evidence also has `inputs`
    has_fixed_list: ClassVar[bool] = False  # True: one list for all contexts, `green_list(key, vocab_size)`, bool [V]

    @pydantic.model_validator(mode="after")
    def _check_context(self) -> Scheme:
        if self.draws and self.context.kind == "self":  # `self` needs a seed for each candidate token
            kind = self.context.kind
            raise ValueError(f"{self.scheme}: context.kind={kind} is for kgw and morphmark, wanted left, skip or min")
        return self

    @property
    def context_length(self) -> int:
        """Tokens that must precede a position for it to be marked and scored."""
        return self.context.length

    def text_words(self, key: Keys, text: Text) -> tuple[Words, Seeds]:
        """Return the words of the tokens and their seeds; an equal (seed, token) is the same evidence."""
        seeds, pair = reference.context_seeds(self.context, key, text.tokens), reference.halves(key, 2)
        options = {"vocab_size": text.vocab_size, "payload": text.payload}
        return reference.token_words(self, pair, seeds, text.tokens, **options), seeds

    def statistic(self, vocab_size: int) -> Statistic:
        """Return what detection sums over the scored positions, with the null distribution of that sum."""

    def null_words(self, random: np.random.Generator, shape: tuple[int, ...]) -> UInt32[np.ndarray, "*shape"]:
        """Draw words of tokens under an unrelated key: independent and uniform."""
        return random.integers(0, 2**32, shape, dtype=np.uint32)

    def neural_evidence(self, words: UInt32[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
        """Evidence in (0, 1) for the neural detector: mean 1/2 for unmarked text, larger for marked (features.py)."""

    def shade(self, words: UInt32[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """How strongly each token indicates a mark, in [0, 1], for highlighting a text."""


class Statistic:
    """A sum over the scored positions of a text, and its distribution under the null hypothesis."""

    is_continuous: ClassVar[bool] = False  # True: the three p-values are equal
    counts_green: ClassVar[bool] = False  # True: the sum is the number of green tokens

    def token_scores(self, evidence: Evidence) -> Float[np.ndarray, "N T"] | Int[np.ndarray, "N T"]:
        """Contribution of each position: float64 or int64, 0 where not scored."""

    def total(self, evidence: Evidence) -> Float[np.ndarray, " N"] | Int[np.ndarray, " N"]:
        """Sum of `token_scores` over each row, computed faster."""

    def moments(self) -> tuple[float, float]:
        """Mean and variance of one scored position's score under the null."""

    def variance(self, num_scored: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """Variance of the sum over `num_scored` positions under the null; by default the positions are independent."""
        return num_scored * self.moments()[1]

    def tail(self, total: Float[np.ndarray, " N"], num_scored: Int[np.ndarray, " N"]) -> Tail:
        """P(sum >= total) and P(sum > total) over `num_scored` positions with distinct inputs, under the null."""

    def reported(self, total: Float[np.ndarray, " N"], num_scored: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """The total in the unit that the literature reports."""
        return total.astype(np.float64)


SchemeLike = Scheme | Mapping[str, Any] | str  # a scheme, its fields, or its name
