"""Find why one module differs: known kinds of bugs, each tried on the module's PyTorch twin.

A cause is named only if the twin with that change computes what the JAX module does and the unchanged twin does not.
Casts are handled in pair/casts.py.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from jaxbench.pair import alignment, casts
from jaxbench.pair.torch_side import (
    Run,
    TorchCall,
    TorchSide,
    as_numpy,
    compared,
    copied,
    floating,
)
from jaxbench.parity import capture, distance

EPSILONS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3)
CLOSE = 1e-9  # relative error at which a changed twin computes what JAX does
MOMENTA = (0.1, 0.01, 0.001, 0.003, 0.05, 0.2, 0.5)  # of running statistics, in PyTorch's convention
ACTIVATIONS = {
    "relu": F.relu, "gelu (erf)": F.gelu, "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x), "tanh": torch.tanh, "sigmoid": torch.sigmoid, "elu": F.elu,
    "softplus": F.softplus, "leaky relu (0.01)": F.leaky_relu, "leaky relu (0.2)": lambda x: F.leaky_relu(x, 0.2),
    "none": lambda x: x,
}  # fmt: skip
GATES = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}  # of recurrent layers, by mode or class; others have one
Change = Callable[[torch.nn.Module], None]  # changes a module in place
Trial = tuple[str, Change]  # (description, change)


class _Case(NamedTuple):
    """What a change must explain: one module's tensors in JAX, and the PyTorch call that should have produced them."""

    module: torch.nn.Module
    call: TorchCall
    is_training: bool
    inner: str | None  # the module inside it that receives the tensors; None = they are the first output
    pick: Callable[[Any], Any]  # chooses from the output what is compared
    wanted: list[np.ndarray]
    types: set[str]  # dtypes of the tensors in JAX

    def called(self, call: TorchCall, change: Change) -> list[np.ndarray]:
        """Return the tensors that a changed copy of the module computes on a call's arguments."""
        return _called(self.module, call, change, self.is_training, self.inner, self.pick)

    def explained_by(self, change: Change) -> bool:
        """True if the changed module computes what JAX does; False also if the change does not apply to the module."""
        with contextlib.suppress(Exception):  # a module's own code may raise anything on what was changed
            return _error(self.called(self.call, change), self.wanted) <= CLOSE
        return False


def likely(
    culprit: capture.LocalError, twin: alignment.Aligned, forced: dict[str, capture.Call], side: TorchSide,
    reference: Run, *, is_training: bool,
) -> str:  # fmt: skip
    """Return the likely cause in words; empty where no known change of the PyTorch module explains the JAX module.

    Where the difference is in what a module passes to a child, a change must explain those inputs. Where the unchanged
    module already gives what JAX has, there is no cause: only the layout in which the two were compared differs.
    """
    try:
        case = _case(culprit, twin, forced, side, reference, is_training)
        return _found(case, culprit, twin, reference) if case else ""
    except Exception:  # the caller's code may raise anything when changed; a verdict without a cause beats none
        return ""


def _unchanged(module: torch.nn.Module) -> None:
    """No change."""


def _case(
    culprit: capture.LocalError, twin: alignment.Aligned, forced: dict[str, capture.Call], side: TorchSide,
    reference: Run, is_training: bool,
) -> _Case | None:  # fmt: skip
    """Build the case to explain; None where the PyTorch module's call is unknown."""
    child = culprit.child
    name = twin.torch_names.get(culprit.module, culprit.module)  # a plain function's root is not a call in JAX
    if name not in reference.calls:
        return None
    call = reference.calls[name]
    pick = side.pick if call.module == capture.ROOT else lambda outputs: outputs
    module = side.module if call.module == capture.ROOT else side.module.get_submodule(call.module)
    inner = None
    if child is not None:
        path = reference.calls[twin.torch_names[child]].module
        inner = path.removeprefix(f"{call.module}.") if call.module != capture.ROOT else path
    mine = forced[child].inputs if child else forced[culprit.module].outputs
    types = {str(x.dtype) for x in mine}
    return _Case(module, call, is_training, inner, pick, [distance.widest(x) for x in mine], types)


def _found(case: _Case, culprit: capture.LocalError, twin: alignment.Aligned, reference: Run) -> str:
    """Return the first known change that explains a case, in words; empty where none does."""
    if case.explained_by(_unchanged):
        return "the same values, handed over in another order" if case.inner is not None else ""
    module, call = case.module, case.call
    proven = {reference.calls[other].module for other in twin.torch_names.values()} - {call.module}
    for words, change in _trials(module, case.is_training, call.module, proven):
        if case.explained_by(change):
            return words
    for words, patch in _patches():
        with patch():
            if case.explained_by(_unchanged):
                return words
    if not np.isfinite(culprit.error):
        return ""  # neither a factor nor rounding gives an infinite error
    plain = case.called(call, _unchanged)
    return _factor(plain, case.wanted) or casts.named(case.called, module, call, case.wanted, culprit.error, case.types)


