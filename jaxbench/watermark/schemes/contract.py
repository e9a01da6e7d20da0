"""What a scheme is: the configurations in this folder, and the statistics that they name (S file).

A scheme's file says what sets it apart; what it leaves out is as here. Its twins in ../device/ mark logits on a device.
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
    """One watermark scheme: a frozen configuration, and everything particular to it that needs no device.

    Fields that some schemes have, and that others read where they are there: `context` (reference.ContextRule),
    `payload_bits` (messages of that many bits), `dual_key_alpha` (share of steps that use a second key).
    """

    scheme: str  # its name in configurations and commands
    draws: ClassVar[bool] = False  # True: replaces the draw of a token; False: changes logits before it
    device: ClassVar[str]  # module of ../device/ (and torch_ref's) that marks logits and reads words on a device
    word_fields: ClassVar[tuple[str, ...]] = ("context",)  # what its words depend on; detection is compiled for these
    key_field: ClassVar[str | None] = None  # a field that is its only key, of another toolkit's lists; None: takes keys
    is_detection_only: ClassVar[bool] = False  # True: each candidate token has a list of its own
    has_list_words: ClassVar[bool] = False  # its words are 0 and RED only, so that evidence has `inputs` too
    has_fixed_list: ClassVar[bool] = False  # one list for all contexts, `green_list(key, vocab_size)`, bool [V]

    @pydantic.model_validator(mode="after")
    def _check_context(self) -> Scheme:
        if self.draws and self.context.kind == "self":  # a seed for each candidate token
            kind = self.context.kind
            raise ValueError(f"{self.scheme}: context.kind={kind} is for kgw only, wanted left, skip or min")
        return self

    @property
    def context_length(self) -> int:
        """Tokens that must precede a position for it to be marked and scored."""
        return self.context.length

    def text_words(self, key: Keys, text: Text) -> tuple[Words, Seeds]:
        """Words of the tokens of texts, and the seeds that, with the token, decide them (equal: the same evidence)."""
        seeds, pair = reference.context_seeds(self.context, key, text.tokens), reference.halves(key, 2)
        options = {"vocab_size": text.vocab_size, "payload": text.payload}
        return reference.token_words(self, pair, seeds, text.tokens, **options), seeds

    def statistic(self, vocab_size: int) -> Statistic:
        """What detection adds up over the scored positions, and how that sum is distributed without a mark."""

    def null_words(self, random: np.random.Generator, shape: tuple[int, ...]) -> UInt32[np.ndarray, "*shape"]:
        """Words of tokens under a key that has nothing to do with them: independent and uniform."""
        return random.integers(0, 2**32, shape, dtype=np.uint32)

    def neural_evidence(self, words: UInt32[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
        """Evidence in (0, 1) for the neural detector: mean 1/2 without a mark, larger with one (features.py)."""

    def shade(self, words: UInt32[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """How much each token speaks for a mark, in [0, 1], for pictures of a text."""


class Statistic:
    """A sum over the scored positions of a text, and its distribution under the null hypothesis."""

    is_continuous: ClassVar[bool] = False  # True: its three p-values are equal
    counts_green: ClassVar[bool] = False  # True: the sum is the number of green tokens

    def token_scores(self, evidence: Evidence) -> Float[np.ndarray, "N T"] | Int[np.ndarray, "N T"]:
        """What each position adds: float64 or int64, 0 where not scored."""

    def total(self, evidence: Evidence) -> Float[np.ndarray, " N"] | Int[np.ndarray, " N"]:
        """The sum of `token_scores` over each row, in less time."""

    def moments(self) -> tuple[float, float]:
        """Mean and variance of one scored position's score under the null."""

    def variance(self, num_scored: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """Variance of the sum over that many positions under the null: independent ones, unless said otherwise."""
        return num_scored * self.moments()[1]

    def tail(self, total: Float[np.ndarray, " N"], num_scored: Int[np.ndarray, " N"]) -> Tail:
        """P(sum >= total) and P(sum > total) over that many positions with distinct inputs, under the null."""

    def reported(self, total: Float[np.ndarray, " N"], num_scored: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """The total in the unit that the field's literature reports."""
        return total.astype(np.float64)


SchemeLike = Scheme | Mapping[str, Any] | str  # what stands for a scheme: itself, its fields, or its name
