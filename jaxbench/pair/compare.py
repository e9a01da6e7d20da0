"""Is a JAX model the same function as a PyTorch module? In float64, module by module, then in the narrower types.

    result = jaxbench.compare(jax_model, torch_module, (x,))
    print(result)                                      # equal, or the module where it starts and the likely cause
    jaxbench.assert_same_function(jax_model, torch_module, (x,))     # in a test

The gates, distances and blame are those of jaxbench/parity; weights are matched by pair/matching.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxbench.pair.matching import Leaf, Matching
from jaxbench.pair.rules import Given, Rule
from jaxbench.parity import capture, distance, gates

TOLERANCE = distance.TOLERANCE_FLOAT64
TARGET_SEED = 0
WEIGHTS, MODES, DTYPES = ("torch", "jax", "own"), ("eval", "train"), ("float32", "bfloat16")


class Pair(NamedTuple):
    """Two models and how each is called; see `compare` for the fields."""

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
        from jaxbench.pair import report

        return report.text(self)


def compare(
    jax_side: Any, torch_module: Any, inputs: Any, names: Mapping[str, Any] | None = None, **options: Any
) -> Result:
    """Compare a JAX model with a PyTorch module on the same weights and inputs.

    Args:
      jax_side: a Flax NNX or Equinox module; a Linen module or (module, variables); a Haiku transformed function,
        alone or with params (and state); (function, params); or a function of the inputs alone.
      torch_module: any torch.nn.Module; it is copied, never changed.
      inputs: one array, or a tuple of arguments of both sides: numpy arrays and trees of them.
      names: what the weights' matching is told by hand: {JAX array: PyTorch tensor, Rule or function of all tensors},
        {PyTorch tensor: None} where JAX has none; and {JAX module: PyTorch module}.
      **options: see Pair's fields. weights: "torch" (JAX gets PyTorch's), "jax" (PyTorch gets JAX's) or "own" (both
        keep theirs, which are then compared too). jax_inputs: function of the inputs giving JAX's. jax_outputs,
        torch_outputs: functions that choose what is compared. jax_call: function of (model, *inputs). jax_modes:
        keyword arguments of the JAX call in {"eval": .., "train": ..}. per_example: the JAX model takes no batch axis.
        modes: eval, train or both (default: train too where the module has batch statistics). optimizers: an optax
        transformation and a function of the parameters giving a torch optimiser, run for num_steps. dtypes: narrower
        types, compared by their error against float64. quick: outputs, modules and causes only.

    Raises:
      ValueError: weights without a counterpart, outputs that cannot be compared, an unknown option's value.
      TypeError: an unknown option, or a jax_side of no known kind.
    """
    from jaxbench.pair import proof

    return proof.run(checked(Pair(jax_side, torch_module, inputs, names or {}, **options)))


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


def assert_same_function(
    jax_side: Any, torch_module: Any, inputs: Any, names: Mapping[str, Any] | None = None, **options: Any
) -> None:
    """Assert that two models are the same function; arguments as of `compare`.

    Raises:
      AssertionError: they are not; the message names the module where it starts, the one to blame and the likely cause.
    """
    __tracebackhide__ = True
    result = compare(jax_side, torch_module, inputs, names, **options)
    if not result.passed:
        raise AssertionError(str(result))


@contextlib.contextmanager
def precise(dtype: str) -> Iterator[None]:
    """Products of the highest precision on both sides, and JAX's 64-bit mode where the type needs it."""
    from jaxbench.parity.run import pinned

    with pinned(dtype):
        yield


def leaves_of(model: Any, calls: Mapping[str, capture.Call], *, with_values: bool) -> list[Leaf]:
    """Leaves of a JAX model, parameters before state, in the order in which their modules are called."""
    from jaxbench.pair.jax_model import REVERSED

    order: dict[str, int] = {}
    for name in calls:
        order.setdefault(name.partition("#")[0], len(order))
    sources, leaves = sources_of(calls), []
    for i, (name, x) in enumerate({**model.params, **model.state}.items()):
        path = name.partition(":")[2] or name
        value = np.asarray(x) if with_values else None
        is_reversed = path.rpartition(".")[2] in REVERSED and model.framework != "equinox"
        place = _place(path, order, i)
        is_state = name in model.state
        source = sources.get(path.rpartition(".")[0], "")
        leaves.append(Leaf(name, tuple(x.shape), place, is_reversed, value, source=source, is_optional=is_state))
    return leaves


def sources_of(calls: Mapping[str, capture.Call]) -> dict[str, str]:
    """Module whose output another reads as its first input, number for number; by the reader's name."""
    made: dict[bytes, str] = {}
    sources: dict[str, str] = {}
    for name, call in calls.items():
        if call.inputs:
            source = made.get(np.asarray(call.inputs[0]).tobytes())
            if source:
                sources.setdefault(name.partition("#")[0], source)
        made.setdefault(np.asarray(call.outputs[0]).tobytes(), name.partition("#")[0])
    return sources


def _place(name: str, order: Mapping[str, int], position: int) -> int:
    """Order of the innermost called module around a weight, then of definition."""
    parts = name.split(".")
    called = next((order[p] for p in (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)) if p in order), 0)
    return called * 100_000 + position
