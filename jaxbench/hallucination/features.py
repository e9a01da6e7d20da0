"""Compute a reader's features of responses by compiled programs: prompts once, responses in rows of one size.

Twin: torch_ref/hallucination/features.py. Axis letters: reader.py.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxbench.hallucination import reader, token_scores
from jaxbench.hallucination.layout import PromptArrays, ResponseArrays
from jaxbench.hallucination.reader import Prompt


class FeatureReader:
    """A decoder as a reader; its programs are compiled once per size of prompts and of rows."""

    def __init__(self, model: Any, *, state_layer: int):
        """state_layer: the block whose output is kept as tokens' states, counted from 0."""
        graph, self._state = nnx.split(model)
        merge = functools.partial(nnx.merge, graph)
        self._read = jax.jit(lambda state, *arrays: reader.read_prompt(merge(state), *arrays))
        self._with = jax.jit(lambda state, *arrays: _with_context(merge(state), state_layer, *arrays))
        self._without = jax.jit(lambda state, *arrays: _without_context(merge(state), *arrays))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the arrays that hold the decoder's weights."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._state))

    def read_prompt(self, prompts: PromptArrays) -> Prompt:
        """Read prompts; `scores` and `surprise` may use the result any number of times."""
        return self._read(self._state, prompts.tokens, prompts.positions, prompts.is_context)

    def scores(
        self, prompt: Prompt, prompts: PromptArrays, rows: ResponseArrays, slots: np.ndarray, num_slots: int
    ) -> dict[str, np.ndarray]:
        """Compute every feature of rows of responses, by name: arrays [L N B T], [M L], [B T D] or [B T].

        slots: indices into B * T whose parametric scores are computed; only the first num_slots count.
        """
        given = (prompt, prompts.num_attended, rows, slots, np.int32(num_slots))
        return jax.device_get(self._with(self._state, *given))

    def surprise(self, prompt: Prompt, rows: ResponseArrays) -> dict[str, np.ndarray]:
        """Compute loss and entropy alone [B T], as for a prompt without its context."""
        return jax.device_get(self._without(self._state, prompt, rows))


def _with_context(
    model: Any, state_layer: int, prompt: Prompt, num_attended: Array, rows: ResponseArrays, slots: Array, count: Array
) -> dict[str, Array]:
    responses = reader.Responses(*rows)
    trace = reader.read_responses(model, prompt, responses)
    scores = token_scores.attention_scores(model, prompt, responses, trace, num_attended)
    loss, entropy = token_scores.surprise(model, trace, responses.targets)
    parametric = token_scores.parametric_scores(model, trace, slots, count)
    states = trace.stream[state_layer + 1].astype(jnp.float32)
    return scores._asdict() | {"parametric": parametric, "loss": loss, "entropy": entropy, "states": states}


def _without_context(model: Any, prompt: Prompt, rows: ResponseArrays) -> dict[str, Array]:
    trace = reader.read_responses(model, prompt, reader.Responses(*rows))
    loss, entropy = token_scores.surprise(model, trace, rows.targets)
    return {"loss": loss, "entropy": entropy}
