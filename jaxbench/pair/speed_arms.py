"""Build the timed calls of one side of a pair: forward, forward and backward, an optimiser step.

The objective is half the mean square of every compared output, the same number on both sides in any layout. It is
differentiated with respect to the trained parameters, or the floating inputs if there are none. A step is what a user
would call: parameters are arguments of a compiled JAX function, and the old ones are donated.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxbench.pair import proof, torch_side
from jaxbench.pair.jax_model import as_type, is_floating
from jaxbench.pair.jax_side import by_parts, floating
from jaxbench.pair.public_types import Pair
from jaxbench.parity import distance
from jaxbench.parity.capture import map_floating

Arrays = dict[str, Any]


class Timed(NamedTuple):
    """A call to time."""

    call: Callable[[], Any]  # returns once its result is ready
    loss: Callable[[Any], float]  # of a result


class Functional(NamedTuple):
    """A model as a pure function of named arrays, in one dtype."""

    params: Arrays
    state: Arrays
    apply: Callable[[Arrays, Arrays, tuple, bool], tuple[tuple, Arrays]]  # -> compared outputs, state after the call
    inputs: tuple


def arm(name: str, pair: Pair, weights: proof.Weights, *, dtype: str) -> JaxArm | TorchArm:
    """Build an arm of the speed table, one of speed.ARMS, in one dtype.

    Raises:
      ValueError: the library cannot wrap a module of this kind, or cannot run it in this dtype or mode.
      ModuleNotFoundError: the library of a wrapping arm is not installed.
    """
    if name.startswith("torch_"):
        return TorchArm(pair, weights, dtype=dtype, is_compiled=name == "torch_compiled")
    if name.startswith("jax_"):
        model, trained = of_jax(pair, weights, dtype), weights.trained_arrays
    else:
        model = {"torchax": of_torchax, "torch2jax": of_torch2jax}[name](pair, weights, dtype)
        trained = weights.trained_tensors
    return JaxArm(pair, model, trained, weights.is_training, is_compiled=name != "jax_eager")


class JaxArm:
    """A JAX function, compiled or eager (op by op)."""

    as_numpy = staticmethod(distance.widest)

    def __init__(self, pair: Pair, model: Functional, trained: frozenset[str], is_training: bool, *, is_compiled: bool):
        self.model, self.is_training = model, is_training
        self.compiled = jax.jit if is_compiled else lambda function, **options: function
        self.optimizer = pair.optimizers and pair.optimizers[0]
        self.trained = {name: x for name, x in model.params.items() if name in trained}
        self.fixed = {name: x for name, x in model.params.items() if name not in trained}

    def timed(self, part: str) -> Timed:
        """One of speed.PARTS."""
        if part == "forward":
            run = self.compiled(lambda *args: self.model.apply(*args, False)[0])
            args = (self.model.params, self.model.state, self.model.inputs)
            return Timed(lambda: jax.block_until_ready(run(*args)), lambda outputs: float(_mean_square(outputs)))
        if part == "forward_backward":
            by = self.trained or floating(self.model.inputs)
            gradient = self.compiled(jax.value_and_grad(self._loss, has_aux=True))
            args = (by, self.fixed, self.model.state, self.model.inputs)
            return Timed(lambda: jax.block_until_ready(gradient(*args)), lambda result: float(result[0][0]))
        return self._step()

    def _loss(self, by: Any, fixed: Arrays, state: Arrays, inputs: tuple) -> tuple[Any, Arrays]:
        if isinstance(by, tuple):
            rest = iter(by)
            by, inputs = {}, map_floating(inputs, lambda _: next(rest), is_floating=is_floating)
        outputs, state = self.model.apply(by | fixed, state, inputs, self.is_training)
        return _mean_square(outputs), state

    def _step(self) -> Timed:
        import optax

        @functools.partial(self.compiled, donate_argnums=0)
        def step(held: tuple, fixed: Arrays, inputs: tuple) -> tuple:
            params, state, memory = held
            (loss, state), grads = jax.value_and_grad(self._loss, has_aux=True)(params, fixed, state, inputs)
            updates, memory = self.optimizer.update(by_parts(grads), memory, params)
            return (optax.apply_updates(params, updates), state, memory), loss

        params = jax.tree.map(jnp.copy, (self.trained, self.model.state))
        held = [(*params, self.optimizer.init(params[0]))]

        def call() -> Any:
            held[0], loss = jax.block_until_ready(step(held[0], self.fixed, self.model.inputs))
            return loss

        return Timed(call, float)


class TorchArm:
    """A copy of the PyTorch module; if compiled, loss and gradient are one function, the optimiser's update another."""

    as_numpy = staticmethod(torch_side.as_numpy)

    def __init__(self, pair: Pair, weights: proof.Weights, *, dtype: str, is_compiled: bool):
        side = torch_side.TorchSide(pair.torch_module, dtype=dtype, pick=pair.torch_outputs)
        side.load(weights.tensors)
        self.module, self.pick = side.module, side.pick
        self.compiled = functools.partial(torch.compile, dynamic=False) if is_compiled else lambda function: function
        self.inputs = side.tensors_of(proof.wide(pair.inputs))
        self.optimizer = pair.optimizers and pair.optimizers[1]
        self.is_training = weights.is_training
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in weights.trained_tensors)
        self.trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def timed(self, part: str) -> Timed:
        """One of speed.PARTS."""
        if part == "forward":
            self.module.eval()
            run = self.compiled(self._outputs)

            def forward() -> Any:
                with torch.inference_mode():
                    return run(*self.inputs)

            return Timed(forward, lambda outputs: float(_mean_square(outputs)))
        self.module.train(self.is_training)
        by = self.trained or torch_side.floating(self.inputs)
        for x in by:
            x.requires_grad_(True)
        loss_of = self.compiled(lambda *inputs: _mean_square(self._outputs(*inputs)))
        update, finish = None, lambda: None
        if part == "step":
            update = self.optimizer(self.trained)
            finish = self.compiled(update.step)

        def call() -> Any:
            for x in by:
                x.grad = None
            loss = loss_of(*self.inputs)
            loss.backward()
            finish()
            return loss.detach()

        return Timed(call, float)

    def _outputs(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        return torch_side.floating(self.pick(self.module(*inputs)))


def of_jax(pair: Pair, weights: proof.Weights, dtype: str) -> Functional:
    """Build the pair's own JAX model with PyTorch's weights; a model without a batch axis runs under jax.vmap."""
    wide = proof.wide(pair.inputs)
    model = proof.opened(pair, wide, key=0)
    cast = functools.partial(_cast, dtype=dtype)
    params, state = (
        cast({name: weights.arrays.get(name, x) for name, x in each.items()}) for each in (model.params, model.state)
    )
    pick = pair.jax_outputs or (lambda outputs: outputs)

    def apply(params: Arrays, state: Arrays, inputs: tuple, is_training: bool) -> tuple[tuple, Arrays]:
        if pair.per_example:
            one = lambda *inputs: floating(pick(model.apply(params, state, inputs, is_training, None)[0]))
            return jax.vmap(one)(*inputs), state
        outputs, state = model.apply(params, state, inputs, is_training, None)
        return floating(pick(outputs)), state

    inputs = wide if pair.jax_inputs is None else pair.jax_inputs(*wide)
    return Functional(params, state, apply, cast(inputs))


def of_torchax(pair: Pair, weights: proof.Weights, dtype: str) -> Functional:
    """Wrap the PyTorch module with torchax."""
    import torchax

    _check_wrapped("torchax", weights)
    module = copy.deepcopy(pair.torch_module).eval()
    _, function = torchax.extract_jax(module, dedup_parameters=False)
    named = {name: x for kind in ("parameters", "buffers") for name, x in _named(module, kind)}
    return _wrapped(pair, weights, dtype, named, function)


def of_torch2jax(pair: Pair, weights: proof.Weights, dtype: str) -> Functional:
    """Wrap the PyTorch module with torch2jax."""
    import torch2jax

    _check_wrapped("torch2jax", weights)
    module = copy.deepcopy(pair.torch_module).eval()
    function = torch2jax.t2j(module)
    named = module.state_dict(keep_vars=True)
    return _wrapped(pair, weights, dtype, named, lambda state, inputs: function(*inputs, state_dict=state))


def _check_wrapped(library: str, weights: proof.Weights) -> None:
    if weights.is_training:
        raise ValueError(f"{library}: is_training={weights.is_training}: it returns no batch statistics after a call")


def _named(module: torch.nn.Module, kind: str) -> Any:
    """Return (name, tensor) of parameters or buffers; tied ones under each of their names."""
    return getattr(module, f"named_{kind}")(remove_duplicate=False)


def _wrapped(
    pair: Pair, weights: proof.Weights, dtype: str, named: Mapping[str, torch.Tensor], function: Callable[..., Any]
) -> Functional:
    """Build the Functional of a wrapped module; its arrays have PyTorch's names, tied ones are one array."""
    first: dict[int, str] = {}
    owner = {name: first.setdefault(id(x), name) for name, x in named.items()}
    held = {name: weights.tensors.get(name, named[name].detach().numpy()) for name in first.values()}
    params = {name: x for name, x in held.items() if isinstance(named[name], torch.nn.Parameter)}
    state = {name: x for name, x in held.items() if name not in params}
    pick = pair.torch_outputs or (lambda outputs: outputs)

    def apply(params: Arrays, state: Arrays, inputs: tuple, is_training: bool) -> tuple[tuple, Arrays]:
        arrays = params | state
        return floating(pick(function({name: arrays[own] for name, own in owner.items()}, inputs))), state

    inputs = _cast(proof.wide(pair.inputs), dtype=dtype)
    return Functional(_cast(params, dtype=dtype), _cast(state, dtype=dtype), apply, inputs)


def _cast(tree: Any, *, dtype: str) -> Any:
    """Convert nested arrays to JAX's, casting the floating ones to a dtype."""
    tree = map_floating(tree, lambda x: as_type(x, dtype), is_floating=is_floating)
    return map_floating(tree, jnp.asarray, is_floating=lambda x: isinstance(x, np.ndarray))


def _mean_square(outputs: tuple) -> Any:
    """Return the objective."""
    return sum((y * y.conj()).real.mean() / 2 for y in outputs)
