"""KGW with the green lists of MarkLLM 0.1.5, bit for bit (markllm/watermark/kgw/kgw.py) (S file).

A context is combined into one number below V (green_lists.py). Its image f under a permutation of the vocabulary,
times the key, modulo V, is the seed of the list. The window scheme `self` also multiplies by the candidate's image.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from jaxbench.watermark import green_lists
from jaxbench.watermark.reference import MAX_WIDTH
from jaxbench.watermark.schemes.green_count import MAX_BIAS, ToolkitScheme


class MarkLlmKgw(ToolkitScheme):
    """KGW of MarkLLM; field names and meanings are MarkLLM's."""

    scheme: Literal["kgw_markllm"] = "kgw_markllm"
    gamma: float = Field(default=0.5, gt=0, lt=1)  # share of green tokens
    delta: float = Field(default=2.0, ge=0, le=MAX_BIAS)  # bias on green logits, nats
    hash_key: int = Field(default=15485863, ge=1)
    prefix_length: int = Field(default=1, ge=1, le=MAX_WIDTH)  # tokens of context
    f_scheme: Literal["time", "additive", "skip", "min"] = "time"
    window_scheme: Literal["left", "self"] = "left"  # self: detection only

    key_field: ClassVar[str | None] = "hash_key"

    @property
    def context_length(self) -> int:
        """Tokens that must precede a marked position."""
        return self.prefix_length

    @property
    def is_detection_only(self) -> bool:
        """True if each candidate token has a separate list."""
        return self.window_scheme == "self"

    def list_rule(self, vocab_size: int) -> green_lists.ListRule:
        """Return how contexts select lists; the module docstring has the source."""
        numbers, images = np.arange(vocab_size), green_lists.permutation(self.hash_key, vocab_size)
        hashed = numbers if self.f_scheme == "min" else images  # MarkLLM's _f of a combined context
        return green_lists.ListRule(
            bias=self.delta,
            combine=self.f_scheme,
            lag=self.prefix_length,
            values=images if self.f_scheme == "min" else numbers,
            rows=hashed * (self.hash_key % vocab_size) % vocab_size,
            row_seeds=numbers,
            hashed=hashed,
            candidate_factors=images if self.is_detection_only else None,
        )