def of_state(
    mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray], before: dict[str, np.ndarray], counts: dict[str, int]
) -> str:
    """Return the likely cause of batch statistics that differ after a call; empty where none is known.

    All arrays are by JAX's name.

    Args:
      mine: after the call in JAX.
      theirs: after the call in PyTorch.
      before: before the call.
      counts: number of values that each statistic is taken over.
    """
    mine = {name: x for name, x in mine.items() if x.shape == theirs[name].shape == before[name].shape}
    moves = {name: (x - before[name], theirs[name] - before[name]) for name, x in mine.items()}
    for name, (move, other) in moves.items():
        factor = float(np.vdot(move, other).real / max(np.vdot(other, other).real, np.finfo(float).tiny))
        if abs(factor - 1.0) > CLOSE and distance.relative_error(move, factor * other) <= CLOSE:
            return f"momentum: {name} moves {factor:.4g} times as far in JAX"
    for name in mine:
        if counts.get(name, 0) > 1 and name.rpartition(".")[2] in ("var", "variance"):
            for momentum in MOMENTA:
                batch = (theirs[name] - (1 - momentum) * before[name]) / momentum
                biased = (1 - momentum) * before[name] + momentum * batch * (1 - 1 / counts[name])
                if distance.relative_error(mine[name], biased) <= CLOSE:
                    n = counts[name]
                    return f"running variance: divided by n={n} in JAX, by n-1 in PyTorch ({name})"
    return ""


def _called(
    module: torch.nn.Module, call: TorchCall, change: Callable[[torch.nn.Module], None], is_training: bool,
    inner: str | None, pick: Callable[[Any], Any],
) -> list[np.ndarray]:  # fmt: skip
    """Return a changed copy's first output on the recorded arguments, or the inputs that it passes to a child."""
    twin = copy.deepcopy(module).train(is_training)
    change(twin)
    handed: list[np.ndarray] = []
    if inner is not None:
        keep = lambda m, args, kwargs: handed.extend(as_numpy(x) for x in floating((args, kwargs)))
        twin.get_submodule(inner).register_forward_pre_hook(keep, with_kwargs=True, prepend=True)
    with torch.no_grad():
        result = twin(*copied(call.args), **copied(call.kwargs))
    return [as_numpy(compared(pick(result)).floating[0])] if inner is None else handed


