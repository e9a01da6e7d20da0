"""Compare the state that both models keep between calls: batch statistics, caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxbench.pair import causes
from jaxbench.pair.matching import Matching
from jaxbench.pair.rules import Read, Rule
from jaxbench.parity.capture import ROOT


def compare(work: Any, state: Mapping[str, Any], reference: Any, kind: str, tensors: Mapping[str, np.ndarray]) -> None:
    """Compare the state after a call: always in training mode, and in evaluation mode if either side changes it.

    Args:
      work: the running proof (proof._Work), which records gates, notes and causes.
      state: state of the JAX side after the call.
      reference: PyTorch's call.
      kind: the mode, optionally followed by a comma and further words.
      tensors: PyTorch's parameters and buffers before the call.
    """
    if not work.model.state:
        return
    mode, rules = kind.partition(",")[0], work.matching.rules
    same = {n: x for n, x in reference.buffers.items() if n in tensors and x.shape == tensors[n].shape}
    grown = sorted(reference.buffers.keys() & tensors.keys() - same.keys())
    if grown:
        work.notes.append(f"buffers whose shape a call changes were not compared: {', '.join(grown)}")
    left = {n for n, rule in rules.items() if isinstance(rule, Rule) and {*rule.sources} & {*grown}}
    after, before = (
        {n: np.asarray(x) for n, x in work.matching.to_jax(each).items() if n in work.model.state and n not in left}
        for each in ({**tensors, **same}, tensors)
    )
    mine = {n: np.asarray(state[n]) for n in after}
    is_moved = any(not _equal(before[n], after[n]) or not _equal(before[n], mine[n]) for n in after)
    if (mode == "train" or is_moved) and work.compare(f"state after a call, {kind}", mine, after, has_floor=False):
        words = causes.of_state(mine, after, before, _counts(list(after), rules, reference))
        work.causes |= {"state": words} if words and mode == "train" else {}


def unseen(tensors: Mapping[str, np.ndarray], reference: Any, matching: Matching) -> list[str]:
    """Return a note on floating buffers that a call of PyTorch changes and from which no JAX array is made."""
    read = Read(tensors)
    matching.to_jax(read)
    moved = [n for n, x in reference.buffers.items() if n in tensors and not _equal(x, tensors[n])]
    names = ", ".join(n for n in moved if n not in read.names)
    return [f"buffers that PyTorch moves and the JAX model lacks were not compared: {names}"] if names else []


def _counts(names: list[str], rules: Mapping[str, Any], reference: Any) -> dict[str, int]:
    """Return how many values each batch statistic is taken over: those of one channel of the module's input."""
    inputs = {call.module: call.call.inputs[0] for call in reference.calls.values() if call.call.inputs}
    made = {name: rules[name] for name in names if isinstance(rules[name], Rule)}
    modules = {name: rule.sources[0].rpartition(".")[0] or ROOT for name, rule in made.items()}
    return {name: inputs[m].size // inputs[m].shape[1] for name, m in modules.items() if m in inputs}


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    return bool(np.array_equal(x, y, equal_nan=True))
