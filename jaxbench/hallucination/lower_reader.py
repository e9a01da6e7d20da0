"""Compute a tuned reader's inputs with the plain decoder's lower blocks, as compiled programs.

Twin: torch_ref/hallucination/lower_reader.py. Axis letters: tuned_inputs.py.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxbench.hallucination import reader
from jaxbench.hallucination.layout import PromptArrays, ResponseArrays
from jaxbench.hallucination.reader import Prompt


class LowerReader:
    """A decoder that ends with the last tuned block; its programs are compiled once per size of prompts and of rows."""

    def __init__(self, model: Any, *, first: int):
        """first: the first tuned block, counted from 0."""
        graph, self._state = nnx.split(model)
        merge = functools.partial(nnx.merge, graph)
        self._first = first
        self._read = jax.jit(lambda state, *arrays: reader.read_prompt(merge(state), *arrays))
        self._stream = jax.jit(lambda state, *given: _stream(merge(state), first, *given))

    def read_prompt(self, prompts: PromptArrays) -> Prompt:
        """Read one prompt without its last token; the other methods may use the result any number of times."""
        return self._read(self._state, prompts.tokens, prompts.positions, prompts.is_context)

    def cached(self, prompt: Prompt, length: int) -> tuple[Float[np.ndarray, "L K H P"], Float[np.ndarray, "L K P H"]]:
        """Return keys and values of the tuned blocks, float32; length: tokens that were read, the rest is padding."""
        keys = [np.asarray(each[:, :, :length], np.float32) for each in prompt.cache.keys[self._first :]]
        values = [np.asarray(each[:, :length], np.float32) for each in prompt.cache.values[self._first :]]
        return np.stack(keys), np.stack(values)

    def stream(self, prompt: Prompt, rows: ResponseArrays) -> Float[np.ndarray, "B T D"]:
        """Compute the residual stream before the first tuned block, float32."""
        return np.asarray(self._stream(self._state, prompt, rows))


def _stream(model: Any, first: int, prompt: Prompt, rows: ResponseArrays) -> Array:
    # the outputs of later blocks are unused, so the compiler drops these blocks
    return reader.read_responses(model, prompt, reader.Responses(*rows)).stream[first].astype(jnp.float32)
