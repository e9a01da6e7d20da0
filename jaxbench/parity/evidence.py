"""Float64 results of one backend, gathered once, and the gates that compare those of two (S file).

The mutation score compares one backend's evidence with that of many broken twins, so gathering and comparing are
separate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxbench.config import TransformerConfig
from jaxbench.parity import capture, cases, distance, gates
from jaxbench.parity.cases import Case

LEARNING_RATE = 3e-3  # of the first step; large, so that 20 steps move every parameter far above the tolerance
# Each of the five changes what the cases draw, so that leaving one out shows (sampling.py has every slip in one).
SAMPLING = {"temperature": 0.7, "top_k": 8, "top_p": 0.7, "min_p": 0.4, "repetition_penalty": 1.5}
SEED = 7  # of dropout and sampling
NUM_SAMPLED = 32  # tokens drawn per row, if the context allows
NUM_BATCHES = 4  # distinct batches, which the training steps cycle through


class Evidence(NamedTuple):
    """One backend's results in float64; None = not part of this run."""

    name: str
    trace: capture.Trace
    repeat: tuple[gates.Gate, dict[str, dict[str, float]]]  # gate P10; each tensor's distance from its repetition
    decoding: capture.Decoding | None
    tokens: np.ndarray | None  # sampled tokens of all batches, [rows, new tokens] int32
    training: capture.Training | None


class Findings(NamedTuple):
    """Gates, and the comparisons behind them by kind."""

    gates: list[gates.Gate]
    comparisons: dict[str, Any]


def training_steps(case: Case, config: TransformerConfig) -> list[cases.Arrays]:
    """Batch of every training step: NUM_BATCHES batches in rotation, so that the loss falls."""
    return [cases.arrays(case, config, step=i % NUM_BATCHES) for i in range(case.steps)]


def learning_rates(case: Case) -> list[float]:
    """Learning rate of every training step: it falls to half, so that a step that keeps an earlier one's shows."""
    return [LEARNING_RATE * (1.0 - 0.5 * i / case.steps) for i in range(case.steps)]


def prompts_of(case: Case, arrays: cases.Arrays) -> list[list[list[int]]]:
    """Two batches of prompts: of two lengths, and of one, which PyTorch reads and continues without a mask."""
    ends = (case.prompt, case.prompt // 2), (case.prompt, case.prompt)
    return [[row[: end[i % 2]].tolist() for i, row in enumerate(arrays.tokens)] for end in ends]


def gather(side: Any, case: Case, config: TransformerConfig, *, gradients: bool, is_quick: bool = False) -> Evidence:
    """Gather the float64 evidence of one side of a case.

    Dropout is on in traces and training. Training comes last, because it changes PyTorch's weights. is_quick leaves out
    sampling and training.
    """
    arrays = cases.arrays(case, config)
    trace = side.trace(arrays, gradients=gradients, seed=SEED)
    # The second trace is not kept: with the default model's gradients it holds a gigabyte.
    repeat = gates.repeatability(trace, side.trace(arrays, gradients=gradients, seed=SEED), name=side.name)
    # Decoding continues one document per row, so packed batches do not decode.
    decoding = None if case.packed or not case.prompt else side.decode(arrays, prompt=case.prompt)
    tokens = None
    if case.sampled and not is_quick:
        count = min(NUM_SAMPLED, config.max_seq_len - case.prompt)
        tokens = side.sample(prompts_of(case, arrays), SAMPLING, max_new_tokens=count, seed=SEED)
    training = None
    if case.steps and not is_quick:
        steps, rates = training_steps(case, config), learning_rates(case)
        training = side.train(steps, case.step, learning_rates=rates, seed=SEED)
    return Evidence(side.name, trace, repeat, decoding, tokens, training)


def judge(evidence: Evidence, reference: Evidence) -> Findings:
    """Compute gates P1, P6, P7, P8 and P10 of one backend's float64 evidence against another's."""
    traces = _traces(evidence, reference)
    rows = [_gate("P1", kind, comparison) for kind, comparison in traces.items()]
    training = {}
    if evidence.training and reference.training:
        training = _training(evidence.training, reference.training)
        rows += [_gate("P7" if kind == "training_curve" else "P1", kind, value) for kind, value in training.items()]
    if evidence.tokens is not None and reference.tokens is not None:
        rows.append(gates.sampling({evidence.name: evidence.tokens, reference.name: reference.tokens}))
    if evidence.decoding and reference.decoding:
        rows += gates.decoding(
            evidence.decoding,
            reference.decoding,
            names=(evidence.name, reference.name),
            tolerance=distance.TOLERANCE_FLOAT64,
        )
    return Findings([*rows, evidence.repeat[0], reference.repeat[0]], traces | training)


def _traces(evidence: Evidence, reference: Evidence) -> dict[str, distance.Comparison]:
    """Distances of loss, module outputs, their gradients and parameters' gradients, by kind.

    A tensor's tolerance is widened by its repeat error in either backend.
    """
    loss, wanted_loss = {"loss": evidence.trace.loss}, {"loss": reference.trace.loss}
    comparisons = {"loss": distance.compare(loss, wanted_loss, kind="loss")}
    for kind in ("outputs", "output_gradients", "gradients"):
        values, wanted = getattr(evidence.trace, kind), getattr(reference.trace, kind)
        if not values:
            continue
        if kind != "gradients" and len(values) == 1:  # a scanned or closed model shows only its logits
            wanted = {name: wanted[name] for name in values}
        repeat_errors = [errors.get(kind, {}) for _, errors in (evidence.repeat, reference.repeat)]
        widen = {name: sum(errors.get(name, 0.0) for errors in repeat_errors) for name in wanted}
        comparisons[kind] = distance.compare(values, wanted, kind=kind, widen=widen)
    return comparisons


def _training(training: capture.Training, reference: capture.Training) -> dict[str, distance.Comparison]:
    """Distances of the losses of all steps, and of parameters and moments after the last, by kind."""
    curves = [{f"loss {i}": loss for i, loss in enumerate(each.losses)} for each in (training, reference)]
    comparisons = {"training_curve": distance.compare(*curves, kind="training curve")}
    for kind, wanted in reference.arrays.items():
        key = f"{kind}_after_{len(reference.losses)}_steps"
        comparisons[key] = distance.compare(training.arrays[kind], wanted, kind=key)
    return comparisons


def _gate(gate_id: str, kind: str, comparison: distance.Comparison) -> gates.Gate:
    return gates.from_comparison(gate_id, comparison, what=f"{kind.replace('_', ' ')}, float64")
