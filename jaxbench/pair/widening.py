"""Turn casts to narrower types inside models into casts to float64, so that only the formula is compared.

Published language models compute norms, softmax and rotations in float32 whatever their input type, on both sides. In
float64 two equal models then differ by 1e-8, which hides any smaller error. PyTorch's functions are routed through a
TorchFunctionMode; JAX's casts go through a few primitives.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import primitives
from torch.overrides import TorchFunctionMode

from jaxbench.parity.capture import map_floating

TORCH_TYPES = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex32: torch.complex128, torch.complex64: torch.complex128,
}  # fmt: skip
TORCH_CASTS = {
    torch.Tensor.half: torch.Tensor.double, torch.Tensor.bfloat16: torch.Tensor.double,
    torch.Tensor.float: torch.Tensor.double, torch.Tensor.cfloat: torch.Tensor.cdouble,
}  # fmt: skip
JAX_CASTS = {
    primitives.convert_element_type_p: "new_dtype",
    primitives.iota_p: "dtype",
    primitives.dot_general_p: "preferred_element_type",
    primitives.conv_general_dilated_p: "preferred_element_type",
}  # primitive -> the parameter that names its result's type
WIDE_PRECISION = "float32"  # synonym of "highest"; the new value makes JAX retrace programs cached with other casts


class _Wide(TorchFunctionMode):
    """Call PyTorch's functions with float64 wherever an argument names a narrower type."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = map_floating(
            (args, kwargs or {}), TORCH_TYPES.__getitem__,
            is_floating=lambda x: isinstance(x, torch.dtype) and x in TORCH_TYPES,
        )  # fmt: skip
        return TORCH_CASTS.get(func, func)(*args, **kwargs)


def _wide_type(dtype: Any) -> Any:
    """Return the wide type for one that a cast names; None and non-floating types stay."""
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    return np.dtype(np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float64)


def _is_drawing() -> bool:
    """True inside jax.random, which builds its draws bit by bit in the requested type."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("jax._src.random"):
            return True
        frame = frame.f_back
    return False


def _bind(primitive: Any, name: str) -> Callable[..., Any]:
    original = primitive.bind

    def bind(*args: Any, **params: Any) -> Any:
        wide = _wide_type(params[name])
        return original(*args, **params if wide == params[name] or _is_drawing() else params | {name: wide})

    return bind


@contextlib.contextmanager
def widened() -> Iterator[None]:
    """Turn casts to floating types into casts to float64, in JAX and PyTorch, inside the context.

    `compare(.., widen=True)` opens it around its float64 gates. Build models inside it if their constants (rotary
    frequencies, masks) are computed at construction. It enables JAX's 64-bit types. Draws of jax.random keep the
    requested type.
    """
    # Compiled modules run eagerly: the compiler does not know the mode.
    is_compiling = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if is_compiling else contextlib.nullcontext()
    default, before = torch.get_default_dtype(), {primitive: vars(primitive).get("bind") for primitive in JAX_CASTS}
    try:
        for primitive, name in JAX_CASTS.items() if not any(before.values()) else ():
            primitive.bind = _bind(primitive, name)
        torch.set_default_dtype(torch.float64)
        with eager, jax.enable_x64(True), jax.default_matmul_precision(WIDE_PRECISION), _Wide():
            yield
    finally:
        torch.set_default_dtype(default)
        for primitive, own in before.items():
            if own is None:
                vars(primitive).pop("bind", None)
