"""Choose the modes in which a pair is compared: training too where either side computes something else there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from jaxbench.pair import placing
from jaxbench.pair.pair_file import first_line
from jaxbench.pair.torch_side import Run, TorchSide
from jaxbench.parity import distance

STATISTICS = (torch.nn.modules.batchnorm._NormBase,)
DROPOUT = (torch.nn.modules.dropout._DropoutNd,)
BOTH = ("eval", "train")


def to_compare(
    twin: TorchSide, inputs: tuple, reference: Run, run_jax: Callable[[bool], Any], *, is_given: bool
) -> tuple[tuple[str, ...], list[str]]:
    """Return the modes, and notes on why training is not among them though PyTorch computes something else there.

    Args:
      twin: the PyTorch side.
      inputs: of both sides.
      reference: PyTorch's call in evaluation mode.
      run_jax: function of is_training that calls the JAX side (jax_side.Watched).
      is_given: the caller says how the JAX side is called in training: then it has that mode, and one in which it does
        what it does in evaluation is a slip.
    """
    modules = list(twin.module.modules())
    active = [m for m in modules if isinstance(m, DROPOUT) and m.p > 0]
    if active:
        note = f"training mode was not compared: dropout p={active[0].p} in {len(active)} modules draws at random"
        return ("eval",), [f"{note}; set it to 0 on both sides"]
    if any(isinstance(m, STATISTICS) and m.track_running_stats for m in modules):
        return BOTH, []
    because = _why_not(twin, inputs, reference, run_jax, is_given=is_given)
    if because is None:
        return BOTH, []
    return ("eval",), [f"training mode was not compared: {because}"] if because else []


def _why_not(
    twin: TorchSide, inputs: tuple, reference: Run, run_jax: Callable[[bool], Any], *, is_given: bool
) -> str | None:
    """Return why training mode cannot be compared; empty where it equals evaluation mode, None where it can be."""
    try:
        trained, again = (twin.run(inputs, is_training=True) for _ in range(2))
    except Exception as error:  # a module that needs more than its inputs may raise anything
        return f"the PyTorch module cannot be called in it ({type(error).__name__}: {first_line(error)})"
    differs = _differs(trained, reference)
    if not differs:
        return None if _differs_in_jax(run_jax) else ""
    if _differs(trained, again):
        return "the PyTorch module draws at random there, such as by F.dropout"
    says = f"PyTorch's {differs} there are others than in evaluation mode"
    try:
        before, after = (run_jax(is_training) for is_training in (False, True))
        placing.as_torch(after.outputs, trained.outputs)
    except Exception as error:
        return f"{says}, and those of JAX are not alike ({type(error).__name__}: {first_line(error)})"
    is_same_state = all(np.array_equal(x, before.state[name], equal_nan=True) for name, x in after.state.items())
    if not is_given and is_same_state and not placing.differ(before.outputs.floating, after.outputs.floating):
        return f"{says}, JAX's are the same; modes=('eval', 'train') compares them"
    return None


def _differs_in_jax(run_jax: Callable[[bool], Any]) -> bool:
    """True if the JAX side computes something else in training mode, such as dropout that PyTorch lacks."""
    try:
        before, after = (run_jax(is_training) for is_training in (False, True))
    except Exception:  # no training mode, or it needs more than its inputs there: training is not compared
        return False
    return placing.differ(before.outputs.floating, after.outputs.floating)


def _differs(run: Run, other: Run) -> str:
    """Return what differs between two calls: "outputs" or the names of buffers; empty where nothing does."""
    if placing.differ(run.outputs.floating, other.outputs.floating):
        return "outputs"
    moved = [
        name for name, x in run.buffers.items()
        if name not in other.buffers or distance.relative_error(x, other.buffers[name]) > distance.TOLERANCE_FLOAT64
    ]  # fmt: skip
    return f"buffers ({', '.join(moved[:3])})" if moved else ""
