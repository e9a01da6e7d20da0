"""Route the calls of a model's modules through a caller's function, without changing the model.

For modules that are plain Python objects with a method `__call__`: Flax NNX and Equinox.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flax import nnx

Handler = Callable[[str, Callable[..., Any], tuple, dict], Any]


@contextlib.contextmanager
def intercepted(modules: Iterable[tuple[str, Any]], handler: Handler) -> Iterator[None]:
    """Route every call of the named modules through handler(name, call, args, kwargs) while the context is open.

    A method that a class inherits counts as its own; calls to its parents' methods are part of the same call.
    """
    modules = [(name, module) for name, module in modules if _owner(type(module))]
    names, active = {id(module): name for name, module in modules}, set()
    originals = {owner: vars(owner)["__call__"] for owner in {_owner(type(module)) for _, module in modules}}

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            call = functools.partial(original, self)
            if id(self) not in names or id(self) in active:
                return call(*args, **kwargs)
            active.add(id(self))
            try:
                return handler(names[id(self)], call, args, kwargs)
            finally:
                active.discard(id(self))

        return wrapper

    try:
        for owner, original in originals.items():
            owner.__call__ = wrap(original)
        yield
    finally:
        for owner, original in originals.items():
            owner.__call__ = original


def nnx_modules(model: nnx.Module, *, root: str) -> Iterator[tuple[str, nnx.Module]]:
    """(dotted name, module) of a Flax NNX model's modules, `root` for the model itself."""
    for path, module in nnx.iter_modules(model):
        yield ".".join(map(str, path)) or root, module


def equinox_modules(model: Any, *, root: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, module) of an Equinox model's modules, `root` for the model itself."""
    import equinox

    def inside(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        children: Any = ()
        if isinstance(tree, equinox.Module):
            yield prefix or root, tree
            children = vars(tree).items()
        elif isinstance(tree, dict):
            children = tree.items()
        elif isinstance(tree, list | tuple):
            children = enumerate(tree)
        for name, child in children:
            yield from inside(child, f"{prefix}.{name}" if prefix else str(name))

    return inside(model, "")


def _owner(cls: type) -> type | None:
    """Class in which a class's __call__ is defined."""
    return next((base for base in cls.__mro__ if "__call__" in vars(base)), None)
