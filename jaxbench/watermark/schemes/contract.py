"""What a scheme is: the contract of the configurations in this folder, and of the statistics that they name (S file).

A scheme's file holds its configuration with these members; its twins in ../device/ mark logits on a device. Axis
letters: B texts of a batch (N all texts), T tokens, V vocabulary, K keys of a row (1, or 2 of a dual-key scheme).
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np
from jaxtyping import Float, Int, UInt32

from jaxbench.watermark.null_distributions import Tail
from jaxbench.watermark.reference import Evidence, Keys, Seeds, Text, Words


class Scheme(Protocol):
    """One watermark scheme: a frozen configuration, and everything particular to it that needs no device.

    Fields that some schemes have, and that others read where they are there: `context` (reference.ContextRule),
    `payload_bits` (messages of that many bits), `dual_key_alpha` (share of steps that use a second key).
    """

    scheme: str  # its name in configurations and commands
    draws: ClassVar[bool]  # True: replaces the draw of a token (temperature above 0); False: changes logits before it
    device: ClassVar[str]  # module of ../device/ (and torch_ref's) that marks logits and reads words on a device
    word_fields: ClassVar[tuple[str, ...]]  # fields that its words depend on; detection is compiled for these
    key_field: ClassVar[str | None]  # a field that is its only key, of lists made by another toolkit; None: takes keys
    has_fixed_list: ClassVar[bool]  # one list for all contexts: `green_list(key, vocab_size)` gives it, bool [V]

    @property
    def context_length(self) -> int:
        """Tokens that must precede a position for it to be marked and scored."""

    def text_words(self, key: Keys, text: Text) -> tuple[Words, Seeds]:
        """Words of the tokens of texts, and the seeds that, with the token, decide them (equal: the same evidence)."""

    def statistic(self, vocab_size: int) -> Statistic:
        """What detection adds up over the scored positions, and how that sum is distributed without a mark."""

    def null_words(self, random: np.random.Generator, shape: tuple[int, ...]) -> UInt32[np.ndarray, "*shape"]:
        """Words of tokens under a key that has nothing to do with them."""

    def neural_evidence(self, words: UInt32[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
        """Evidence in (0, 1) for the neural detector: mean 1/2 without a mark, larger with one (features.py)."""

    def shade(self, words: UInt32[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """How much each token speaks for a mark, in [0, 1], for pictures of a text."""


class Statistic(Protocol):
    """A sum over the scored positions of a text, and its distribution under the null hypothesis."""

    is_continuous: ClassVar[bool]  # True: its three p-values are equal
    counts_green: ClassVar[bool]  # True: the sum is the number of green tokens

    def token_scores(self, evidence: Evidence) -> Float[np.ndarray, "N T"] | Int[np.ndarray, "N T"]:
        """What each position adds: float64 or int64, 0 where not scored."""

    def total(self, evidence: Evidence) -> Float[np.ndarray, " N"] | Int[np.ndarray, " N"]:
        """The sum of `token_scores` over each row, in less time."""

    def moments(self) -> tuple[float, float]:
        """Mean and variance of one scored position's score under the null."""

    def variance(self, num_scored: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """Variance of the sum over that many positions under the null."""

    def tail(self, total: np.ndarray, num_scored: Int[np.ndarray, " N"]) -> Tail:
        """P(sum >= total) and P(sum > total) over that many positions with distinct inputs, under the null."""

    def reported(self, total: np.ndarray, num_scored: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """The total in the unit that the field's literature reports."""

    def null_scores(self, random: np.random.Generator, shape: tuple[int, int]) -> Float[np.ndarray, "N T"]:
        """Simulated scores of positions with distinct inputs under the null (WinMax)."""
