"""Compute a tuned reader's inputs with the plain decoder's lower blocks.

Twin: jaxbench/hallucination/lower_reader.py. Axis letters: jaxbench/hallucination/tuned_inputs.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from jaxbench.hallucination.layout import PromptArrays, ResponseArrays
from torch_ref.hallucination import reader
from torch_ref.hallucination.reader import Prompt


class LowerReader:
    """A decoder that ends with the last tuned block."""

    def __init__(self, model: Any, *, first: int):
        """first: the first tuned block, counted from 0."""
        self._model, self._first = model, first

    @torch.no_grad()
    def read_prompt(self, prompts: PromptArrays) -> Prompt:
        """Read one prompt without its last token; the other methods may use the result any number of times."""
        arrays = (prompts.tokens, prompts.positions, prompts.is_context)
        return reader.read_prompt(self._model, *map(self._tensor, arrays))

    def cached(self, prompt: Prompt, length: int) -> tuple[Float[np.ndarray, "L K H P"], Float[np.ndarray, "L K P H"]]:
        """Return keys and values of the tuned blocks, float32; length: tokens that were read, the rest is padding."""
        keys = [each[:, :, :length].float().numpy(force=True) for each in prompt.cache.keys[self._first :]]
        values = [each[:, :length].float().numpy(force=True) for each in prompt.cache.values[self._first :]]
        return np.stack(keys), np.stack(values)

    @torch.no_grad()
    def stream(self, prompt: Prompt, rows: ResponseArrays) -> Float[np.ndarray, "B T D"]:
        """Compute the residual stream before the first tuned block, float32."""
        responses = reader.Responses(*map(self._tensor, rows))
        trace = reader.read_responses(self._model, prompt, responses)
        return trace.stream[self._first].float().numpy(force=True)

    def _tensor(self, x: Any) -> Tensor:
        return torch.as_tensor(np.asarray(x), device=self._model.embed.embedding.device)
