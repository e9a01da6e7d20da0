"""The PyTorch side of the parity engine: one case run with torch_ref, its module outputs captured by hooks."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from jaxbench.config import TransformerConfig
from jaxbench.parity import capture, products
from jaxbench.parity.cases import Arrays, Case
from jaxbench.training import precision
from jaxbench.training.step_config import StepConfig
from torch_ref import attention, functional, nn, prng
from torch_ref.training import optimizer_step


class Side:
    """One case's model in one dtype."""

    name = "torch"

    def __init__(self, case: Case, config: TransformerConfig, params: Mapping[str, np.ndarray], *, dtype: str):
        self.case, self.dtype = case, dtype
        module = importlib.import_module(f"torch_ref.{case.module}")
        self.task = importlib.import_module(f"torch_ref.{case.task}")
        self.model = module.build(config, params, dtype=dtype, **case.options_in(dtype))

    def get_params(self) -> dict[str, np.ndarray]:
        """Parameters of the model by dotted name."""
        return nn.get_params(self.model)

    def load_params(self, params: Mapping[str, np.ndarray]) -> None:
        """Load parameters strictly."""
        nn.load_params(self.model, params)

    def _batch(self, arrays: Arrays) -> Any:
        return self.task.Batch(*(None if x is None else torch.tensor(x) for x in arrays))

    def products(self) -> dict[str, np.ndarray]:
        """This backend's products of products.operands and attention of products.attended: gate P3."""
        left, right, gradient = map(torch.tensor, products.operands(self.dtype))
        query, key, value = map(torch.tensor, products.attended(self.dtype))
        left.requires_grad_()
        product = functional.matmul(left, right)
        product.backward(gradient)
        positions = torch.arange(2)[None]
        mixed = attention.attention(query, key, value, attention.Spans(positions, positions), implementation="dense")
        return {"product": _numpy(product), "gradient": _numpy(left.grad), "attention": _numpy(mixed[0, :, 0])}

    def trace(self, arrays: Arrays, *, gradients: bool, seed: int | None) -> capture.Trace:
        """Loss, every module's output and, with gradients, gradients of outputs and parameters; seed: of dropout."""
        calls: dict[str, capture.Call] = {}
        output_gradients: dict[str, np.ndarray] = {}
        self.model.zero_grad(set_to_none=True)
        watch = output_gradients if gradients else None
        with torch.set_grad_enabled(gradients), _hooked(self.model, calls, watch):
            loss = self.task.loss_fn(self.model, self._batch(arrays), dropout=_dropout(seed, 0))
        grads = {}
        if gradients:
            loss.backward()
            grads = {name: _numpy(p.grad, copy=False) for name, p in self.model.named_parameters()}
            self.model.zero_grad(set_to_none=True)
        outputs = {name: _numpy(call.outputs[0]) for name, call in calls.items()}
        return capture.Trace(_numpy(loss), outputs, output_gradients, grads)

    def calls(self, arrays: Arrays, *, seed: int | None) -> dict[str, capture.Call]:
        """Floating-point inputs and outputs of every module's call, in order of completion."""
        calls: dict[str, capture.Call] = {}
        with torch.no_grad(), _hooked(self.model, calls, None):
            self.task.loss_fn(self.model, self._batch(arrays), dropout=_dropout(seed, 0))
        return {
            name: capture.Call(tuple(map(_numpy, call.inputs)), tuple(map(_numpy, call.outputs)))
            for name, call in calls.items()
        }

    def train(
        self, steps: list[Arrays], step_config: StepConfig, *, learning_rates: Sequence[float], seed: int
    ) -> capture.Training:
        """Losses and final state of optimiser steps in the model's type, dropout on; changes the model's parameters."""
        state = optimizer_step.init_state(
            self.model, self.get_params(), step_config, policy=precision.uniform(self.dtype)
        )
        losses, key = [], prng.key_from_seed(seed)
        for arrays, learning_rate in zip(steps, learning_rates, strict=True):
            state, metrics = optimizer_step.train_step(
                state, self._batch(arrays), learning_rate, key, step_config=step_config, loss_fn=self.task.loss_fn
            )
            losses.append(_numpy(metrics.loss))
        return capture.Training(np.array(losses), optimizer_step.state_arrays(state))

    @torch.no_grad()
    def decode(self, arrays: Arrays, *, prompt: int) -> capture.Decoding:
        """Logits [B T V] by one call, and by a prefill of `prompt` tokens followed by the case's cached calls."""
        tokens, positions = torch.tensor(arrays.tokens), torch.tensor(arrays.positions)
        full = self.model(tokens, positions)
        hidden, cache = self.model.features(tokens[:, :prompt], positions[:, :prompt])
        parts, cache = [self.model.logits(hidden)], cache.padded(tokens.shape[1], dtype=self.model.dtype)
        for part in self.case.cached_calls():
            hidden, cache = self.model.features(tokens[:, part], positions[:, part], cache=cache, slot=part.start)
            parts.append(self.model.logits(hidden))
        return capture.Decoding(_numpy(full), _numpy(torch.cat(parts, dim=1)))

    def sample(
        self, batches: list[list[list[int]]], sampling: Mapping[str, float], *, max_new_tokens: int, seed: int
    ) -> np.ndarray:
        """Tokens generated for the prompts of each batch, in that order [rows, new tokens]; -1 after a row's end."""
        lib = importlib.import_module("torch_ref.sample")
        generator = lib.Generator(self.model, eos_id=self.case.eos_id, sampling=lib.SamplingParams(**sampling))
        drawn = [generator(each, max_new_tokens=max_new_tokens, seed=seed).tokens for each in batches]
        room = [((0, 0), (0, max_new_tokens - tokens.shape[1])) for tokens in drawn]
        return np.concatenate([np.pad(*each, constant_values=-1) for each in zip(drawn, room, strict=True)])


