"""Uses of a text in pruning: norms of every kernel's inputs, held-out loss, and a short fine-tuning afterwards.

All in JAX on one device, in float32. Longer training is a separate run: experiments/train.py with
--set=start=FOLDER and --set=step.hold_zeros=true, on either backend.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbench import cli, nn, parameters, train, transformer
from jaxbench.config import TransformerConfig
from jaxbench.training import engine, optimizer_step, schedules
from jaxbench.training.intercept import intercepted, nnx_modules
from jaxbench.training.step_config import StepConfig
from jaxbench.training.train_config import TrainConfig

Params = Mapping[str, np.ndarray]


def input_norms(config: TransformerConfig, params: Params, batches: Iterable[Any]) -> dict[str, np.ndarray]:
    """Compute each kernel input's 2-norm over all tokens of the batches, for kernels inside layers, by kernel name.

    Source: Sun et al. 2023, arXiv:2306.11695, section 3.
    """
    graph, leaves = parameters.split(transformer.build(config, params))

    @jax.jit
    def squares(leaves: dict, batch: train.Batch) -> dict[str, jax.Array]:
        model, found = parameters.merge(graph, leaves), {}
        is_token = (batch.positions >= 0)[:, :, None]

        def watch(name: str, call: Any, args: tuple, kwargs: dict) -> Any:
            x = args[0]
            found[f"{name}.kernel"] = jnp.sum(jnp.where(is_token, jnp.square(x), jnp.zeros((), x.dtype)), axis=(0, 1))
            return call(*args, **kwargs)

        linear = [(name, module) for name, module in nnx_modules(model, root="model") if isinstance(module, nn.Linear)]
        with intercepted([(name, module) for name, module in linear if name.startswith("layers.")], watch):
            train.predict(model, batch)
        return found

    total: dict[str, np.ndarray] = {}
    for batch in batches:
        for name, value in squares(leaves, train.Batch(*batch)).items():
            total[name] = total.get(name, 0.0) + np.asarray(value, np.float64)
    return {name: np.sqrt(value) for name, value in total.items()}


def mean_loss(config: TransformerConfig, params: Params, batches: Iterable[Any]) -> float:
    """Mean cross-entropy of the batches' targets, in nats per token.

    Raises:
      ValueError: the batches have no target.
    """
    graph, leaves = parameters.split(transformer.build(config, params))
    evaluate = jax.jit(functools.partial(optimizer_step.eval_step, graph=graph, step_config=StepConfig()))
    total, count = 0.0, 0
    for batch in batches:
        part, targets = evaluate(leaves, train.Batch(*batch))
        total, count = total + float(part), count + int(targets)
    if not count:
        raise ValueError(f"pruning: the held-out text has {count} targets; name a longer one with --data")
    return total / count


def finetuned(settings: TrainConfig, config: TransformerConfig, params: Params, rows: Any) -> dict[str, np.ndarray]:
    """Train for settings.steps optimiser steps with the training engine, and return the parameters.

    Args:
      settings: with step.hold_zeros, zeros of kernels inside layers stay exactly where they are.
      rows: PackedDataset to train on.

    Raises:
      GateFailed: a step was not finite.
    """
    run = engine.Engine(settings, config, params)
    for step in range(settings.steps):
        rate = schedules.learning_rate(
            settings.schedule, step, peak=settings.learning_rate, steps=settings.steps
        )  # fmt: skip
        metrics = run.step(rows.batch(step, settings.batch_size), rate)
    last = run.fetch(metrics)
    if last.skipped:
        raise cli.GateFailed(
            f"fine-tuning: {last.skipped} of {settings.steps} steps were not taken, a loss or gradient being not "
            f"finite; lower --learning_rate={settings.learning_rate}; nothing was written"
        )
    return run.params()
