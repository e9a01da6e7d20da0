"""What the float64 gates need of one backend, gathered once and compared by gates.py (S file).

The mutation score compares one backend's evidence with that of many broken twins, so gathering and comparing are apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxbench.config import TransformerConfig
from jaxbench.parity import capture, cases, distance, gates
from jaxbench.parity.cases import Case
from jaxbench.step_config import OptimizerConfig, StepConfig

# Learning rate and decay are large, so that 20 steps move every parameter far above the tolerance.
LEARNING_RATE = 3e-3
ADAMW = OptimizerConfig(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, decay="all")
STEP = StepConfig(clip_norm=None, optimizer=ADAMW)
SAMPLING = {"temperature": 0.9, "top_k": 24, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1}
SEED = 7  # of dropout and sampling
NUM_SAMPLED = 32  # tokens drawn per row, if the context allows
NUM_BATCHES = 4  # distinct batches that the training steps go round


class Evidence(NamedTuple):
    """One backend's results in float64; None = not part of this run."""

    name: str
    trace: capture.Trace
    repeat: tuple[gates.Gate, dict[str, dict[str, float]]]  # gate P10, and how far each tensor was from itself
    decoding: capture.Decoding | None
    tokens: Any | None  # sampled tokens [B M]
    training: capture.Training | None


class Findings(NamedTuple):
    """Gates, and the comparisons behind them by kind."""

    gates: list[gates.Gate]
    comparisons: dict[str, Any]


def training_steps(case: Case, config: TransformerConfig) -> list[cases.Arrays]:
    """Return the data of every training step: NUM_BATCHES batches in turn, so that the loss falls."""
    return [cases.arrays(case, config, step=i % NUM_BATCHES) for i in range(case.steps)]


def gather(side: Any, case: Case, config: TransformerConfig, *, gradients: bool, is_quick: bool = False) -> Evidence:
    """Run one side; dropout is on in traces and training. Training comes last, because it moves PyTorch's weights."""
    arrays = cases.arrays(case, config)
    trace = side.trace(arrays, gradients=gradients, seed=SEED)
    # The second trace goes at once: with the default model's gradients it holds a gigabyte.
    repeat = gates.repeatability(trace, side.trace(arrays, gradients=gradients, seed=SEED), name=side.name)
    # Decoding continues one document a row, so a packed batch has none.
    decoding = None if case.packed or not case.prompt else side.decode(arrays, prompt=case.prompt)
    tokens = None
    if case.sampled and not is_quick:
        lengths = (case.prompt, case.prompt // 2)
        prompts = [row[: lengths[i % 2]].tolist() for i, row in enumerate(arrays.tokens)]
        count = min(NUM_SAMPLED, config.max_seq_len - case.prompt)
        tokens = side.sample(prompts, SAMPLING, max_new_tokens=count, seed=SEED)
    training = None
    if case.steps and not is_quick:
        training = side.train(training_steps(case, config), STEP, learning_rate=LEARNING_RATE, seed=SEED)
    return Evidence(side.name, trace, repeat, decoding, tokens, training)


def judge(found: Evidence, reference: Evidence) -> Findings:
    """Compare two backends' evidence: gates P1, P6, P7, P8 and P10 in float64."""
    losses = [{"loss": each.trace.loss} for each in (found, reference)]
    rows, comparisons = [], {"loss": distance.compare(*losses, kind="loss")}
    for kind in ("outputs", "output_gradients", "gradients"):
        values, wanted = getattr(found.trace, kind), getattr(reference.trace, kind)
        if not values:
            continue
        if kind != "gradients":
            # A scanned or closed model shows only its logits.
            wanted = wanted if len(values) > 1 else {name: wanted[name] for name in values}
        widths = [widen.get(kind, {}) for _, widen in (found.repeat, reference.repeat)]
        widen = {name: sum(width.get(name, 0.0) for width in widths) for name in wanted}
        comparisons[kind] = distance.compare(values, wanted, kind=kind, widen=widen)
    rows += [_gate("P1", kind, comparison) for kind, comparison in comparisons.items()]
    if found.training and reference.training:
        trained = _training(found.training, reference.training)
        comparisons |= trained
        rows += [_gate("P7" if kind == "training_curve" else "P1", kind, value) for kind, value in trained.items()]
    if found.tokens is not None and reference.tokens is not None:
        rows.append(gates.sampling({found.name: found.tokens, reference.name: reference.tokens}))
    if found.decoding and reference.decoding:
        both, tolerance = (found.decoding, reference.decoding), distance.TOLERANCE_FLOAT64
        rows += gates.decoding(*both, names=(found.name, reference.name), tolerance=tolerance)
    return Findings([*rows, found.repeat[0], reference.repeat[0]], comparisons)


def _training(found: capture.Training, reference: capture.Training) -> dict[str, distance.Comparison]:
    curves = [{f"loss {i}": loss for i, loss in enumerate(each.losses)} for each in (found, reference)]
    comparisons = {"training_curve": distance.compare(*curves, kind="training curve")}
    for kind, wanted in reference.arrays.items():
        key = f"{kind}_after_{len(reference.losses)}_steps"
        comparisons[key] = distance.compare(found.arrays[kind], wanted, kind=key)
    return comparisons


def _gate(gate_id: str, kind: str, comparison: distance.Comparison) -> gates.Gate:
    return gates.from_comparison(gate_id, comparison, what=f"{kind.replace('_', ' ')}, float64")
