"""In which order a JAX function first uses its parameters, which dictionaries, sorted by key, do not say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

# What a weight goes through before it is used, such as a transposition of all of them at the start.
LAYOUT = frozenset(
    (
        "transpose",
        "convert_element_type",
        "reshape",
        "broadcast_in_dim",
        "squeeze",
        "expand_dims",
        "copy",
        "slice",
        "rev",
    )
)


def first_uses(function: Callable[..., Any], arrays: list[Any], *inputs: Any) -> list[int] | None:
    """Places of arrays in the order in which `function(arrays, *inputs)` computes with them first, unused ones last.

    None where the function cannot be traced by its arrays, as where it branches on their values.
    """
    try:
        jaxpr = jax.make_jaxpr(lambda arrays: function(arrays, *inputs))(arrays).jaxpr
    except Exception:  # whatever a caller's code raises on abstract arrays; the comparison calls it with real ones
        return None
    origins = {var: i for i, var in enumerate(jaxpr.invars)}
    used = list(dict.fromkeys(_uses(jaxpr, origins)))
    return used + [i for i in range(len(arrays)) if i not in used]


def _uses(jaxpr: Any, origins: dict[Any, int]) -> Iterator[int]:
    """Places of the arrays that a program computes with, as it does; origins are the arrays' variables in it."""
    for eqn in jaxpr.eqns:
        given = [None if isinstance(x, core.Literal) else origins.get(x) for x in eqn.invars]
        inner = next(_programs(eqn, len(given)), None)
        if inner is not None:
            own = {var: i for var, i in zip(inner.invars, given, strict=True) if i is not None}
            yield from _uses(inner, own)
            pairs = zip(eqn.outvars, inner.outvars, strict=False)
            origins |= {var: own[x] for var, x in pairs if not isinstance(x, core.Literal) and x in own}
        elif eqn.primitive.name in LAYOUT and given[0] is not None:
            origins |= dict.fromkeys(eqn.outvars, given[0])
        else:
            yield from (i for i in given if i is not None)


def _programs(eqn: Any, count: int) -> Iterator[Any]:
    """Programs inside an operation that take what it takes: those of jit, scan, checkpoint and custom derivatives."""
    for value in eqn.params.values():
        program = getattr(value, "jaxpr", value)
        if hasattr(program, "eqns") and len(program.invars) == count:
            yield program
