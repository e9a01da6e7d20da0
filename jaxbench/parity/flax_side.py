"""The Flax side of the parity engine: one case run with jaxbench, captured without changing the models.

The modules' calls are intercepted: each output is kept, a zero is added to it to differentiate by, or the call is made
on the twin's recorded inputs. The Equinox side (equinox_side.py) is this one with other modules.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbench import attention, functional, parameters, prng
from jaxbench.config import TransformerConfig
from jaxbench.parity import capture, products
from jaxbench.parity.cases import Arrays, Case
from jaxbench.training import optimizer_step, precision
from jaxbench.training.intercept import intercepted, nnx_modules
from jaxbench.training.step_config import StepConfig


class Side:
    """One case's model in one dtype. Float64 needs `jax.enable_x64(True)` around every call."""

    name = "flax"
    package = "jaxbench"
    modules_of = staticmethod(nnx_modules)

    def __init__(self, case: Case, config: TransformerConfig, params: Mapping[str, np.ndarray], *, dtype: str):
        self.case, self.dtype = case, dtype
        self.nn = importlib.import_module(f"{self.package}.nn")
        self.task = importlib.import_module(f"jaxbench.{case.task}")
        module = importlib.import_module(f"{self.package}.{case.module}")
        self._hold(module.build(config, params, dtype=dtype, **case.options_in(dtype)))

    def _hold(self, model: Any) -> None:
        self.model = model
        self.graph, self.params = parameters.split(model)

    @property
    def is_captured(self) -> bool:
        """True if every module's output can be captured, not only the model's."""
        return not self.case.is_scanned

    def get_params(self) -> dict[str, np.ndarray]:
        """Parameters of the model by dotted name."""
        return self.nn.get_params(self.model)

    def load_params(self, params: Mapping[str, np.ndarray]) -> None:
        """Load parameters strictly."""
        self._hold(self.nn.load_params(self.model, params))

    def products(self) -> dict[str, np.ndarray]:
        """This backend's products of products.operands and attention of products.attended: gate P3."""
        left, right, gradient = map(jnp.asarray, products.operands(self.dtype))
        query, key, value = map(jnp.asarray, products.attended(self.dtype))
        positions = jnp.arange(2)[None]
        product, pull = jax.vjp(jax.jit(functional.matmul), left, right)
        spans = attention.Spans(positions, positions)
        mixed = jax.jit(functools.partial(attention.attention, implementation="dense"))(query, key, value, spans)
        found = {"product": product, "gradient": pull(gradient)[0], "attention": mixed[0, :, 0]}
        return {name: np.asarray(x) for name, x in found.items()}

    def trace(self, arrays: Arrays, *, gradients: bool, seed: int | None) -> capture.Trace:
        """Loss, every module's output and, with gradients, gradients of outputs and parameters; seed: of dropout."""
        batch, dropout = self._batch(arrays), _dropout(seed, 0)
        if not gradients:
            loss, outputs = self._forward(self.params, {}, batch, dropout)
            return capture.Trace(np.asarray(loss), _numpy(outputs), {}, {})
        _, shapes = jax.eval_shape(self._forward, self.params, {}, batch, dropout)
        hooked = shapes if self.is_captured else {}
        deltas = {name: np.zeros(shape.shape, shape.dtype) for name, shape in hooked.items()}
        (loss, outputs), (grads, output_grads) = self._backward(self.params, deltas, batch, dropout)
        return capture.Trace(np.asarray(loss), _numpy(outputs), _numpy(output_grads), _numpy(grads))

    def _batch(self, arrays: Arrays) -> Any:
        return self.task.Batch(*(None if x is None else jnp.asarray(x) for x in arrays))

    @functools.cached_property
    def _forward(self) -> Callable[..., Any]:
        return jax.jit(self._loss)

    @functools.cached_property
    def _backward(self) -> Callable[..., Any]:
        return jax.jit(jax.value_and_grad(self._loss, argnums=(0, 1), has_aux=True))

    def _loss(self, params: Any, deltas: dict, batch: Any, dropout: Any) -> tuple[Any, dict]:
        """Loss and every module's output; deltas are added to outputs, to differentiate with respect to them."""
        model, outputs = parameters.merge(self.graph, params), {}

        def watch(name: str, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            result = call(*args, **kwargs)
            if name in deltas:
                first, *rest = _floating(result)
                result = _replace(result, (first + deltas[name], *rest), where=f"output of {name}")
            outputs[name] = _floating(result)[0]
            return result

        modules = self.modules_of(model, root=capture.ROOT) if self.is_captured else ()
        with intercepted(modules, watch):
            logits = self.task.predict(model, batch, dropout=dropout)
        return self.task.loss_of(logits, batch), outputs or {capture.ROOT: _floating(logits)[0]}

    def forced(
        self, arrays: Arrays, reference: Mapping[str, capture.Call], *, seed: int | None
    ) -> dict[str, capture.Call]:
        """Inputs and first output of every module's call, each made on the reference's tensors (teacher forcing).

        Each module's own error is isolated: its inputs and the results of its inner modules are the reference's.
        """
        given = {
            name: capture.Call(*(tuple(map(jnp.asarray, part)) for part in call)) for name, call in reference.items()
        }

        return self._forced(self.params, given, self._batch(arrays), _dropout(seed, 0))

    @functools.cached_property
    def _forced(self) -> Callable[..., Any]:
        @jax.jit
        def run(params: Any, given: dict, batch: Any, dropout: Any) -> dict[str, capture.Call]:
            model, calls = parameters.merge(self.graph, params), {}

            def force(name: str, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
                handed = _floating((args, kwargs))
                args, kwargs = _replace((args, kwargs), given[name].inputs, where=f"input of {name}")
                result = call(*args, **kwargs)
                first, *rest = _floating(result)
                calls[name] = capture.Call(handed, (first,))
                return _replace(result, (*given[name].outputs, *rest), where=f"output of {name}")

            with intercepted(self.modules_of(model, root=capture.ROOT), force):
                self.task.predict(model, batch, dropout=dropout)
            return calls

        return run

    def train(
        self, steps: list[Arrays], step_config: StepConfig, *, learning_rates: Sequence[float], seed: int
    ) -> capture.Training:
        """Losses and final state of optimiser steps in the model's type, dropout on."""
        step_fn = jax.jit(
            functools.partial(optimizer_step.train_step, step_config=step_config, loss_fn=self.task.loss_fn)
        )
        state = optimizer_step.init_state(self.model, self.params, step_config, policy=precision.uniform(self.dtype))
        losses, key = [], prng.key_from_seed(seed)
        for arrays, learning_rate in zip(steps, learning_rates, strict=True):
            state, metrics = step_fn(state, self._batch(arrays), learning_rate, key)
            losses.append(metrics.loss)
        return capture.Training(np.array(losses), optimizer_step.state_arrays(state))

    def decode(self, arrays: Arrays, *, prompt: int) -> capture.Decoding:
        """Logits [B T V] by one call, and by a prefill of `prompt` tokens followed by the case's cached calls."""

        @jax.jit
        def features(params: Any, tokens: Any, positions: Any, cache: Any, slot: Any) -> tuple[Any, Any]:
            model = parameters.merge(self.graph, params)
            hidden, cache = model.features(tokens, positions, cache=cache, slot=slot)
            return model.logits(hidden), cache

        tokens, positions = jnp.asarray(arrays.tokens), jnp.asarray(arrays.positions)
        full, _ = features(self.params, tokens, positions, None, None)
        logits, cache = features(self.params, tokens[:, :prompt], positions[:, :prompt], None, None)
        parts, cache = [logits], cache.padded(tokens.shape[1], dtype=str(cache.keys[0].dtype))
        for part in self.case.cached_calls():
            slot = jnp.int32(part.start)
            logits, cache = features(self.params, tokens[:, part], positions[:, part], cache, slot)
            parts.append(logits)
        return capture.Decoding(np.asarray(full), np.concatenate([np.asarray(part) for part in parts], axis=1))

    def sample(
        self, batches: list[list[list[int]]], sampling: Mapping[str, float], *, max_new_tokens: int, seed: int
    ) -> np.ndarray:
        """Tokens generated for the prompts of each batch, in that order [rows, new tokens]; -1 after a row's end."""
        lib = importlib.import_module("jaxbench.sample")
        generator = lib.Generator(self.model, eos_id=self.case.eos_id, sampling=lib.SamplingParams(**sampling))
        drawn = [generator(each, max_new_tokens=max_new_tokens, seed=seed).tokens for each in batches]
        room = [((0, 0), (0, max_new_tokens - tokens.shape[1])) for tokens in drawn]
        return np.concatenate([np.pad(*each, constant_values=-1) for each in zip(drawn, room, strict=True)])


def _is_floating(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)


def _floating(tree: Any) -> tuple[Any, ...]:
    """Floating-point tensors of a tree, from left to right."""
    tensors: list[Any] = []
    capture.map_floating(tree, tensors.append, is_floating=_is_floating)
    return tuple(tensors)


def _replace(tree: Any, values: tuple[Any, ...], *, where: str) -> Any:
    """Replace a tree's floating-point tensors by others, from left to right."""
    count = len(_floating(tree))
    if count != len(values):
        raise ValueError(f"parity: {where}: {count} floating tensors in JAX, {len(values)} in the twin")
    rest = iter(values)
    return capture.map_floating(tree, lambda _: next(rest), is_floating=_is_floating)


def _dropout(seed: int | None, step: int) -> functional.DropoutStream | None:
    return None if seed is None else functional.DropoutStream(prng.key_from_seed(seed), jnp.int32(step))


def _numpy(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in tree.items()}
