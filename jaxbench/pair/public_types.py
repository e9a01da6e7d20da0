"""Public types: a pair of models, and the result of comparing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxbench.pair import report
from jaxbench.pair.matching import Matching
from jaxbench.pair.rules import Given, Rule
from jaxbench.parity import capture, gates

WEIGHTS, MODES, DTYPES = ("torch", "jax", "own"), ("eval", "train"), ("float32", "bfloat16")


class Pair(NamedTuple):
    """Two models and how each is called."""

    jax_side: Any  # an NNX, Linen, Equinox or Haiku model, or a function; alone or in a tuple with its parameters
    torch_module: Any  # any torch.nn.Module; it is copied, never changed
    inputs: Any  # arguments of both sides: a tuple (or list), or the only one; numpy arrays and trees of them
    # Overrides of the automatic weight matching: {JAX array: PyTorch tensor, Rule or function of all tensors}, {PyTorch
    # tensor: None} where JAX has none; and {JAX module or tap: PyTorch module}
    names: Mapping[str, str | Rule | Given | None] = {}
    weights: str = "torch"  # JAX gets PyTorch's; "jax": PyTorch gets JAX's; "own": compare both, then run on PyTorch's
    jax_inputs: Callable[..., tuple] | None = None  # (*inputs) -> the JAX side's inputs, where they differ
    jax_outputs: Callable[[Any], Any] | None = None  # outputs of the JAX side -> what is compared
    torch_outputs: Callable[[Any], Any] | None = None  # the same for the PyTorch side
    jax_call: Callable[..., Any] | None = None  # (model, *inputs) -> outputs, for models not called as model(*inputs)
    jax_modes: Mapping[str, Mapping[str, Any]] = {}  # keyword arguments of the JAX call in "eval" and "train"
    per_example: bool = False  # the JAX model takes no batch axis
    modes: tuple[str, ...] | None = None  # eval, train or both; None = eval, and train if it differs and is comparable
    optimizers: tuple[Any, Callable[[Any], Any]] | None = None  # (optax's, parameters -> torch.optim's)
    num_steps: int = 5  # optimiser steps to compare
    dtypes: tuple[str, ...] = ("float32", "bfloat16")  # narrower types, compared by their error against float64
    disturb: bool = True  # replace constant tensors, such as a fresh norm's ones, by random values; in copies only
    widen: bool = False  # in float64, casts to narrower types inside the models become casts to float64, on both sides
    quick: bool = False  # outputs, modules and causes only


class Result(NamedTuple):
    """Result of a comparison: what was compared, and where the two sides differ."""

    gates: tuple[gates.Gate, ...]
    weights: Matching
    modules: dict[str, str]  # JAX call -> PyTorch call, of the modules compared
    comparisons: dict[str, Any]  # distances by kind
    framework: str  # of the JAX side
    local: tuple[capture.LocalError, ...]  # every module's own error, given the inputs of its PyTorch twin
    blamed: tuple[capture.LocalError, ...]  # modules that differ even on the twin's inputs, in order of computation
    starts: str | None  # first module, in order of computation, whose output differs
    causes: dict[str, str]  # module -> likely cause in words, where a known kind of bug explains the difference
    notes: tuple[str, ...]  # what was not compared, and why

    @property
    def passed(self) -> bool:
        """True if every gate passed."""
        return all(gate.passed for gate in self.gates)

    def __str__(self) -> str:
        """Return the verdict in a few lines."""
        return report.text(self)


def checked(pair: Pair) -> Pair:
    """Check the plain settings of a pair and return it with its inputs as a tuple.

    Raises:
      ValueError: a setting has an unknown or invalid value.
      TypeError: torch_module is not a torch.nn.Module.
    """
    import torch

    if not isinstance(pair.torch_module, torch.nn.Module):
        raise TypeError(f"torch_module={type(pair.torch_module).__name__}: not a torch.nn.Module")
    modes, dtypes = (_several(getattr(pair, field)) for field in ("modes", "dtypes"))
    given = {"weights": (pair.weights,), "modes": modes or (), "dtypes": dtypes or (), "jax_modes": pair.jax_modes}
    for field, known in (("weights", WEIGHTS), ("modes", MODES), ("dtypes", DTYPES), ("jax_modes", MODES)):
        if wrong := [value for value in given[field] if value not in known]:
            raise ValueError(f"{field}={getattr(pair, field)!r}: {wrong[0]!r} is none of {', '.join(known)}")
    if modes == ():
        raise ValueError(f"modes={pair.modes!r}: wanted {', '.join(MODES)}, or None")
    if pair.num_steps < 1:
        raise ValueError(f"num_steps={pair.num_steps}: wanted 1 or more")
    inputs = tuple(pair.inputs) if isinstance(pair.inputs, tuple | list) else (pair.inputs,)
    return pair._replace(inputs=inputs, modes=modes, dtypes=dtypes or ())


def _several(value: Any) -> tuple | None:
    """Return a lone string or a sequence as a tuple; None stays None."""
    return value if value is None else (value,) if isinstance(value, str) else tuple(value)
