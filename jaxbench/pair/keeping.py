"""Copy a PyTorch module with its state, and restore that state after a call."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from typing import Any

import torch

# Attributes that every module has: no state of its own, or state that is restored separately.
MACHINERY = frozenset(vars(torch.nn.Module()))


def copy_of(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module; TorchScript via an in-memory file, because its own copies have parameters that get no gradients.

    Tensors with an autograd history, such as a kept result or a weight that hooks compute, are copied without it.
    """
    if not isinstance(module, torch.jit.ScriptModule):
        kept: list[torch.Tensor] = []
        for child in module.modules():
            _snapshot(_own(child), kept)
        return copy.deepcopy(module, {id(x): x.detach().clone() for x in kept if x.grad_fn is not None})
    held = io.BytesIO()
    torch.jit.save(module, held)
    held.seek(0)
    return torch.jit.load(held, map_location="cpu")


@contextlib.contextmanager
def restored(module: torch.nn.Module) -> Iterator[None]:
    """Restore, at the end of the context, the state of a module and of those inside it.

    That is parameters, buffers (also those outside the state dict), and their own numbers, tensors, lists and
    dictionaries. State inside objects of other classes is not restored.
    """
    # TorchScript's attributes are not Python's.
    children = [] if isinstance(module, torch.jit.ScriptModule) else list(module.modules())
    tensors = [*module.parameters(), *module.buffers()]
    buffers = [dict(child._buffers) for child in children]
    attributes = [_snapshot(_own(child), tensors) for child in children]
    before = [(x, x.detach().clone()) for x in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for x, value in before:
                if not torch.equal(x, value):
                    x.copy_(value)
        for child, each, own in zip(children, buffers, attributes, strict=True):
            child._buffers.clear()
            child._buffers.update(each)
            for name in _own(child).keys() - own.keys():
                delattr(child, name)
            vars(child).update(own)


def _own(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's own attributes: no parameters, buffers or modules, and none of PyTorch's internals."""
    return {name: value for name, value in vars(module).items() if name not in MACHINERY}


def _snapshot(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Copy plain containers and leave all else as it is; append the tensors inside to a list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif type(value) is dict:
        return {key: _snapshot(each, tensors) for key, each in value.items()}
    elif type(value) in (list, tuple, set):
        return type(value)(_snapshot(each, tensors) for each in value)
    return value
