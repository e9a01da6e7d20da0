"""A reader as StableHLO: two programs of fixed sizes, and the weights that both take (programs.py runs them).

Twin: torch_ref/hallucination/exported.py, which writes ONNX.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, export
from safetensors.numpy import save_file

from jaxbench.hallucination import programs, reader, token_scores
from jaxbench.native import library

PLATFORMS = ("cpu", "cuda", "tpu")


def write_programs(model: Any, folder: Path, example: Mapping[str, np.ndarray], *, state_layer: int) -> None:
    """Write a decoder's programs into a folder, for processors, GPUs and TPUs.

    example: arrays of the sizes that programs take; state_layer: the block whose output is kept, counted from 0.
    """
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    held = {f"{i:05d}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
    save_file(held, folder / programs.WEIGHTS)

    def merged(weights: list[Array]) -> Any:
        return nnx.merge(graph, jax.tree.unflatten(tree, weights))

    def scores(weights: list[Array], arrays: dict[str, Array]) -> dict[str, Array]:
        return _scores(merged(weights), arrays, state_layer)

    def surprise(weights: list[Array], arrays: dict[str, Array]) -> dict[str, Array]:
        model = merged(weights)
        _, responses, trace = _read(model, arrays)
        return dict(zip(programs.SURPRISE, token_scores.surprise(model, trace, responses.targets)))

    without = {name: array for name, array in example.items() if name != "slots"}
    with library.switched_off():
        for program, given in ((scores, example), (surprise, without)):
            made = export.export(jax.jit(program), platforms=PLATFORMS)(leaves, dict(given))
            (folder / programs.STABLEHLO[program.__name__]).write_bytes(made.serialize())


def _read(model: Any, arrays: Mapping[str, Array]) -> tuple[reader.Prompt, reader.Responses, reader.Trace]:
    prompt = reader.read_prompt(model, arrays["tokens"], arrays["positions"], arrays["is_context"])
    names = ("response_tokens", "targets", "response_positions", "segments", "is_generated")
    responses = reader.Responses(*(arrays[name] for name in names))
    return prompt, responses, reader.read_responses(model, prompt, responses)


def _scores(model: Any, arrays: Mapping[str, Array], state_layer: int) -> dict[str, Array]:
    prompt, responses, trace = _read(model, arrays)
    scores = token_scores.attention_scores(model, prompt, responses, trace, arrays["num_attended"])
    slots = arrays["slots"]
    parametric = token_scores.parametric_scores(model, trace, slots, slots.shape[0])
    loss, entropy = token_scores.surprise(model, trace, responses.targets)
    states = trace.stream[state_layer + 1].astype(jnp.float32)
    return dict(zip(programs.SCORES, (*scores, parametric, loss, entropy, states), strict=True))