def _error(values: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """Return the largest error over the wanted tensors, each against its best fitting value."""
    errors = []
    for each in wanted:
        fits = [y for y in (alignment.in_layout(distance.widest(x), each) for x in values) if y is not None]
        errors.append(min((distance.error_by_size(y, each) for y in fits), default=np.inf))
    return max(errors, default=np.inf)


def _set(name: str, value: Any) -> Callable[[torch.nn.Module], None]:
    return lambda module: setattr(module, name, value)


def _trials(module: torch.nn.Module, is_training: bool, path: str, proven: set[str]) -> Iterator[Trial]:
    """Yield changes to the settings and weights of a module and of its children that were not compared themselves."""
    for name, child in module.named_modules():
        if (name if path == capture.ROOT else f"{path}.{name}") in proven:
            continue
        where, at = (f" of {name}" if name else ""), _inside(name)
        for setting, value in vars(child).items():
            if "eps" in setting and isinstance(value, float):  # variance_epsilon in transformers
                for eps in EPSILONS:
                    if eps != value:
                        yield f"{setting}{where}: {eps:g} in JAX, {value:g} in PyTorch", at(_set(setting, eps))
        if isinstance(child, torch.nn.modules.batchnorm._NormBase):
            mode = "the running statistics" if is_training else "the batch's own statistics (norm in training mode)"
            yield f"JAX normalises by {mode}", at(lambda m, flag=not is_training: m.train(flag))
        if isinstance(child, torch.nn.GELU):
            other = "none" if child.approximate == "tanh" else "tanh"
            names = {"none": "erf", "tanh": "tanh"}
            words = f"GELU{where}: {names[other]} form in JAX, {names[child.approximate]} in PyTorch"
            yield words, at(_set("approximate", other))
        elif not any(True for _ in child.parameters()) and not any(True for _ in child.children()):
            for other, function in ACTIVATIONS.items():
                words = f"activation{where}: {other} in JAX, {type(child).__name__} in PyTorch"
                yield words, at(lambda m, function=function: setattr(m, "forward", function))
        if isinstance(child, torch.nn.Softmax | torch.nn.LogSoftmax):
            for dim in range(-4, 0):
                yield f"softmax{where} over axis {dim} in JAX, {child.dim} in PyTorch", at(_set("dim", dim))
        yield from _weight_trials(child, where, at)
        yield from _padding_trials(child, where, at)


def _inside(name: str) -> Callable[[Callable], Callable[[torch.nn.Module], None]]:
    """Return a function that redirects a change to the child module of this name; to the module itself if empty."""
    return lambda change: lambda module: change(module.get_submodule(name) if name else module)


def _weight_trials(child: torch.nn.Module, where: str, at: Any) -> Iterator[Trial]:
    """Yield changes to weights: kernels transposed or flipped, biases omitted, gates in another order."""
    for name, p in child.named_parameters(recurse=False):
        if p.ndim == 1 and "weight" in name:  # as in Gemma's norms
            yield f"{name}{where}: JAX multiplies by 1 more", at(_weight(name, lambda x: x + 1.0))
            yield f"{name}{where}: PyTorch multiplies by 1 more", at(_weight(name, lambda x: x - 1.0))
        if p.ndim == 2 and p.shape[0] == p.shape[1]:
            yield f"{name}{where} is transposed in JAX", at(_weight(name, lambda x: x.T))
        if p.ndim > 2:
            axes = tuple(range(2, p.ndim))
            yield f"{name}{where} is flipped in JAX (convolution against correlation)", at(_flipped(name, axes))
            if p.shape[2] == p.shape[-1]:
                yield f"height and width of {name}{where} are swapped in JAX", at(_weight(name, lambda x: x.mT))
            if p.shape[0] == p.shape[1]:
                yield f"inputs and outputs of {name}{where} are swapped", at(_weight(name, lambda x: x.transpose(0, 1)))
        if "bias" in name:
            yield f"{name}{where} is missing in JAX", at(_weight(name, torch.zeros_like))
    if isinstance(child, torch.nn.RNNBase | torch.nn.RNNCellBase):
        yield from _gate_trials(child, where, at)


def _gate_trials(child: torch.nn.RNNBase | torch.nn.RNNCellBase, where: str, at: Any) -> Iterator[Trial]:
    """Yield changes to recurrent layers and cells: every gate's matrix transposed, gates in another order."""
    gates = GATES.get(getattr(child, "mode", type(child).__name__), 1)
    names = [name for name, _ in child.named_parameters(recurse=False) if name.startswith(("weight_ih", "weight_hh"))]
    for name in names:
        halves = lambda x: torch.cat([part.T for part in x.chunk(gates)])
        yield f"every gate's {name}{where} is transposed in JAX", at(_weight(name, halves))
    for order in itertools.permutations(range(gates)):
        if order != tuple(range(gates)):
            yield f"gates{where} in the order {order} of PyTorch's in JAX", at(_gates(order))


def _weight(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.nn.Module], None]:
    def apply(module: torch.nn.Module) -> None:
        p = module.get_parameter(name)
        p.data = change(p.data).contiguous()

    return apply


def _flipped(name: str, axes: tuple[int, ...]) -> Callable[[torch.nn.Module], None]:
    return _weight(name, lambda x: x.flip(axes))


def _gates(order: tuple[int, ...]) -> Callable[[torch.nn.Module], None]:
    def apply(module: torch.nn.Module) -> None:
        for name, p in module.named_parameters(recurse=False):
            if name.startswith("weight_hr"):  # an LSTM's output projection, which has no gates
                continue
            parts = p.data.chunk(len(order))
            p.data = torch.cat([parts[i] for i in order])

    return apply


def _padding_trials(child: torch.nn.Module, where: str, at: Any) -> Iterator[Trial]:
    """Yield other paddings of convolutions and pools."""
    if isinstance(child, torch.nn.modules.conv._ConvNd) and not child.transposed:
        for padding in itertools.product(range(4), repeat=2):
            words = f"padding{where} is {padding} on each axis in JAX, {child.padding} in PyTorch"
            yield words, at(lambda m, padding=padding: _pad_first(m, padding))
        words = f"padding{where} is 'SAME' in JAX, {child.padding} in PyTorch"
        yield words, at(_pad_same)
    if isinstance(child, torch.nn.AvgPool2d):
        flag = not child.count_include_pad
        yield f"count_include_pad{where} is {flag} in JAX", at(_set("count_include_pad", flag))
    if hasattr(child, "ceil_mode"):
        yield f"ceil_mode{where} is {not child.ceil_mode} in JAX", at(_set("ceil_mode", not child.ceil_mode))


