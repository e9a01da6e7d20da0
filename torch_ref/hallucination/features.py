"""Compute a reader's features of responses: prompts once, responses in rows of one size.

Twin: jaxbench/hallucination/features.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from jaxbench.hallucination.layout import PromptArrays, ResponseArrays
from torch_ref.hallucination import reader, token_scores
from torch_ref.hallucination.reader import Prompt


class FeatureReader:
    """A decoder as a reader."""

    def __init__(self, model: Any, *, state_layer: int):
        """state_layer: the block whose output is kept as tokens' states, counted from 0."""
        self._model, self._state_layer = model, state_layer

    @property
    def weight_bytes(self) -> int:
        """Bytes of the arrays that hold the decoder's weights."""
        return sum(array.nbytes for array in self._model.parameters())

    @torch.no_grad()
    def read_prompt(self, prompts: PromptArrays) -> Prompt:
        """Read prompts; `scores` and `surprise` may use the result any number of times."""
        arrays = (prompts.tokens, prompts.positions, prompts.is_context)
        return reader.read_prompt(self._model, *map(self._tensor, arrays))

    @torch.no_grad()
    def scores(
        self, prompt: Prompt, prompts: PromptArrays, rows: ResponseArrays, slots: np.ndarray, num_slots: int
    ) -> dict[str, np.ndarray]:
        """Compute every feature of rows of responses, by name: arrays [L N B T], [M L], [B T D] or [B T].

        slots: indices into B * T whose parametric scores are computed; only the first num_slots count.
        """
        responses = reader.Responses(*map(self._tensor, rows))
        trace = reader.read_responses(self._model, prompt, responses)
        given = (self._model, prompt, responses, trace)
        scores = token_scores.attention_scores(*given, self._tensor(prompts.num_attended))
        loss, entropy = token_scores.surprise(self._model, trace, responses.targets)
        parametric = token_scores.parametric_scores(self._model, trace, self._tensor(slots), num_slots)
        states = trace.stream[self._state_layer + 1].float()
        found = scores._asdict() | {"parametric": parametric, "loss": loss, "entropy": entropy, "states": states}
        return {name: value.numpy(force=True) for name, value in found.items()}

    @torch.no_grad()
    def surprise(self, prompt: Prompt, rows: ResponseArrays) -> dict[str, np.ndarray]:
        """Compute loss and entropy alone [B T], as for a prompt without its context."""
        responses = reader.Responses(*map(self._tensor, rows))
        trace = reader.read_responses(self._model, prompt, responses)
        loss, entropy = token_scores.surprise(self._model, trace, responses.targets)
        return {"loss": loss.numpy(force=True), "entropy": entropy.numpy(force=True)}

    def _tensor(self, x: Any) -> Tensor:
        return torch.as_tensor(np.asarray(x), device=self._model.embed.embedding.device)
