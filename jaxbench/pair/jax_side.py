"""The JAX side of a pair as a function of PyTorch's tensors: outputs, module calls, gradients and optimiser steps.

The weight rules are part of that function, so its gradients are with respect to PyTorch's tensors and need no mapping.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxbench.pair.draws import Term
from jaxbench.pair.jax_model import Handler, JaxModel, as_type, is_floating
from jaxbench.parity import distance
from jaxbench.parity.capture import ROOT, Call, Outputs, call_names, in_order_of, map_floating, outputs_of


class Watched(NamedTuple):
    """One call of the whole model."""

    outputs: Outputs
    state: dict[str, Any]  # after the call
    calls: dict[str, Call]  # of the modules inside, `name#1` for a module's second call; ROOT's has all outputs
    order: tuple[str, ...]  # modules by the end of their first call, including those whose values jax.vmap hides


class JaxSide:
    """A JAX model in one dtype. Float64 needs `jax.enable_x64(True)` around every call.

    Args:
      model: as returned by jax_model.open_model.
      to_arrays: makes the model's arrays from PyTorch's tensors, both by name.
      dtype: float64, float32 or bfloat16, of parameters, state and inputs.
      to_inputs: maps the shared inputs to the JAX model's own, such as another image layout.
      pick: chooses from the model's outputs what is compared.
      per_example: the model takes one example without a batch axis; it is called once for every example.
      trees: output tree of the first watched call, by is_training; all later calls follow its order. Shared between
        sides.
    """

    def __init__(
        self,
        model: JaxModel,
        to_arrays: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        *,
        dtype: str,
        to_inputs: Callable[..., tuple] | None = None,
        pick: Callable[[Any], Any] | None = None,
        per_example: bool = False,
        trees: dict[bool, Any] | None = None,
    ):
        self.model, self.to_arrays, self.dtype = model, to_arrays, jnp.dtype(dtype)
        self.to_inputs = to_inputs or (lambda *inputs: inputs)
        self.pick = pick or (lambda outputs: outputs)
        self.per_example = per_example
        self.trees = {} if trees is None else trees

    def cast(self, tree: Any) -> Any:
        """Cast the floating arrays of nested ones to this side's dtype."""
        return map_floating(tree, lambda x: as_type(x, self.dtype), is_floating=is_floating)

    def run(self, tensors: Mapping[str, np.ndarray], inputs: tuple, *, is_training: bool) -> tuple[Any, ...]:
        """Call the model and return its floating outputs from left to right."""
        return self._eagerly(tensors, inputs, is_training, lambda example: None)[0].floating

    def watched(self, tensors: Mapping[str, np.ndarray], inputs: tuple, *, is_training: bool) -> Watched:
        """Call the model and record the floating inputs and outputs of every module call and every tap."""
        examples: list[dict[str, Call]] = []
        order: dict[str, None] = {}

        def recorder(example: int | None) -> Handler:
            calls, name_of_call = {}, call_names()
            examples.append(calls)

            def record(name: str, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
                given = floating((args, kwargs))
                result = call(*args, **kwargs)
                made = floating(result)
                order.setdefault(name)
                if made and not _is_traced((given, made)):
                    calls[name_of_call(name)] = Call(given, made, whole((args, kwargs)))
                return result

            return record

        outputs, state = self._eagerly(tensors, inputs, is_training, recorder)
        self.trees.setdefault(is_training, outputs.tree)
        return Watched(outputs, state, self._stacked(examples, outputs), tuple(order))

    def forced(
        self, tensors: Mapping[str, np.ndarray], inputs: tuple, given: Mapping[str, Call], *, is_training: bool
    ) -> dict[str, Call]:
        """Call the model with its modules forced to the twin's tensors (teacher forcing), to its integers where given.

        Every module in `given` computes on the twin's inputs, and its caller gets the twin's outputs. The result holds,
        by call, the inputs that its caller passed and the outputs that it computed itself.

        Args:
          tensors: PyTorch's parameters and buffers.
          inputs: of the whole model.
          given: the twin's inputs and outputs by call, in this model's layout; None for a tensor that the twin lacks or
            has in another shape.
          is_training: training mode.
        """
        examples: list[dict[str, Call]] = []

        def forcer(example: int | None) -> Handler:
            calls, name_of_call = {}, call_names()
            examples.append(calls)
            here = lambda x: x if example is None or x is None else x[example]

            def force(name: str, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
                handed = floating((args, kwargs))
                if name == ROOT or _is_traced(handed) or (name := name_of_call(name)) not in given:
                    return call(*args, **kwargs)
                values = zip(handed, map(here, given[name].inputs), strict=True)
                forced_to = [own if x is None else self.cast(x) for own, x in values]
                args, kwargs, numbers = *_replaced((args, kwargs), forced_to), whole((args, kwargs))
                if given[name].whole:
                    args, kwargs = _replaced_whole((args, kwargs), map(here, given[name].whole))
                result = call(*args, **kwargs)
                made = floating(result)
                calls[name] = Call(handed, made, numbers)
                values = zip(made, map(here, given[name].outputs), strict=True)
                return _replaced(result, [own if x is None else self.cast(x) for own, x in values])

            return force

        outputs, _ = self._eagerly(tensors, inputs, is_training, forcer)
        return self._stacked(examples, outputs)

    def _eagerly(
        self, tensors: Mapping[str, np.ndarray], inputs: tuple, is_training: bool,
        handler_of: Callable[[int | None], Handler | None],
    ) -> tuple[Outputs, dict]:  # fmt: skip
        """Call the model eagerly: loops are unrolled, nothing is compiled, a handler sees every module's values."""
        with jax.disable_jit():
            return self._apply(self.cast(dict(tensors)), self.cast(inputs), is_training, handler_of)

    def _stacked(self, examples: list[dict[str, Call]], outputs: Outputs) -> dict[str, Call]:
        """Stack the calls of all examples into calls of the batch; ROOT's outputs are those that the pair compares."""
        stack = lambda parts: tuple(jnp.stack(each) for each in zip(*parts, strict=True))
        calls = {
            name: Call(*(stack([getattr(calls[name], field) for calls in examples]) for field in Call._fields))
            for name in (examples[0] if self.per_example else ())
        }
        return (calls or examples[0]) | {ROOT: Call((), outputs.floating)}

    def gradients(
        self, tensors: Mapping[str, np.ndarray], inputs: tuple, terms: tuple[Term, ...], *,
        to_targets: Callable[[tuple], tuple], is_training: bool,
    ) -> tuple[np.ndarray, dict[str, np.ndarray], tuple[np.ndarray, ...]]:  # fmt: skip
        """Return the loss and its gradients with respect to PyTorch's tensors and the floating inputs.

        to_targets arranges the outputs as PyTorch's.
        """
        objective = functools.partial(self._objective, terms=terms, to_targets=to_targets, is_training=is_training)
        given = floating(self.cast(inputs))
        loss_fn = lambda tensors, given: objective(tensors, _replaced(inputs, given))
        loss, (grads, by_input) = jax.jit(jax.value_and_grad(loss_fn, argnums=(0, 1)))(self.cast(dict(tensors)), given)
        return np.asarray(loss), as_numpy(by_parts(grads)), tuple(map(distance.widest, by_parts(by_input)))

    def steps(
        self, tensors: Mapping[str, np.ndarray], trained: frozenset[str], inputs: tuple,
        terms: tuple[Term, ...], optimizer: Any, *, to_targets: Callable[[tuple], tuple], num_steps: int,
        is_training: bool,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:  # fmt: skip
        """Run optimiser steps (an optax transformation) on one batch; return their losses and the trained arrays.

        What is trained are the model's own arrays, as the caller would train them: two made from one tensor part. State
        goes from step to step.
        """
        import optax

        arrays, state = self._arrays(self.cast(dict(tensors)))
        fixed = {name: x for name, x in arrays.items() if name not in trained}
        params = {name: _parted(x) for name, x in arrays.items() if name in trained}
        is_complex = {name for name in params if jnp.iscomplexobj(arrays[name])}
        whole = lambda params: {name: jax.lax.complex(*x) if name in is_complex else x for name, x in params.items()}
        given = self.cast(inputs)

        def loss_fn(params: Any, state: Any) -> tuple[Any, Any]:
            outputs, after = self._called(whole(params) | fixed, state, given, is_training, lambda example: None)
            return _loss(outputs, terms, to_targets), after

        @jax.jit
        def step(params: Any, state: Any, memory: Any) -> tuple[Any, Any, Any, Any]:
            (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, state)
            updates, memory = optimizer.update(grads, memory, params)
            return optax.apply_updates(params, updates), state, memory, loss

        memory, losses = optimizer.init(params), []
        for _ in range(num_steps):
            params, state, memory, loss = step(params, state, memory)
            losses.append(np.asarray(loss))
        return np.array(losses), as_numpy(whole(params))

    def _objective(self, tensors: Any, inputs: tuple, *, terms: Any, to_targets: Any, is_training: bool) -> Any:
        outputs, _ = self._apply(tensors, inputs, is_training, lambda example: None)
        return _loss(outputs, terms, to_targets)

    def _apply(
        self, tensors: Any, inputs: tuple, is_training: bool, handler_of: Callable[[int | None], Handler | None]
    ) -> tuple[Outputs, dict]:
        return self._called(*self._arrays(tensors), inputs, is_training, handler_of)

    def _arrays(self, tensors: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the model's parameters and state, made from PyTorch's tensors."""
        arrays = self.cast(dict(self.to_arrays(tensors)))
        params = {name: arrays[name] for name in self.model.params}
        return params, {name: arrays.get(name, value) for name, value in self.model.state.items()}

    def _called(
        self, params: Any, state: Any, inputs: tuple, is_training: bool,
        handler_of: Callable[[int | None], Handler | None],
    ) -> tuple[Outputs, dict]:  # fmt: skip
        given = self.to_inputs(*inputs)
        if not self.per_example:
            result, after = self.model.apply(params, state, given, is_training, handler_of(None))
            return self._outputs(result, is_training), after
        results = []
        for i in range(len(jax.tree.leaves(given)[0])):
            example = jax.tree.map(lambda x: x[i], given)  # noqa: B023
            result, _ = self.model.apply(params, state, example, is_training, handler_of(i))
            results.append(self._outputs(result, is_training))
        # a plain number became a 0-d numpy array, which has no batch axis
        stack = lambda parts: parts[0] if isinstance(parts[0], np.ndarray) and not parts[0].ndim else jnp.stack(parts)
        arrays = [tuple(stack(parts) for parts in zip(*each, strict=True)) for each in list(zip(*results))[:2]]
        return Outputs(*arrays, results[0].tree), state

    def _outputs(self, result: Any, is_training: bool) -> Outputs:
        outputs = outputs_of(self.pick(result), kind_of=kind_of)
        return in_order_of(outputs, self.trees[is_training]) if is_training in self.trees else outputs


def _is_traced(arrays: Any) -> bool:
    """True inside a transformation such as vmap, where arrays are tracers without values."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays))


def floating(tree: Any) -> tuple[Any, ...]:
    """Return the floating arrays of nested tuples, lists and dictionaries, from left to right."""
    arrays: list[Any] = []
    map_floating(tree, arrays.append, is_floating=is_floating)
    return tuple(arrays)


def _loss(outputs: Outputs, terms: tuple[Term, ...], to_targets: Callable[[tuple], tuple]) -> Any:
    """Return the objective: the sum of all terms."""
    pairs = zip(to_targets(outputs.floating), terms, strict=True)
    return sum(jnp.mean(_square(_difference(y, term))) / 2 for y, term in pairs if y.size)


def whole(tree: Any) -> tuple[Any, ...]:
    """Return the integer arrays of nested tuples, lists and dictionaries, from left to right."""
    arrays: list[Any] = []
    map_floating(tree, arrays.append, is_floating=_is_whole)
    return tuple(arrays)


def _is_whole(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.integer)


def _replaced_whole(tree: Any, values: Any) -> Any:
    """Replace the integer arrays of a tree by others, from left to right."""
    rest = iter(values)
    return map_floating(tree, lambda own: jnp.asarray(next(rest), own.dtype), is_floating=_is_whole)


def _difference(y: Any, term: Term) -> Any:
    """Return output / size - target; 0 where the target is NaN, which marks an infinite output."""
    target, y = term.target, y / term.size
    is_infinite = np.isnan(target)
    if not is_infinite.any():
        return y - jnp.asarray(target, y.dtype)
    return jnp.where(is_infinite, 0.0, y) - jnp.asarray(np.where(is_infinite, 0.0, target), y.dtype)


def _square(x: Any) -> Any:
    """Return squared absolute values."""
    return x.real**2 + x.imag**2 if jnp.iscomplexobj(x) else x**2


def by_parts(gradients: Any) -> Any:
    """Return complex gradients in PyTorch's convention, the conjugate of JAX's: d/d(real) + i d/d(imaginary)."""
    return jax.tree.map(jnp.conj, gradients)


def _parted(x: Any) -> Any:
    """Split complex numbers into (real part, imaginary part), which PyTorch's optimisers update separately."""
    return (x.real, x.imag) if jnp.iscomplexobj(x) else x


def kind_of(x: Any) -> str:
    """Return the kind of an output, as capture.outputs_of expects it."""
    if is_floating(x):
        return "floating"
    is_array = isinstance(x, jax.Array | np.ndarray)
    is_exact = is_array and (jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, jnp.bool_))
    return "exact" if is_exact else ""


def _replaced(tree: Any, values: Any) -> Any:
    """Replace the floating arrays of a tree by others, from left to right."""
    rest = iter(values)
    return map_floating(tree, lambda _: next(rest), is_floating=is_floating)


def as_numpy(tree: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return arrays by name as numpy's, in float64 or complex128."""
    return {name: distance.widest(x) for name, x in tree.items()}
