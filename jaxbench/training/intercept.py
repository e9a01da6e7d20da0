"""Calls of a Flax model's modules routed through a function of the caller's, without a change to the model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx

Handler = Callable[[str, Callable[..., Any], tuple, dict], Any]


@contextlib.contextmanager
def intercepted(model: nnx.Module, handler: Handler, *, root: str) -> Iterator[None]:
    """Route every call of the model's modules through handler(name, call, args, kwargs) while the context is open.

    A module's name is its dotted path, `root` for the model itself.
    """
    names = {id(module): ".".join(map(str, path)) or root for path, module in nnx.iter_modules(model)}
    classes = {type(module) for _, module in nnx.iter_modules(model) if "__call__" in vars(type(module))}
    originals = {cls: vars(cls)["__call__"] for cls in classes}

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            call = functools.partial(original, self)
            return handler(names[id(self)], call, args, kwargs) if id(self) in names else call(*args, **kwargs)

        return wrapper

    try:
        for cls, original in originals.items():
            cls.__call__ = wrap(original)
        yield
    finally:
        for cls, original in originals.items():
            cls.__call__ = original
