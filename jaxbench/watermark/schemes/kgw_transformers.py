"""KGW with the green lists of transformers' WatermarkingConfig, bit for bit (S file).

The seed of a list is the key times the last token; for `selfhash` it is the minimum of key H(token) H(candidate) over
the window. Source: transformers 5.23, generation/logits_process.py, WatermarkLogitsProcessor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Int
from pydantic import Field

from jaxbench import philox
from jaxbench.watermark import green_lists
from jaxbench.watermark.reference import MAX_WIDTH
from jaxbench.watermark.schemes.green_count import MAX_BIAS, ToolkitScheme

HASH_TABLE_SIZE = 1_000_003  # transformers' fixed table for selfhash


class TransformersKgw(ToolkitScheme):
    """KGW of transformers; field names and meanings are those of transformers."""

    scheme: Literal["kgw_transformers"] = "kgw_transformers"
    greenlist_ratio: float = Field(default=0.25, gt=0, lt=1)  # share of green tokens
    bias: float = Field(default=2.0, ge=0, le=MAX_BIAS)  # bias on green logits, nats
    hashing_key: int = Field(default=15485863, ge=1)
    seeding_scheme: Literal["lefthash", "selfhash"] = "lefthash"  # selfhash: detection only
    context_width: int = Field(default=1, ge=1, le=MAX_WIDTH)  # tokens of context

    key_field: ClassVar[str | None] = "hashing_key"

    @property
    def gamma(self) -> float:
        """Share of green tokens."""
        return self.greenlist_ratio

    @property
    def context_length(self) -> int:
        """Tokens that must precede a marked position."""
        return self.context_width - self.is_detection_only

    @property
    def is_detection_only(self) -> bool:
        """True if each candidate token has a separate list."""
        return self.seeding_scheme == "selfhash"

    def list_rule(self, vocab_size: int) -> green_lists.ListRule:
        """Return how contexts select lists; the module docstring has the source."""
        numbers, seeds = np.arange(vocab_size), None
        if not self.is_detection_only:
            products = (self.hashing_key * token % (2**64 - 1) & philox.MASK32 for token in range(vocab_size))
            seeds = np.fromiter(products, np.int64, vocab_size)
        return green_lists.ListRule(
            bias=self.bias,
            combine="skip",
            lag=1,
            values=numbers,
            rows=numbers,
            row_seeds=seeds,
            candidate_seeds=self._selfhash(green_lists.permutation(self.hashing_key, HASH_TABLE_SIZE))
            if self.is_detection_only
            else None,
        )

    def _selfhash(self, table: Int[np.ndarray, " n"]) -> Callable[[np.ndarray], np.ndarray]:
        """Return the seed function: min of key H(token) H(candidate) in the window, as int64 that wraps as in torch."""
        key, width = np.int64((self.hashing_key + 2**63) % 2**64 - 2**63), self.context_width

        def seeds(tokens: Int[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
            hashes, least = table[tokens % HASH_TABLE_SIZE] + 1, np.full(tokens.shape, np.iinfo(np.int64).max)
            with np.errstate(over="ignore"):
                for places in range(width):
                    window = np.pad(hashes, ((0, 0), (places, 0)))[:, : tokens.shape[1]]
                    least = np.minimum(least, key * window * hashes)
            positive = np.where(least < 0, least - 1, least)  # a negative seed mod (2**64 - 1) is seed - 1 mod 2**64
            return np.where(np.arange(tokens.shape[1])[None, :] < width - 1, -1, positive & philox.MASK32)

        return seeds
