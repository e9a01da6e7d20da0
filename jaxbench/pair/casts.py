"""Tell whether an error comes from a cast to a narrower type: by its size, and by whether rounding explains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from jaxbench.pair import alignment
from jaxbench.pair.torch_side import TorchCall, as_type, is_floating_tensor
from jaxbench.parity import distance
from jaxbench.parity.capture import map_floating

SHARE, EXCESS = 30.0, 1.5  # a cast in part of the module errs less than the twin, all of it in that type
TYPES = (torch.float32, torch.float16, torch.bfloat16)
MIN_EXPLAINED = 0.3  # share of the error that roundings of weights, inputs and output explain, beyond chance
MAX_PARTS = 12  # weights that are rounded one by one
PER_PART = 4  # elements of the error per rounded part, at least
MAX_BIAS = 4.0  # standard deviations by which the sum of an unbiased error may differ from 0
MIN_SPREAD = MAX_BIAS**2  # elements over which it is spread, at least: the sum of fewer tells nothing
# For a type set in the model itself: Flax modules compute in `dtype`, which nnx.Embed takes from its parameters.
ADVICE = (
    "; where that is the model's own type, build it for the comparison with dtype=jnp.float64 (or dtype=None where the "
    "module then takes its inputs' type, as nnx.Linear), because no model that casts can be equal in float64"
    "; widen=True takes every cast on both sides as one to float64"
)
Change = Callable[[torch.nn.Module], None]
Called = Callable[[TorchCall, Change], list[np.ndarray]]  # outputs of the changed module, in the type of its arguments


def named(
    called: Called, module: torch.nn.Module, call: TorchCall, wanted: Sequence[np.ndarray],
    error: float, types: set[str],
) -> str:  # fmt: skip
    """Describe the cast that explains an error; empty where none does.

    Args:
      called: returns the module's tensors after a change to it, on a call's arguments.
      module: PyTorch's.
      call: its arguments.
      wanted: JAX's tensors.
      error: relative error of JAX's tensors.
      types: dtype names of JAX's tensors: a narrow one proves a cast.
    """
    exact = called(call, lambda m: None)
    miss = _difference(wanted, wanted, exact)
    if miss is None:
        return ""
    best, found = -np.inf, ""
    for dtype in TYPES:
        name = str(dtype).removeprefix("torch.")
        narrow = lambda x, dtype=dtype: as_type(x, dtype)

        def narrow_weights(m: torch.nn.Module, narrow: Callable = narrow) -> None:
            m._apply(narrow)

        try:
            whole = called(_with(call, narrow), narrow_weights)
            own = _difference(wanted, whole, exact)
        except RuntimeError:  # an operation does not support the type
            continue
        size = 0.0 if own is None else float(np.linalg.norm(own) / max(np.linalg.norm(miss), np.finfo(float).tiny))
        if own is None or not 1 / EXCESS <= size <= SHARE:
            continue
        is_seen = name in types or all(np.array_equal(_rounded(x, dtype), x) for x in wanted)
        parts = [] if is_seen else list(_parts(called, module, call, exact, wanted, dtype))
        share = 1.0 if is_seen else _explained(miss, own, parts)
        if dtype == torch.float32 and _is_unbiased(miss):  # an error so small and without bias is rounding
            share = max(share, MIN_EXPLAINED)
        if share >= MIN_EXPLAINED and share > best:
            best = share
            found = f"a cast to {name} (the PyTorch module errs {error * size:.0e} in it){ADVICE}"
    return found


def _with(call: TorchCall, change: Callable[[torch.Tensor], torch.Tensor]) -> TorchCall:
    args, kwargs = map_floating((call.args, call.kwargs), change, is_floating=is_floating_tensor)
    return call._replace(args=args, kwargs=kwargs)


def _parts(
    called: Called, module: torch.nn.Module, call: TorchCall, exact: list[np.ndarray], wanted: Sequence[np.ndarray],
    dtype: torch.dtype,
) -> Iterator[np.ndarray]:  # fmt: skip
    """Yield how the tensors change if just one weight (or all, if many), the inputs or the tensors are rounded."""
    rounded = lambda x: as_type(as_type(x, dtype), x.dtype)
    names = [name for name, _ in module.named_parameters()]
    for chosen in [{name} for name in names] if len(names) <= MAX_PARTS else [set(names)] if names else []:

        def change(twin: torch.nn.Module, chosen: set[str] = chosen) -> None:
            for name in chosen:
                p = twin.get_parameter(name)
                p.data = rounded(p.data)

        yield _difference(wanted, called(call, change), exact)
    yield _difference(wanted, called(_with(call, rounded), lambda m: None), exact)
    yield _difference(wanted, [_rounded(x, dtype) for x in exact], exact)


def _rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    x = torch.from_numpy(x.copy())
    return as_type(as_type(x, dtype), x.dtype).numpy()


def _explained(miss: np.ndarray, own: np.ndarray, parts: list[np.ndarray]) -> float:
    """Return the share of an error's sum of squares that a sum of roundings explains, adjusted for chance."""
    from scipy.optimize import lsq_linear

    parts = [part for part in parts if part is not None and np.any(part)]
    if len(miss) < PER_PART * (len(parts) + 1):
        parts = [sum(parts)] if parts else []
    columns = np.stack([own, *parts], axis=1)
    if len(miss) <= columns.shape[1] + 1:
        return 0.0
    size = np.linalg.norm(miss)
    times = lsq_linear(columns / size, miss / size, bounds=(0.0, EXCESS)).x  # a rounding occurs about once, or not
    rest = miss - columns @ times
    share = float(rest @ rest / (miss @ miss))
    return 1.0 - share * (len(miss) - 1) / (len(miss) - columns.shape[1] - 1)


def _is_unbiased(miss: np.ndarray) -> bool:
    """True if an error spreads over several elements and has no common sign, as rounding has not."""
    share = (miss / np.linalg.norm(miss)) ** 2
    spread = 1.0 / float(np.sum(share**2))  # n for n equal errors, 1 for an error of one element
    return spread > MIN_SPREAD and bool(abs(miss.sum()) <= MAX_BIAS * np.linalg.norm(miss))


def _difference(
    wanted: Sequence[np.ndarray], values: Sequence[np.ndarray], exact: Sequence[np.ndarray]
) -> np.ndarray | None:
    """Return values minus exact ones in the layout of JAX's tensors, as one vector; None if a shape does not fit."""
    parts = []
    for each in wanted:
        exact_fits = _fitting(exact, each)
        value = distance.widest(each) if values is wanted else _fitting(values, each)
        if exact_fits is None or value is None:
            return None
        parts.append(np.ravel(value - exact_fits))
    vector = np.concatenate(parts) if parts else np.zeros(0)
    vector = np.concatenate([vector.real, vector.imag]) if np.iscomplexobj(vector) else vector
    return vector if vector.size and np.all(np.isfinite(vector)) and np.any(vector) else None


def _fitting(values: Sequence[np.ndarray], wanted: np.ndarray) -> np.ndarray | None:
    fits = [y for y in (alignment.in_layout(distance.widest(x), wanted) for x in values) if y is not None]
    return min(fits, key=lambda y: distance.relative_error(y, wanted), default=None)
