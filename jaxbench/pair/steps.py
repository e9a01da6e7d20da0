"""Compare optimiser steps: losses, parameters, and what the steps add to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxbench.pair.jax_model import calling
from jaxbench.pair.torch_side import calling_torch
from jaxbench.parity import distance

TOLERANCE_UPDATES = 1e-6  # relative, of what the steps add to a parameter: Adam amplifies rounding of small gradients
ZERO = 1e-9  # norm of a gradient, relative to the RMS of all, under which it is rounding, such as a key bias's
ROUNDINGS = 4  # epsilons of a parameter that a step may round, in its update


def compare(work: Any, terms: tuple, to_targets: Callable[[tuple], tuple], *, is_training: bool) -> None:
    """Gates P7 and P1 for optimiser steps on one batch: losses; parameters after the last step, and their updates.

    Args:
      work: the running proof (proof._Work), which records gates and notes.
      terms: of the objective.
      to_targets: arranges JAX's outputs as PyTorch's.
      is_training: training mode.
    """
    if not work.trained():
        work.notes.append("optimiser steps were not compared: PyTorch trains no parameter")
        return
    transformation, optimizer = work.pair.optimizers
    num_steps = work.pair.num_steps
    options = {"num_steps": num_steps, "is_training": is_training}
    with calling_torch("optimizers: PyTorch's steps fail"):
        wanted_losses, wanted = work.twin.steps(work.inputs, terms, optimizer, **options)
    trained = work.trained_arrays()
    with calling("optimizers: the JAX side's steps fail"):
        losses, params = work.side.steps(
            work.tensors, trained, work.inputs, terms, transformation, to_targets=to_targets, **options
        )
    work.compare("losses of optimiser steps", numbered("step", losses), numbered("step", wanted_losses), gate="P7")
    made, before = (
        {name: np.asarray(x) for name, x in work.matching.to_jax(tensors).items() if name in params}
        for tensors in (wanted, work.tensors)
    )
    if work.compare(f"parameters after {num_steps} steps", params, made) is None:
        work.record(_updates(work, params, made, before))


def _updates(work: Any, params: Mapping[str, Any], made: Mapping[str, Any], before: Mapping[str, Any]) -> Any:
    """Compare what the steps add, beside which parameters may be large; not where the gradient is only rounding."""
    norms = {name: float(np.linalg.norm(work.gradients[name])) for name in work.trained()}
    zero = ZERO * float(np.sqrt(np.mean(np.square(list(norms.values())))))
    entries = []
    for name, x in made.items():
        if all(norms.get(source, 0.0) <= zero for source in work.sources(name)):
            continue
        update, mine = x - before[name], params[name] - before[name]
        rounding = ROUNDINGS * work.pair.num_steps * np.finfo(float).eps * np.linalg.norm(x)
        allowed = TOLERANCE_UPDATES + rounding / max(np.linalg.norm(update), np.finfo(float).tiny)
        entries.append(distance.Entry(name, distance.relative_error(mine, update), float(allowed)))
    return distance.Comparison(f"updates of {work.pair.num_steps} steps", tuple(entries))


def numbered(name: str, values: Any) -> dict[str, Any]:
    """Return values by name and number."""
    return {f"{name} {i}": value for i, value in enumerate(values)}
