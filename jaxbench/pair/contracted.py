"""Find along which axes a JAX model multiplies its arrays: `x @ w` stores [in, out], `x @ w.T` [out, in].

The name of an array that belongs to no known layer, such as `wq`, does not tell how it is stored; its use does.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

from jaxbench.pair.first_use import programs

Axes = tuple[int, ...]  # axis of the model's array that each axis of a value is
KEEPING = frozenset(("convert_element_type", "copy", "reduce_precision", "stop_gradient", "optimization_barrier"))
SLICES = frozenset(("slice", "dynamic_slice"))


def is_reversed(function: Callable[..., Any], arrays: list[Any]) -> dict[int, bool]:
    """Return, by an array's index, whether `function(arrays)` has it as [*window, in, out] and not [out, in, *window].

    The most of those in matrix products decide for all of them, so that one transposed by mistake is not taken as
    meant, and the most of those in convolutions for theirs. Arrays that are in none are omitted, and those multiplied
    along axes that are neither the first nor the last. Empty where the function cannot be traced.
    """
    try:
        jaxpr = jax.make_jaxpr(function)(arrays).jaxpr
    except Exception:  # the caller's code may raise anything on abstract arrays; the comparison calls it with real ones
        return {}
    origins = {var: (i, tuple(range(var.aval.ndim))) for i, var in enumerate(jaxpr.invars)}
    found: dict[int, tuple[str, bool]] = {}
    for index, operation, is_so in _products(jaxpr, origins):
        found.setdefault(index, (operation, is_so))
    votes = collections.defaultdict(list)
    for operation, is_so in found.values():
        votes[operation].append(is_so)
    return {i: 2 * sum(votes[operation]) >= len(votes[operation]) for i, (operation, _) in found.items()}


def _products(jaxpr: Any, origins: dict[Any, tuple[int, Axes]]) -> Iterator[tuple[int, str, bool]]:
    """Yield (array, operation, whether stored [in, out]) at every product; origins maps variables to array and axes."""
    for eqn in jaxpr.eqns:
        given = [None if isinstance(x, core.Literal) else origins.get(x) for x in eqn.invars]
        if not any(given):
            continue
        inner = next(programs(eqn, len(given)), None)
        if inner is not None:
            own = {var: x for var, x in zip(inner.invars, map(_entered(eqn), given, range(len(given)))) if x}
            yield from _products(inner, own)
            if eqn.primitive.name != "scan":  # whose results are stacked
                pairs = zip(eqn.outvars, inner.outvars, strict=False)
                origins |= {var: own[x] for var, x in pairs if not isinstance(x, core.Literal) and x in own}
        elif eqn.primitive.name == "dot_general":
            for each, axes, batch in zip(given, *eqn.params["dimension_numbers"], strict=True):
                yield from _of_product(each, axes, batch)
        elif eqn.primitive.name == "conv_general_dilated" and given[1]:
            out_axis, in_axis = eqn.params["dimension_numbers"].rhs_spec[:2]
            last, places = len(given[1][1]) - 1, (given[1][1][out_axis], given[1][1][in_axis])
            if places in ((last, last - 1), (0, 1)):
                yield given[1][0], eqn.primitive.name, places[0] == last
        else:
            axes = _kept(eqn, given)
            if axes is not None:
                origins |= dict.fromkeys(eqn.outvars, axes)


def _entered(eqn: Any) -> Callable[[tuple[int, Axes] | None, int], tuple[int, Axes] | None]:
    """Return what an operand is inside an equation's program: one layer of what scan goes through."""
    first = eqn.params["num_consts"] + eqn.params["num_carry"] if eqn.primitive.name == "scan" else None
    return lambda x, place: (x[0], x[1][1:]) if x and first is not None and place >= first else x


def _of_product(
    origin: tuple[int, Axes] | None, contracted: tuple[int, ...], batch: tuple[int, ...]
) -> Iterator[tuple[int, str, bool]]:
    """Yield whether a product over these axes of a value makes its array's first axes, of one expert, its inputs."""
    if origin is None or len(contracted) + len(batch) == len(origin[1]):
        return
    index, axes = origin
    summed = sorted(axes[axis] for axis in contracted)
    order = sorted(axis for i, axis in enumerate(axes) if i not in batch)
    if summed in (order[: len(summed)], order[-len(summed) :]):
        yield index, "dot_general", summed == order[: len(summed)]


def _kept(eqn: Any, given: list[tuple[int, Axes] | None]) -> tuple[int, Axes] | None:
    """Return what an operation makes of the first array among its operands; None where its axes are lost."""
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    place = next(i for i, x in enumerate(given) if x)
    (index, axes), before = given[place], eqn.invars[place].aval.shape
    if name == "transpose":
        return index, tuple(axes[axis] for axis in eqn.params["permutation"])
    if name == "squeeze":
        return index, tuple(axis for i, axis in enumerate(axes) if i not in eqn.params["dimensions"])
    if name in SLICES and place == 0 and len(shape) == len(axes):
        return index, axes
    # Arithmetic element by element, such as a norm of the weights.
    is_whole = name in KEEPING or (shape == before and len(shape) > 1 and len(eqn.outvars) == 1)
    return (index, axes) if is_whole and shape == before and name not in ("rev", "sort", "cumsum") else None
