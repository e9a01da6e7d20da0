"""Watermarks as logits processors of sample.Generator. Twin: torch_ref/watermark/logits_processor.py.

One processor serves a batch in which every row has its own key, or none. Keys enter the compiled programs as arguments
(`Watermark.state`), never as constants. For several schemes in one batch, chain one processor per scheme; each row is
marked in one of them. device/ has what a scheme does to logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxbench.watermark.device.marks import mark_of
from jaxbench.watermark.green_lists import GreenLists
from jaxbench.watermark.schemes.contract import SchemeLike
from jaxbench.watermark.watermark_base import WatermarkBase


class Watermark(WatermarkBase):
    """A logits processor that marks text with one scheme."""

    def __init__(self, scheme: SchemeLike, *, vocab_size: int, green_lists: GreenLists | None = None):
        """Prepare a scheme (a name, a mapping or a configuration) for logits of vocab_size tokens.

        Raises:
          ValueError: the scheme is unknown or detection-only, or its green lists are missing or of another vocabulary.
        """
        super().__init__(scheme, vocab_size=vocab_size, green_lists=green_lists, mark_of=mark_of)

    @functools.cached_property
    def reweight_alone(self) -> Callable[..., Any]:
        """`reweight` outside other programs, compiled once (jit drops the cache of a bound method that is not kept)."""
        return jax.jit(self.reweight)

    def _on_device(self, array: np.ndarray) -> Array:
        return jnp.asarray(array)
