"""The PyTorch side of a pair: a copy of any module in one dtype, run with hooks; the caller's module is unchanged."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.modules import conv

from jaxbench.pair.draws import Term
from jaxbench.pair.jax_model import calling, tapped
from jaxbench.pair.keeping import copy_of, restored
from jaxbench.pair.leaves import disturbed, sources_of
from jaxbench.pair.matching import Leaf
from jaxbench.parity import distance
from jaxbench.parity.capture import ROOT, Call, Outputs, call_names, map_floating, outputs_of

# Modules whose weights are [out, in, *window]; Flax's and Haiku's kernels have these axes in reverse order.
REVERSED = (torch.nn.Linear, conv._ConvNd, torch.nn.MultiheadAttention, torch.nn.RNNBase, torch.nn.RNNCellBase,
            torch.nn.Embedding)  # fmt: skip
REVERSED_NAMES = re.compile(r"Linear$|Conv\d?d?$|Conv1D$")  # third-party classes that act as one of these


# (pattern of PyTorch's error message, what the user can do about it)
ADVICE = (
    (r"same dtype|expected (scalar|m1|mat1)|dtype.*(Float|Double)",
     "a cast or a constant of the module's own is narrower than its weights: widen=True takes it as float64"),
    (r"numpy\.ndarray",
     "arrays become tensors in tuples, lists and dictionaries alone: give other inputs, such as dataclasses, as one of "
     "these and build them in a wrapper around the module"),
    (r"closure", "optimisers that call the model again in a step are not compared"),
    (r"keyword-only|positional argument",
     "inputs are given by position: wrap the module in one whose forward(self, a, b) calls it by keyword"),
    (r"deepcopy protocol", "the module keeps a tensor with its history: detach it"),
)  # fmt: skip


class TorchCall(NamedTuple):
    """One call of a module, with everything needed to repeat it."""

    module: str  # dotted name
    args: tuple
    kwargs: dict
    call: Call  # floating tensors of inputs and outputs


class Run(NamedTuple):
    """One call of the whole module."""

    outputs: Outputs
    calls: dict[str, TorchCall]  # by name, `name#1` for a module's second call; in order of completion
    buffers: dict[str, np.ndarray]  # after the call


class Gradients(NamedTuple):
    """Gradients of the objective."""

    loss: np.ndarray
    tensors: dict[str, np.ndarray]
    inputs: tuple[np.ndarray, ...]  # by floating input, from left to right


class TorchSide:
    """A PyTorch module in one dtype.

    Args:
      module: the module to run; copied.
      dtype: float64, float32 or bfloat16, of parameters, buffers and inputs.
      pick: chooses from the module's outputs what is compared; None = all of them.
    """

    def __init__(self, module: torch.nn.Module, *, dtype: str, pick: Callable[[Any], Any] | None = None):
        self.dtype = getattr(torch, dtype)
        self.module = copy_of(module).to("cpu")._apply(lambda x: as_type(x, self.dtype))
        self.pick = pick or (lambda outputs: outputs)

    def tensors(self) -> dict[str, np.ndarray]:
        """Return floating parameters and buffers by name; tied ones once."""
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {name: as_numpy(x) for name, x in named if is_floating_tensor(x)}

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Set parameters and buffers."""
        named = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        with torch.no_grad():
            for name, value in tensors.items():
                named[name].copy_(torch.from_numpy(np.array(value)))

    def disturb(self, names: Iterable[str]) -> list[str]:
        """Replace the constant tensors among these by random values around the constant; return their names."""
        tensors = self.tensors()
        changed = disturbed({name: tensors[name] for name in set(names) & tensors.keys()})
        self.load(changed)
        return list(changed)

    def probed(self, inputs: tuple) -> dict[str, TorchCall]:
        """Call the module with constant tensors disturbed, so that modules' outputs are distinct; restore the tensors.

        Returns the calls of the modules inside.
        """
        own = self.tensors()
        self.disturb(own)
        try:
            with calling("the PyTorch module cannot be called with other constants (disturb=False leaves them)"):
                return self.run(inputs, is_training=False).calls
        finally:
            self.load(own)

    def owner(self, name: str) -> torch.nn.Module:
        """Return the module that owns a tensor; for a parametrised one the module around its parametrisation."""
        parametrised, separator, _ = name.partition(".parametrizations.")
        path = parametrised if separator else name.rpartition(".")[0]
        # not get_submodule, which TorchScript lacks
        return functools.reduce(getattr, path.split("."), self.module) if path else self.module

    @contextlib.contextmanager
    def _restored(self, is_training: bool) -> Iterator[None]:
        """Set the module's mode inside the context; restore the mode and all of the module's state at the end.

        State is parameters, buffers (also those outside the state dict) and its own numbers, tensors and lists.
        """
        with restored(self.module):
            modes = {module: module.training for module in self.module.modules()}
            self.module.train(is_training)
            try:
                yield
            finally:
                for module, mode in modes.items():
                    module.training = mode

    def run(self, inputs: tuple, *, is_training: bool) -> Run:
        """Call the module once and record the calls of every module inside."""
        calls: dict[str, TorchCall] = {}
        with torch.no_grad(), self._restored(is_training), recorded(self.module, calls):
            result = self.module(*self.tensors_of(inputs))
            buffers = {n: as_numpy(x) for n, x in self.module.named_buffers() if is_floating_tensor(x)}
        found = compared(self.pick(result))
        arrays = (tuple(map(as_numpy, each)) for each in (found.floating, found.exact))
        return Run(Outputs(*arrays, found.tree), calls, buffers)

    def gradients(self, inputs: tuple, terms: tuple[Term, ...], *, is_training: bool) -> Gradients | None:
        """Return the objective's gradients by parameters and floating inputs; None if it depends on none of them."""
        given = self.tensors_of(inputs, requires_grad=True)
        handed = map_floating(given, torch.clone, is_floating=is_floating_tensor)  # the module may write into them
        self.module.zero_grad(set_to_none=True)
        with self._restored(is_training):
            loss = self._objective(self.pick(self.module(*handed)), terms)
            if not loss.requires_grad:
                return None
            loss.backward()
            grads = {
                name: as_numpy(torch.zeros_like(p) if p.grad is None else p.grad)
                for name, p in self.module.named_parameters()
            }
        self.module.zero_grad(set_to_none=True)
        by_input = tuple(as_numpy(torch.zeros_like(x) if x.grad is None else x.grad) for x in floating(given))
        return Gradients(as_numpy(loss), grads, by_input)

    def steps(
        self, inputs: tuple, terms: tuple[Term, ...], optimizer: Callable[[Any], torch.optim.Optimizer],
        *, num_steps: int, is_training: bool,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:  # fmt: skip
        """Run optimiser steps on one batch; return their losses, and the parameters and buffers after the last."""
        losses = []
        with self._restored(is_training):
            update = optimizer([p for p in self.module.parameters() if p.requires_grad])
            for _ in range(num_steps):
                update.zero_grad(set_to_none=True)
                loss = self._objective(self.pick(self.module(*self.tensors_of(inputs))), terms)
                loss.backward()
                update.step()
                losses.append(as_numpy(loss))
            after = self.tensors()
        return np.array(losses), after

    def _objective(self, result: Any, terms: tuple[Term, ...]) -> torch.Tensor:
        pairs = zip(compared(result).floating, terms, strict=True)
        return sum(_square(_difference(y, term)).mean() / 2 for y, term in pairs if y.numel())

    def tensors_of(self, inputs: tuple, *, requires_grad: bool = False) -> tuple:
        """Return the inputs as tensors, the floating ones in this side's dtype."""

        def tensor(x: np.ndarray) -> torch.Tensor:
            return as_type(torch.tensor(x), self.dtype).requires_grad_(requires_grad)

        given = map_floating(inputs, tensor, is_floating=is_floating_numpy)
        return map_floating(given, torch.tensor, is_floating=lambda x: isinstance(x, np.ndarray))


def is_called(module: torch.nn.Module) -> bool:
    """True if calls of a module can be recorded: it has a forward method in Python (TorchScript takes no hooks)."""
    if isinstance(module, torch.jit.ScriptModule | torch.nn.ModuleList):
        return False
    return type(module).forward is not torch.nn.Module.forward


@contextlib.contextmanager
def recorded(module: torch.nn.Module, calls: dict[str, TorchCall]) -> Iterator[None]:
    """Record, inside the context, every call of a module and of those inside it, and every tap."""
    name_of_call = call_names()
    open_calls: list[tuple[str, Any, Any]] = []

    def before(name: str) -> Any:
        def hook(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            open_calls.append((name, *copied((args, kwargs))))

        return hook

    def after(module: torch.nn.Module, args: tuple, kwargs: dict, result: Any) -> None:
        name, args, kwargs = open_calls.pop()
        record(name, args, kwargs, result)

    def record(name: str, args: tuple, kwargs: dict, result: Any) -> None:
        numbers = tuple(as_numpy(x) for x in floating((args, kwargs)))
        outputs = tuple(as_numpy(x) for x in floating(result))
        if outputs:
            calls[name_of_call(name)] = TorchCall(name, args, kwargs, Call(numbers, outputs, whole((args, kwargs))))

    def tap(name: str, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        record(name, args, kwargs, args[0])
        return args[0]

    handles = []
    for path, child in module.named_modules():
        if is_called(child):
            handles.append(child.register_forward_pre_hook(before(path or ROOT), with_kwargs=True))
            handles.append(child.register_forward_hook(after, with_kwargs=True))
    try:
        with tapped(tap):
            yield
    finally:
        for handle in handles:
            handle.remove()


def copied(tree: Any) -> Any:
    """Copy the tensors of nested arguments, because modules may write into them."""
    return map_floating(tree, lambda x: x.detach().clone(), is_floating=lambda x: isinstance(x, torch.Tensor))


def floating(tree: Any) -> tuple[torch.Tensor, ...]:
    """Return the floating tensors of nested tuples, lists and dictionaries, from left to right."""
    tensors: list[torch.Tensor] = []
    map_floating(tree, tensors.append, is_floating=is_floating_tensor)
    return tuple(tensors)


def whole(tree: Any) -> tuple[np.ndarray, ...]:
    """Return the integer tensors of nested tuples, lists and dictionaries, from left to right."""
    tensors: list[torch.Tensor] = []
    is_whole = lambda x: isinstance(x, torch.Tensor) and not is_floating_tensor(x) and x.dtype != torch.bool
    map_floating(tree, tensors.append, is_floating=is_whole)
    return tuple(map(as_numpy, tensors))


@contextlib.contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    """Set the dtype of floating tensors that a module creates itself, such as an initial zero state or uint8 / 255."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def calling_torch(what: str) -> Iterator[None]:
    """Re-raise an exception of PyTorch's side as a ValueError: what failed, in one line, and what to do if known."""
    try:
        with calling(what):
            yield
    except ValueError as error:
        advice = next((words for pattern, words in ADVICE if re.search(pattern, str(error))), "")
        if not advice:
            raise
        raise ValueError(f"{error}; {advice}") from error


def wide(tree: Any) -> Any:
    """Return the inputs as numpy arrays, the floating ones in float64 or complex128."""
    if isinstance(tree, dict):
        return {key: wide(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        items = [wide(value) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, torch.Tensor):
        tree = tree.detach().cpu().numpy()
    if hasattr(tree, "__array__") and not isinstance(tree, np.ndarray):
        tree = np.asarray(tree)
    return distance.widest(tree).copy() if is_floating_numpy(tree) else tree


def torch_leaves(side: TorchSide, calls: Mapping[str, TorchCall], *, with_values: bool) -> list[Leaf]:
    """Return the leaves of a PyTorch module; its buffers may stay without a JAX array."""
    order = {call.module: i for i, call in reversed(list(enumerate(calls.values())))}
    sources = sources_of({name: call.call for name, call in calls.items()})
    params = dict(side.module.named_parameters())
    leaves = []
    for i, (name, x) in enumerate(side.tensors().items()):
        owner, path = side.owner(name), name.rpartition(".")[0]
        is_reversed = type(owner).__name__ == "Conv1D"  # transformers' class, stored [in, out] as in Flax
        place = order.get(path, len(order)) * 100_000 + i
        value, source = x if with_values else None, sources.get(path, "")
        kinds = {"owner": type(owner).__name__, "is_optional": name not in params, "is_bare": is_bare(owner)}
        leaves.append(Leaf(name, x.shape, place, is_reversed, value, source=source, **kinds))
    return leaves


def is_bare(owner: torch.nn.Module) -> bool:
    """True for a module whose class does not imply how its matrices are stored."""
    return not isinstance(owner, REVERSED) and not REVERSED_NAMES.search(type(owner).__name__)


def _difference(y: torch.Tensor, term: Term) -> torch.Tensor:
    """Return output / size - target; 0 where the target is NaN, which marks an infinite output."""
    t, y = torch.from_numpy(term.target).to(y.dtype), y / torch.as_tensor(term.size)
    return torch.where(t.isnan(), 0.0, torch.where(t.isnan(), 0.0, y) - t) if t.isnan().any() else y - t


def compared(result: Any) -> Outputs:
    """Return the tensors that a call returned, as Outputs."""

    def kind_of(x: Any) -> str:
        if not isinstance(x, torch.Tensor):
            return ""
        return "floating" if is_floating_tensor(x) else "exact"

    return outputs_of(result, kind_of=kind_of)


def is_floating_tensor(x: Any) -> bool:
    """True for a tensor of floating or complex numbers."""
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def is_floating_numpy(x: Any) -> bool:
    """True for a numpy array of floating or complex numbers."""
    return isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.inexact)


def as_type(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a floating tensor to a type; of a complex one the parts, but to float32 at least; others stay unchanged."""
    if x.is_complex():
        return x.to(torch.promote_types(dtype, torch.complex64))
    return x.to(dtype) if x.is_floating_point() else x


def _square(x: torch.Tensor) -> torch.Tensor:
    """Return squared absolute values."""
    return x.real**2 + x.imag**2 if x.is_complex() else x**2


def as_numpy(x: torch.Tensor | np.ndarray) -> np.ndarray:
    """Return a tensor as a numpy array; bfloat16 becomes float32, sparse tensors become dense."""
    if not isinstance(x, torch.Tensor):
        return np.asarray(x)
    x = x.detach()
    x = (x if x.layout == torch.strided else x.to_dense()).resolve_conj().resolve_neg()
    return (x.float() if x.dtype == torch.bfloat16 else x).cpu().numpy().copy()
