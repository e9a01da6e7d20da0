"""What a pair of models is, and what a comparison of one returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxbench.pair import report
from jaxbench.pair.matching import Matching
from jaxbench.pair.rules import Given, Rule
from jaxbench.parity import capture, gates

WEIGHTS, MODES, DTYPES = ("torch", "jax", "own"), ("eval", "train"), ("float32", "bfloat16")


class Pair(NamedTuple):
    """Two models and how each is called; see compare.compare for the fields."""

    jax_side: Any
    torch_module: Any
    inputs: Any  # a tuple of arguments, or the only one
    names: Mapping[str, str | Rule | Given | None] = {}
    weights: str = "torch"
    jax_inputs: Callable[..., tuple] | None = None
    jax_outputs: Callable[[Any], Any] | None = None
    torch_outputs: Callable[[Any], Any] | None = None
    jax_call: Callable[..., Any] | None = None
    jax_modes: Mapping[str, Mapping[str, Any]] = {}
    per_example: bool = False
    modes: tuple[str, ...] | None = None
    optimizers: tuple[Any, Callable[[Any], Any]] | None = None
    num_steps: int = 5
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    quick: bool = False


class Result(NamedTuple):
    """What was compared, and where the two differ."""

    gates: tuple[gates.Gate, ...]
    weights: Matching
    modules: dict[str, str]  # PyTorch's call by JAX's, of those compared
    comparisons: dict[str, Any]  # distances by kind
    framework: str  # of the JAX side
    local: tuple[capture.Local, ...]  # every module's own error, given the twin's inputs
    blamed: tuple[capture.Local, ...]  # those that compute something else by themselves, in order of computation
    starts: str | None  # first module, in order of computation, whose output differs
    causes: dict[str, str]  # likely causes in words by module, of those that a known kind of bug explains
    notes: tuple[str, ...]  # what was not compared, and why

    @property
    def passed(self) -> bool:
        """True where every gate passed."""
        return all(gate.passed for gate in self.gates)

    def __str__(self) -> str:
        """Verdict in a few lines."""
        return report.text(self)


def checked(pair: Pair) -> Pair:
    """The pair itself, its plain settings checked and its inputs as a tuple.

    Raises:
      ValueError: a setting has no such value.
      TypeError: torch_module is not a torch.nn.Module.
    """
    import torch

    if not isinstance(pair.torch_module, torch.nn.Module):
        raise TypeError(f"torch_module={type(pair.torch_module).__name__}: not a torch.nn.Module")
    for field, known in (("weights", WEIGHTS), ("modes", MODES), ("dtypes", DTYPES)):
        value = getattr(pair, field)
        wrong = set((value,) if isinstance(value, str) else value or ()) - set(known)
        if wrong:
            raise ValueError(f"{field}={value!r}: wanted {', '.join(known)}")
    if pair.num_steps < 1:
        raise ValueError(f"num_steps={pair.num_steps}: wanted 1 or more")
    return pair._replace(inputs=pair.inputs if isinstance(pair.inputs, tuple) else (pair.inputs,))
