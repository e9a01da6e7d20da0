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
    """Two models and how each is called."""

    jax_side: Any  # a model of NNX, Linen, Equinox or Haiku, or a function; with its parameters or alone
    torch_module: Any  # any torch.nn.Module; it is copied, never changed
    inputs: Any  # a tuple (or list) of arguments of both sides, or the only one: numpy arrays and trees of them
    # What the weights' matching is told by hand: {JAX array: PyTorch tensor, Rule or function of all tensors}, {PyTorch
    # tensor: None} where JAX has none; and {JAX module or tap: PyTorch module}
    names: Mapping[str, str | Rule | Given | None] = {}
    weights: str = "torch"  # JAX gets PyTorch's; "jax": PyTorch gets JAX's; "own": compared, functions on PyTorch's
    jax_inputs: Callable[..., tuple] | None = None  # function of the inputs that gives JAX's own
    jax_outputs: Callable[[Any], Any] | None = None  # function of the outputs that chooses what is compared
    torch_outputs: Callable[[Any], Any] | None = None  # likewise
    jax_call: Callable[..., Any] | None = None  # function of (model, *inputs), for models that are not simply called
    jax_modes: Mapping[str, Mapping[str, Any]] = {}  # keyword arguments of the JAX call in "eval" and "train"
    per_example: bool = False  # the JAX model takes no batch axis
    modes: tuple[str, ...] | None = None  # eval, train or both; None = train too where there are batch statistics
    optimizers: tuple[Any, Callable[[Any], Any]] | None = None  # of optax, and parameters -> one of PyTorch
    num_steps: int = 5  # of the optimisers
    dtypes: tuple[str, ...] = ("float32", "bfloat16")  # narrower types, compared by their error against float64
    disturb: bool = True  # give tensors of one value in every place, such as a fresh norm's, random ones; in copies
    widen: bool = False  # in float64, casts to narrower types inside the models become casts to float64, on both sides
    quick: bool = False  # outputs, modules and causes only


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
    """A tuple of what may be given as the only one; None stays."""
    return value if value is None else (value,) if isinstance(value, str) else tuple(value)
