"""Export a reader as ONNX by PyTorch: two graphs of fixed sizes, and the weights of both (programs.py runs them).

Twin: jaxbench/hallucination/exported.py, which writes StableHLO.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jaxbench.hallucination import programs
from torch_ref.hallucination import reader, token_scores

OPSET = 20


def write_programs(model: Any, folder: Path, example: Mapping[str, np.ndarray], *, state_layer: int) -> None:
    """Write a decoder's programs into a folder: ONNX Runtime, TensorRT and other ONNX runtimes load them.

    example: arrays of programs.INPUTS in the sizes that programs take; state_layer: the block whose output is kept,
    counted from 0. Needs the packages onnx and onnxscript.
    """
    arrays = tuple(torch.as_tensor(example[name]) for name in programs.INPUTS)
    log = logging.getLogger("torch.onnx")
    level = log.level
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter's, about itself
        log.setLevel(logging.ERROR)  # it reports that torchvision is missing, whose operators no decoder uses
        try:  # unoptimised: its optimiser takes eight times as long as the rest, and runtimes have their own
            program = torch.onnx.export(
                _Program(model, state_layer).eval(), arrays, input_names=list(programs.INPUTS),
                output_names=list(programs.SCORES), opset_version=OPSET, dynamo=True, verbose=False, optimize=False,
            )  # fmt: skip
        finally:
            log.setLevel(level)
    program.save(str(folder / programs.ONNX["scores"]), external_data=True)
    _write_part(folder / programs.ONNX["scores"], folder / programs.ONNX["surprise"], programs.SURPRISE)


def _write_part(source: Path, target: Path, outputs: tuple[str, ...]) -> None:
    """Write the subgraph that some outputs need; its weights stay in the source's data file."""
    import onnx

    model = onnx.load(source, load_external_data=False)
    graph, wanted, kept = model.graph, set(outputs), []
    for node in reversed(graph.node):  # each comes after those whose outputs it reads
        if wanted.intersection(node.output):
            wanted.update(node.input)
            kept.append(node)
    unread = next(each for each in graph.input if each.name == "slots")
    graph.input.remove(unread)
    for field, parts in (
        (graph.node, kept[::-1]),
        (graph.initializer, [each for each in graph.initializer if each.name in wanted]),
        (graph.output, [each for each in graph.output if each.name in outputs]),
        (graph.value_info, []),
    ):
        parts = [type(part).FromString(part.SerializeToString()) for part in parts]
        field.clear()
        field.extend(parts)
    target.write_bytes(model.SerializeToString())


class _Program(torch.nn.Module):
    """Everything that a reader computes for one response to one prompt."""

    def __init__(self, model: Any, state_layer: int):
        super().__init__()
        self.model, self.state_layer = model, state_layer

    def forward(
        self, tokens: Tensor, positions: Tensor, is_context: Tensor, num_attended: Tensor, response_tokens: Tensor,
        targets: Tensor, response_positions: Tensor, segments: Tensor, is_generated: Tensor, slots: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Compute the arrays of programs.SCORES from those of programs.INPUTS."""
        tokens, positions, response_tokens, response_positions, slots = (  # ONNX gathers by 64-bit indices only
            each.long() for each in (tokens, positions, response_tokens, response_positions, slots)
        )
        prompt = reader.read_prompt(self.model, tokens, positions, is_context)
        responses = reader.Responses(response_tokens, targets, response_positions, segments, is_generated)
        trace = reader.read_responses(self.model, prompt, responses)
        scores = token_scores.attention_scores(self.model, prompt, responses, trace, num_attended)
        parametric = token_scores.parametric_scores(self.model, trace, slots, slots.shape[0])
        loss, entropy = token_scores.surprise(self.model, trace, responses.targets)
        return (*scores, parametric, loss, entropy, trace.stream[self.state_layer + 1].float())
