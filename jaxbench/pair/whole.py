"""Decide what differing modules mean for the verdict where the whole functions agree: the whole function counts."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxbench.pair import draws, kept_state, placing
from jaxbench.pair.jax_model import calling
from jaxbench.pair.module_findings import ModuleFindings
from jaxbench.pair.rules import Read
from jaxbench.pair.torch_side import Run

NUM_DRAWS = 2  # further draws of weights and inputs where modules differ but the whole functions agree
MEANT = "outputs agree all the same: a module that is meant to differ is left out with names={'its.name': None}"


def judge(work: Any) -> None:
    """Drop the modules' gates if the whole functions agree and the surrounding modules undo what differs inside.

    The whole functions are first compared on further weights and inputs, to find bugs that cancel on the given ones. A
    module whose difference is not undone but only hidden by what follows stays to blame.

    Args:
      work: the running proof (proof._Work), after all its float64 gates.
    """
    _judge(work, work.findings)
    work.notes += work.findings.apart_note()


def _judge(work: Any, findings: ModuleFindings) -> None:
    of_whole = lambda: [gate for gate in work.gates if gate.what not in findings.gates]
    if all(gate.passed for gate in of_whole()):
        if not findings.blamed and not findings.apart and all(gate.passed for gate in work.gates):
            return
        seeds = range(1, 1 + (NUM_DRAWS if findings.blamed else 1))
        num_draws = 1 + sum(_drawn_again(work, seed) for seed in seeds)
        is_same = all(gate.passed for gate in of_whole())
        if is_same and not findings.is_taken_back():
            work.notes.append(MEANT)
            return
        if is_same and (num_draws > 1 or not findings.blamed):
            work.gates = [gate for gate in work.gates if gate.passed]
            work.notes += findings.forgive(num_draws, "outputs" if work.pair.quick else "outputs and gradients")
            return
    findings.blame_apart()


def _drawn_again(work: Any, seed: int) -> bool:
    """Compare the whole functions on other weights and inputs; False if PyTorch gives no usable outputs there."""
    read = Read(work.tensors)
    work.matching.to_jax(read)
    names = sorted(read.names & dict(work.twin.module.named_parameters()).keys())
    if not work.pair.disturb:
        names = [name for name in names if np.ptp(np.abs(work.tensors[name])) > 0]
    drawn = draws.weights(work.tensors, names, seed)
    work.twin.load(drawn)
    try:
        for mode in work.compared_modes:
            shuffled, drawn_inputs = (draws.inputs(work.inputs, seed, is_shuffled=each) for each in (True, False))
            for inputs in (shuffled, drawn_inputs, work.inputs):
                if (reference := _finite_run(work, inputs, mode)) is not None:
                    break
            else:
                return False
            _compare(work, drawn, inputs, reference, mode, f"{mode}, draw {seed + 1}")
    finally:
        work.twin.load(work.tensors)
    return True


def _finite_run(work: Any, inputs: tuple, mode: str) -> Run | None:
    """Call PyTorch; None if that fails, or if its outputs have other shapes or more non-finite values than before."""
    try:
        run = work.twin.run(inputs, is_training=mode == "train")
    except Exception:  # a module may raise anything on inputs that it does not accept
        return None
    before = work.reference[mode].outputs
    is_alike = [y.shape for y in run.outputs.floating] == [y.shape for y in before.floating]
    return run if is_alike and placing.count_not_finite(run.outputs) <= placing.count_not_finite(before) else None


def _compare(work: Any, drawn: dict[str, np.ndarray], inputs: tuple, reference: Run, mode: str, kind: str) -> None:
    placed = work.placed[mode]
    to_targets = lambda values: tuple(each.fit.apply(values[each.index]) for each in placed)
    with calling("the JAX model cannot be called on other weights and inputs"):
        mine = work.side.watched(drawn, inputs, is_training=mode == "train")
    work.compare_outputs(mine.outputs.floating, reference, kind)
    work.gates += placing.exact_gates(work.exact[mode], mine.outputs, reference.outputs, kind)
    kept_state.compare(work, mine.state, reference, kind, drawn)
    if not work.pair.quick:
        terms = draws.terms(reference.outputs.floating, inputs)
        work.compare_gradients(drawn, inputs, terms, to_targets, reference, kind)