@contextlib.contextmanager
def _hooked(
    model: torch.nn.Module, calls: dict[str, capture.Call], gradients: dict[str, np.ndarray] | None
) -> Iterator[None]:
    """Record every module's call and, if `gradients` is given, the gradient of its first output."""
    inputs: dict[str, tuple] = {}

    def before(name: str, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        # Copies: attention writes into the cache that it is given.
        inputs[name] = tuple(x.detach().clone() for x in _floating((args, kwargs)))

    def after(name: str, module: torch.nn.Module, args: tuple, kwargs: dict, result: Any) -> None:
        outputs = _floating(result)[:1]
        calls[name] = capture.Call(inputs.pop(name), outputs)
        if gradients is not None:
            outputs[0].register_hook(lambda gradient: gradients.__setitem__(name, _numpy(gradient)))

    with contextlib.ExitStack() as handles:
        for path, module in model.named_modules():
            if not isinstance(module, torch.nn.ModuleList):
                hooks = [functools.partial(hook, path or capture.ROOT) for hook in (before, after)]
                handles.callback(module.register_forward_pre_hook(hooks[0], with_kwargs=True).remove)
                handles.callback(module.register_forward_hook(hooks[1], with_kwargs=True).remove)
        yield


def _floating(tree: Any) -> tuple[torch.Tensor, ...]:
    """Floating-point tensors of a tree, from left to right."""
    tensors: list[torch.Tensor] = []
    capture.map_floating(
        tree, tensors.append, is_floating=lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()
    )
    return tuple(tensors)


def _dropout(seed: int | None, step: int) -> functional.DropoutStream | None:
    return None if seed is None else functional.DropoutStream(prng.key_from_seed(seed), step)


def _numpy(x: torch.Tensor, *, copy: bool = True) -> np.ndarray:
    x = x.detach()
    array = (x.float() if x.dtype == torch.bfloat16 else x).cpu().numpy()
    return array.copy() if copy else array
