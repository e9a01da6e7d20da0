"""Export a reader as StableHLO: two programs of fixed sizes, and the weights that both take (programs.py runs them).

Twin: torch_ref/hallucination/exported.py, which writes ONNX.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export

from jaxbench import outputs, parameters
from jaxbench.hallucination import programs, reader, token_scores
from jaxbench.native import library

PLATFORMS = ("cpu", "cuda", "tpu")


def write_programs(model: Any, folder: Path, example: Mapping[str, np.ndarray], *, state_layer: int) -> None:
    """Write a decoder's programs into a folder, for CPUs, GPUs and TPUs.

    example: arrays of programs.INPUTS in the sizes that programs take; state_layer: the block whose output is kept,
    counted from 0.
    """
    graph, weights = parameters.split(model)
    outputs.save_tensors(folder / programs.WEIGHTS, {name: np.asarray(weight) for name, weight in weights.items()})

    def scores(weights: dict[str, Array], *arrays: Array) -> tuple[Array, ...]:
        return _scores(parameters.merge(graph, weights), arrays, state_layer)

    def surprise(weights: dict[str, Array], *arrays: Array) -> tuple[Array, ...]:
        model = parameters.merge(graph, weights)
        _, responses, trace = _read(model, arrays)
        return token_scores.surprise(model, trace, responses.targets)

    given = [example[name] for name in programs.INPUTS]
    with library.switched_off():
        for program, arrays in ((scores, given), (surprise, given[:-1])):
            jitted = jax.jit(program, keep_unused=True)  # so that the arguments are those that bundle.json lists
            made = export.export(jitted, platforms=PLATFORMS)(weights, *arrays)
            (folder / programs.STABLEHLO[program.__name__]).write_bytes(made.serialize())


def _read(model: Any, arrays: tuple[Array, ...]) -> tuple[reader.Prompt, reader.Responses, reader.Trace]:
    tokens, positions, is_context, _, *given = arrays
    prompt = reader.read_prompt(model, tokens, positions, is_context)
    responses = reader.Responses(*given[:5])
    return prompt, responses, reader.read_responses(model, prompt, responses)


def _scores(model: Any, arrays: tuple[Array, ...], state_layer: int) -> tuple[Array, ...]:
    num_attended, slots = arrays[3], arrays[-1]
    prompt, responses, trace = _read(model, arrays)
    scores = token_scores.attention_scores(model, prompt, responses, trace, num_attended)
    parametric = token_scores.parametric_scores(model, trace, slots, slots.shape[0])
    loss, entropy = token_scores.surprise(model, trace, responses.targets)
    states = trace.stream[state_layer + 1].astype(jnp.float32)
    return (*scores, parametric, loss, entropy, states)  # as programs.SCORES
