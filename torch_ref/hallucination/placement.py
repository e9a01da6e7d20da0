"""Place a reader's weights on one of this process's devices; those of the last blocks in host memory if requested.

Twin: jaxbench/hallucination/placement.py.

Weights in host memory, pinned if the device is a GPU, are copied to the device for each call of a branch of a block,
and the copy is freed after it.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from torch_ref.attention import Context


class OnHost(torch.nn.Module):
    """A module whose parameters stay in host memory and are on the device only during its calls."""

    def __init__(self, module: Any):
        """module: a branch of a block, called with the branch's input first."""
        super().__init__()
        self.module = module

    def forward(self, x: Float[Tensor, "B T D"], *args: Any) -> Any:
        """Call the module with its parameters on the device."""
        return self._near(x)(x, *args)

    def _near(self, x: Tensor) -> Any:
        """Copy the module with its parameters on x's device: deepcopy takes these from its memo."""
        here = {id(each): _moved(each, x.device) for each in (*self.module.parameters(), *self.module.buffers())}
        return copy.deepcopy(self.module, here)


class AttentionOnHost(OnHost):
    """The same for attention, with its `queries`."""

    def __init__(self, module: Any):
        """module: a block's attention."""
        super().__init__(module)
        self.sliding_window, self.softcap = module.sliding_window, module.softcap

    def queries(self, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T N H"]:
        """Compute the queries of a call's tokens, as the call itself does."""
        return self._near(x).queries(x, context)


def devices(kind: str, count: int | None = None) -> list[Any]:
    """This process's devices of a kind, "cpu" or "gpu"; count: only the first `count`, None = all.

    Raises:
      ValueError: there are fewer.
    """
    number = {"cpu": 1, "gpu": torch.cuda.device_count()}.get(kind, 0)
    if count is not None and count > number:
        raise ValueError(f"--devices={count}: PyTorch sees {number} of kind {kind}")
    return [torch.device("cpu") if kind == "cpu" else torch.device("cuda", i) for i in range(number)][:count]


def in_host_memory() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which models are built in host memory, from where `placed` takes them."""
    return contextlib.nullcontext()  # transformer.build does so anyway


def is_on_host(name: str) -> bool:
    """True if the parameter of this dotted name, in a model by `arranged`, belongs in host memory."""
    return ".module." in name


def arranged(model: Any, *, offload_layers: int) -> Any:
    """Return the decoder with the same parameters, its last blocks' branches wrapped so that `is_on_host` finds theirs.

    The blocks' norms, which are small, stay with the rest.

    Raises:
      ValueError: offload_layers is not from 0 to the number of the model's blocks.
    """
    if not 0 <= offload_layers <= len(model.layers):
        raise ValueError(f"offload_layers={offload_layers}: the model has {len(model.layers)} blocks")
    made = copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})
    for layer in list(made.layers)[len(made.layers) - offload_layers :]:
        layer.attention, layer.mlp = AttentionOnHost(layer.attention), OnHost(layer.mlp)
    return made


def placed(model: Any, device: Any, *, offload_layers: int) -> Any:
    """Return the decoder on a device, with the weights of its last blocks in host memory, pinned for a GPU.

    Raises:
      ValueError: as `arranged`.
    """
    made = arranged(model, offload_layers=offload_layers)
    there: dict[int, Any] = {}
    for name, value in (*made.named_parameters(), *made.named_buffers()):
        if not is_on_host(name):
            there[id(value)] = _moved(value, device)
        else:
            there[id(value)] = _pinned(value) if device.type == "cuda" else value
    return copy.deepcopy(made, there)


def _pinned(value: Tensor) -> Tensor:
    pinned = value.detach().pin_memory()
    return torch.nn.Parameter(pinned, requires_grad=False) if isinstance(value, torch.nn.Parameter) else pinned


def _moved(value: Tensor, device: torch.device) -> Tensor:
    moved = value.detach().to(device, non_blocking=True)
    return torch.nn.Parameter(moved, requires_grad=False) if isinstance(value, torch.nn.Parameter) else moved
