"""The JAX side of a pair, as a function of PyTorch's tensors: outputs, module calls, gradients and optimiser steps.

The weights' rules are part of the function, so its gradients are by PyTorch's tensors and need no rules of their own.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxbench.pair.jax_model import Handler, JaxModel, as_type, is_floating
from jaxbench.parity import distance
from jaxbench.parity.capture import ROOT, Call, Outputs, in_order_of, map_floating, outputs_of


class Watched(NamedTuple):
    """One call of the whole model."""

    outputs: Outputs
    state: dict[str, Any]  # after it
    calls: dict[str, Call]  # of the modules inside, `name#1` for a module's second call; the model's has all outputs
    order: tuple[str, ...]  # modules by the end of their first call, those too whose numbers jax.vmap hides


class JaxSide:
    """A JAX model in one number type. Float64 needs `jax.enable_x64(True)` around every call.

    Args:
      model: taken apart by jax_model.open_model.
      to_arrays: the model's arrays out of PyTorch's tensors, by name.
      dtype: float64, float32 or bfloat16, of parameters, state and inputs.
      to_inputs: function of the shared inputs that gives the JAX model's own, such as another layout of an image.
      pick: function of the model's outputs that chooses what is compared.
      per_example: the model takes one example without a batch axis; the calls are those of every example in turn.
      trees: places of the outputs by is_training, of the first call that was watched: the order of all others; shared.
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
        """Nested arrays with the floating ones in this side's type."""
        return map_floating(tree, lambda x: as_type(x, self.dtype), is_floating=is_floating)

    def run(self, tensors: Mapping[str, np.ndarray], inputs: tuple, *, is_training: bool) -> tuple[Any, ...]:
        """Floating outputs from left to right."""
        return self._eagerly(tensors, inputs, is_training, lambda example: None)[0].floating

    def watched(self, tensors: Mapping[str, np.ndarray], inputs: tuple, *, is_training: bool) -> Watched:
        """One call with the floating inputs and outputs of every module's call, and of every tap."""
        examples: list[dict[str, Call]] = []
        order: dict[str, None] = {}

        def recorder(example: int | None) -> Handler:
            calls, key = {}, _counted()
            examples.append(calls)

            def record(name: str, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
                given = floating((args, kwargs))
                result = call(*args, **kwargs)
                made = floating(result)
                order.setdefault(name)
                if made and not _is_traced((given, made)):
                    calls[key(name)] = Call(given, made)
                return result

            return record

        outputs, state = self._eagerly(tensors, inputs, is_training, recorder)
        self.trees.setdefault(is_training, outputs.tree)
        return Watched(outputs, state, self._stacked(examples, outputs), tuple(order))

    def forced(
        self, tensors: Mapping[str, np.ndarray], inputs: tuple, given: Mapping[str, Call], *, is_training: bool
    ) -> dict[str, Call]:
        """Calls made on the twin's tensors (teacher forcing), by name: what each was handed, and its own outputs.

        Args:
          tensors: PyTorch's parameters and buffers.
          inputs: of the whole model.
          given: the twin's inputs and outputs by call, in this model's layout; None for one that the twin lacks, or
            that has another shape there.
          is_training: training mode.
        """
        examples: list[dict[str, Call]] = []

        def forcer(example: int | None) -> Handler:
            calls, key = {}, _counted()
            examples.append(calls)
            here = lambda x: x if example is None or x is None else x[example]

            def force(name: str, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
                handed = floating((args, kwargs))
                if name == ROOT or _is_traced(handed) or (name := key(name)) not in given:
                    return call(*args, **kwargs)
                values = zip(handed, map(here, given[name].inputs), strict=True)
                forced_to = [own if x is None else self.cast(x) for own, x in values]
                args, kwargs = _replaced((args, kwargs), forced_to)
                result = call(*args, **kwargs)
                made = floating(result)
                calls[name] = Call(handed, made)
                values = zip(made, map(here, given[name].outputs), strict=True)
                return _replaced(result, [own if x is None else self.cast(x) for own, x in values])

            return force

        outputs, _ = self._eagerly(tensors, inputs, is_training, forcer)
        return self._stacked(examples, outputs)

    def _eagerly(
        self, tensors: Mapping[str, np.ndarray], inputs: tuple, is_training: bool,
        handler_of: Callable[[int | None], Handler | None],
    ) -> tuple[Outputs, dict]:  # fmt: skip
        """Call the model op by op: loops are unrolled, nothing is compiled, a handler sees every module's numbers."""
        with jax.disable_jit():
            return self._apply(self.cast(dict(tensors)), self.cast(inputs), is_training, handler_of)

    def _stacked(self, examples: list[dict[str, Call]], outputs: Outputs) -> dict[str, Call]:
        """Calls of all examples as calls of the batch; the model's own outputs are what the pair compares."""
        stack = lambda parts: tuple(jnp.stack(each) for each in zip(*parts, strict=True))
        calls = {
            name: Call(*(stack([getattr(calls[name], field) for calls in examples]) for field in Call._fields))
            for name in (examples[0] if self.per_example else ())
        }
        return (calls or examples[0]) | {ROOT: Call((), outputs.floating)}

    def gradients(
        self, tensors: Mapping[str, np.ndarray], inputs: tuple, targets: tuple[np.ndarray, ...], *,
        to_targets: Callable[[tuple], tuple], is_training: bool,
    ) -> tuple[np.ndarray, dict[str, np.ndarray], tuple[np.ndarray, ...]]:  # fmt: skip
        """Loss, and its gradients by PyTorch's tensors and by floating inputs; to_targets arranges the outputs."""
        objective = functools.partial(self._objective, targets=targets, to_targets=to_targets, is_training=is_training)
        given = floating(self.cast(inputs))
        loss_fn = lambda tensors, given: objective(tensors, _replaced(inputs, given))
        loss, (grads, by_input) = jax.jit(jax.value_and_grad(loss_fn, argnums=(0, 1)))(self.cast(dict(tensors)), given)
        return np.asarray(loss), as_numpy(by_parts(grads)), tuple(map(distance.widest, by_parts(by_input)))

    def steps(
        self, tensors: Mapping[str, np.ndarray], trained: frozenset[str], inputs: tuple,
        targets: tuple[np.ndarray, ...], optimizer: Any, *, to_targets: Callable[[tuple], tuple], num_steps: int,
        is_training: bool,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:  # fmt: skip
        """Losses of optimiser steps (an optax transformation) on one batch, and the trained tensors after the last."""
        import optax

        objective = functools.partial(self._objective, targets=targets, to_targets=to_targets, is_training=is_training)
        tensors = self.cast(dict(tensors))
        fixed = {name: x for name, x in tensors.items() if name not in trained}
        params = {name: _parted(x) for name, x in tensors.items() if name in trained}
        is_complex = {name for name in params if jnp.iscomplexobj(tensors[name])}
        whole = lambda params: {name: jax.lax.complex(*x) if name in is_complex else x for name, x in params.items()}
        inputs = self.cast(inputs)

        @jax.jit
        def step(params: Any, state: Any) -> tuple[Any, Any, Any]:
            loss, grads = jax.value_and_grad(lambda params: objective(whole(params) | fixed, inputs))(params)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        state, losses = optimizer.init(params), []
        for _ in range(num_steps):
            params, state, loss = step(params, state)
            losses.append(np.asarray(loss))
        return np.array(losses), as_numpy(whole(params))

    def _objective(self, tensors: Any, inputs: tuple, *, targets: Any, to_targets: Any, is_training: bool) -> Any:
        outputs, _ = self._apply(tensors, inputs, is_training, lambda example: None)
        pairs = zip(to_targets(outputs.floating), targets, strict=True)
        return sum(jnp.mean(_square(_difference(y, t))) / 2 for y, t in pairs if y.size)

    def _apply(
        self, tensors: Any, inputs: tuple, is_training: bool, handler_of: Callable[[int | None], Handler | None]
    ) -> tuple[Outputs, dict]:
        arrays = self.cast(dict(self.to_arrays(tensors)))
        params = {name: arrays[name] for name in self.model.params}
        state = {name: arrays.get(name, value) for name, value in self.model.state.items()}
        given = self.to_inputs(*inputs)
        if not self.per_example:
            result, after = self.model.apply(params, state, given, is_training, handler_of(None))
            return self._outputs(result, is_training), after
        results = []
        for i in range(len(jax.tree.leaves(given)[0])):
            example = jax.tree.map(lambda x: x[i], given)  # noqa: B023
            result, _ = self.model.apply(params, state, example, is_training, handler_of(i))
            results.append(self._outputs(result, is_training))
        # a plain number is a numpy array of no axis, and has no batch
        stack = lambda parts: parts[0] if isinstance(parts[0], np.ndarray) and not parts[0].ndim else jnp.stack(parts)
        arrays = [tuple(stack(parts) for parts in zip(*each, strict=True)) for each in list(zip(*results))[:2]]
        return Outputs(*arrays, results[0].tree), state

    def _outputs(self, result: Any, is_training: bool) -> Outputs:
        outputs = outputs_of(self.pick(result), kind_of=kind_of)
        return in_order_of(outputs, self.trees[is_training]) if is_training in self.trees else outputs


def _is_traced(arrays: Any) -> bool:
    """True inside a transformation such as vmap, whose numbers nobody outside can see."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays))


def _counted() -> Callable[[str], str]:
    """Function that names the calls of one module apart: name, name#1, name#2."""
    counts: collections.Counter[str] = collections.Counter()

    def key(name: str) -> str:
        counts[name] += 1
        return name if counts[name] == 1 else f"{name}#{counts[name] - 1}"

    return key


def floating(tree: Any) -> tuple[Any, ...]:
    """Floating arrays of nested tuples, lists and dictionaries, from left to right."""
    arrays: list[Any] = []
    map_floating(tree, arrays.append, is_floating=is_floating)
    return tuple(arrays)


def _difference(y: Any, target: np.ndarray) -> Any:
    """Output less its target; 0 where the target is NaN, that is where the output is infinite."""
    is_infinite = np.isnan(target)
    if not is_infinite.any():
        return y - jnp.asarray(target, y.dtype)
    return jnp.where(is_infinite, 0.0, y) - jnp.asarray(np.where(is_infinite, 0.0, target), y.dtype)


def _square(x: Any) -> Any:
    """Squares of absolute values."""
    return x.real**2 + x.imag**2 if jnp.iscomplexobj(x) else x**2


def by_parts(gradients: Any) -> Any:
    """Gradients as PyTorch has those by complex numbers: by the real part + i times by the imaginary one."""
    return jax.tree.map(jnp.conj, gradients)


def _parted(x: Any) -> Any:
    """Complex numbers as (real part, imaginary part), which PyTorch's optimisers move as numbers of their own."""
    return (x.real, x.imag) if jnp.iscomplexobj(x) else x


def kind_of(x: Any) -> str:
    """Kind of an output, as capture.outputs_of takes it."""
    if is_floating(x):
        return "floating"
    is_array = isinstance(x, jax.Array | np.ndarray)
    is_exact = is_array and (jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, jnp.bool_))
    return "exact" if is_exact else ""


def _replaced(tree: Any, values: Any) -> Any:
    """Tree with its floating arrays replaced by others, from left to right."""
    rest = iter(values)
    return map_floating(tree, lambda _: next(rest), is_floating=is_floating)


def as_numpy(tree: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays by name in float64 or complex128."""
    return {name: distance.widest(x) for name, x in tree.items()}