def _pad_first(module: Any, padding: tuple[int, int]) -> None:
    """Replace the convolution's own padding by (before, after) on every axis."""
    axes = module.weight.ndim - 2
    module.padding = (0,) * axes if not isinstance(module.padding, str) else "valid"
    module.register_forward_pre_hook(lambda m, args: (F.pad(args[0], padding * axes), *args[1:]))


def _pad_same(module: Any) -> None:
    """Pad as XLA and TensorFlow do for 'SAME': the odd element goes at the end."""
    axes = module.weight.ndim - 2
    module.padding = (0,) * axes

    def pad(m: Any, args: tuple) -> tuple:
        widths = []
        for axis in reversed(range(axes)):
            size, stride = args[0].shape[2 + axis], m.stride[axis]
            reach = (m.kernel_size[axis] - 1) * m.dilation[axis] + 1
            total = max((-(-size // stride) - 1) * stride + reach - size, 0)
            widths += [total // 2, total - total // 2]
        return (F.pad(args[0], widths), *args[1:])

    module.register_forward_pre_hook(pad)


def _patches() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield patches of torch.nn.functional and torch, for modules that call these functions."""
    from unittest import mock

    gelu, softmax, attention, norm = F.gelu, F.softmax, F.scaled_dot_product_attention, F.layer_norm

    def patched(name: str, function: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: mock.patch.object(F, name, function)

    yield (
        "GELU: the other form (tanh against erf)",
        patched("gelu", lambda x, approximate="none": gelu(x, approximate="none" if approximate == "tanh" else "tanh")),
    )
    for name in ("relu", "silu", "gelu"):
        for other in ("relu", "silu", "gelu"):
            if name != other:
                yield f"activation: {other} in JAX, {name} in PyTorch", patched(name, getattr(F, other))
    for name, other in (("silu", F.silu), ("gelu", F.gelu), ("tanh", torch.tanh)):
        yield f"activation: {name} in JAX, relu in PyTorch", lambda f=other: mock.patch.object(torch, "relu", f)
    for owner, name in ((F, "relu"), (torch, "relu"), (F, "gelu"), (F, "silu"), (torch, "tanh"), (torch, "sigmoid")):
        identity = lambda x, *args, **options: x
        yield f"{name} is missing in JAX", lambda o=owner, n=name, f=identity: mock.patch.object(o, n, f)
    for kind, other in (("avg", "max"), ("max", "avg")):
        for name in ("adaptive_{}_pool2d", "adaptive_{}_pool1d"):
            function = getattr(F, name.format(other))
            yield f"{other} pool in JAX, {kind} pool in PyTorch", patched(name.format(kind), function)
    for dim in range(-4, 0):
        yield f"softmax over axis {dim} in JAX", patched("softmax", lambda x, d=None, dim_=dim, **o: softmax(x, dim_))
    for eps in EPSILONS:
        yield f"eps of the layer norm: {eps:g} in JAX", patched("layer_norm", lambda *a, e=eps, **o: norm(*a[:4], e))
    for words, change in (
        ("attention scores are not scaled in JAX", lambda o, d: o | {"scale": 1.0}),
        ("attention scores are divided by the head size, not its root", lambda o, d: o | {"scale": 1.0 / d}),
        (
            "attention is causal on one side only",
            lambda o, d: o | {"is_causal": not o.get("is_causal"), "attn_mask": None},
        ),
    ):
        yield (
            words,
            patched(
                "scaled_dot_product_attention",
                lambda q, k, v, *a, change=change, **o: attention(q, k, v, **change(_named(a, o), q.shape[-1])),
            ),
        )


def _named(args: tuple, options: dict) -> dict:
    return dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | options


def _factor(values: list[np.ndarray], wanted: list[np.ndarray]) -> str:
    """Describe the constant factor from PyTorch's tensor to JAX's, such as a missing scale; empty if there is none."""
    if len(values) != 1 or len(wanted) != 1 or values[0].shape != wanted[0].shape:
        return ""
    factor = np.vdot(values[0], wanted[0]) / max(np.vdot(values[0], values[0]).real, np.finfo(float).tiny)
    if np.iscomplexobj(factor):
        factor = np.round(factor, 12)  # drops a real or imaginary part that is only rounding
        if _error([values[0].conj()], wanted) <= CLOSE:
            return "the complex conjugate of PyTorch's"
    words = f"{factor:.6g}" if abs(factor - 1.0) > 1e-4 else f"1 {factor - 1.0:+.3g}"
    return f"{words} times PyTorch's" if factor and _error([factor * values[0]], wanted) <= CLOSE else ""
