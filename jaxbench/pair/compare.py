"""Is a JAX model the same function as a PyTorch module? Compare in float64, module by module, then in narrower types.

    result = jaxbench.compare(jax_model, torch_module, (x,))
    print(result)                                      # equal, or the module where it starts and the likely cause
    jaxbench.assert_same_function(jax_model, torch_module, (x,))     # in a test

The gates, distances and blame are those of jaxbench/parity; weights are matched by pair/matching.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxbench.pair import proof
from jaxbench.pair.public_types import Pair, Result, checked


def compare(
    jax_side: Any, torch_module: Any, inputs: Any, names: Mapping[str, Any] | None = None, **options: Any
) -> Result:
    """Compare a JAX model with a PyTorch module on the same weights and inputs.

    Args:
      jax_side: a Flax NNX or Equinox module; a Linen module or (module, variables); a Haiku transformed function,
        alone or with params (and state); (function, params); or a function of the inputs alone.
      torch_module: any torch.nn.Module; it is copied, never changed.
      inputs: one array, or a tuple of arguments of both sides: numpy arrays and trees of them.
      names: overrides of the automatic weight matching: {JAX array: PyTorch tensor, Rule or function of all tensors},
        {PyTorch tensor: None} where JAX has none; and {JAX module: PyTorch module}.
      **options: the further fields of jaxbench.Pair.

    Raises:
      ValueError: weights without a counterpart, outputs that cannot be compared, an unknown value of an option.
      TypeError: an unknown option, or a jax_side of no known kind.
    """
    return proof.run(checked(Pair(jax_side, torch_module, inputs, names or {}, **options)))


def assert_same_function(
    jax_side: Any, torch_module: Any, inputs: Any, names: Mapping[str, Any] | None = None, **options: Any
) -> None:
    """Assert that two models are the same function; takes the arguments of `compare`.

    Raises:
      AssertionError: they differ; the message names the module where that starts, those to blame and the likely cause.
    """
    __tracebackhide__ = True
    result = compare(jax_side, torch_module, inputs, names, **options)
    if not result.passed:
        raise AssertionError(str(result))
