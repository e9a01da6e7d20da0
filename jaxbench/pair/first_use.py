"""Find the order in which a JAX function first uses its parameters; dictionaries, sorted by key, do not tell it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

# Operations on a weight that do not count as its use, such as a transposition of all weights at the start.
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
    """Return indices of arrays in the order in which `function(arrays, *inputs)` first computes with them.

    Unused arrays come last. None where the function cannot be traced, for instance because it branches on values.
    """
    try:
        jaxpr = jax.make_jaxpr(lambda arrays: function(arrays, *inputs))(arrays).jaxpr
    except Exception:  # the caller's code may raise anything on abstract arrays; the comparison calls it with real ones
        return None
    origins = {var: i for i, var in enumerate(jaxpr.invars)}
    used = list(dict.fromkeys(_uses(jaxpr, origins)))
    return used + [i for i in range(len(arrays)) if i not in used]


def _uses(jaxpr: Any, origins: dict[Any, int]) -> Iterator[int]:
    """Yield indices of the arrays that a jaxpr computes with, in order; origins maps its variables to the indices."""
    for eqn in jaxpr.eqns:
        given = [None if isinstance(x, core.Literal) else origins.get(x) for x in eqn.invars]
        inner = next(programs(eqn, len(given)), None)
        if inner is not None:
            own = {var: i for var, i in zip(inner.invars, given, strict=True) if i is not None}
            yield from _uses(inner, own)
            pairs = zip(eqn.outvars, inner.outvars, strict=False)
            origins |= {var: own[x] for var, x in pairs if not isinstance(x, core.Literal) and x in own}
        elif eqn.primitive.name in LAYOUT and given[0] is not None:
            origins |= dict.fromkeys(eqn.outvars, given[0])
        else:
            yield from (i for i in given if i is not None)


def programs(eqn: Any, count: int) -> Iterator[Any]:
    """Yield an equation's inner jaxprs that take its operands: of jit, scan, checkpoint and custom derivatives."""
    for value in eqn.params.values():
        program = getattr(value, "jaxpr", value)
        if hasattr(program, "eqns") and len(program.invars) == count:
            yield program
