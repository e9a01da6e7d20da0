"""Bugs in the PyTorch twin's step of a run, clipping, micro-batches, decay and SGD, which training must show."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from jaxbench.parity.injection import Mutation
from jaxbench.training.step_config import StepConfig
from torch_ref import functional
from torch_ref.training import optimizer_step


def _decays_all(original: Callable, model: Any, step_config: StepConfig) -> torch.optim.Optimizer:
    every = step_config.optimizer.model_copy(update={"decay": "all"})
    return original(model, step_config.model_copy(update={"optimizer": every}))


def _unweighted(
    original: Callable, state: Any, batch: Any, dropout_key: Any, step_config: StepConfig, loss_fn: Callable
) -> torch.Tensor:
    """Give every micro-batch the same weight, however many targets it has."""

    def loss_of(model: Any, micro: Any, **options: Any) -> torch.Tensor:
        share = micro.mask.sum() / batch.mask.sum()
        return loss_fn(model, micro, **options) / (share * step_config.accumulation)

    return original(state, batch, dropout_key, step_config, loss_of)


def _adjacent_rows(original: Callable, batch: Any, count: int) -> list[Any]:
    """Split a batch into runs of adjacent rows, which get other rows' dropout masks."""
    rows = batch[0].shape[0] // count
    parts = [slice(start, start + rows) for start in range(0, rows * count, rows)]
    return [type(batch)(*(None if x is None else x[part] for x in batch)) for part in parts]


def _first_rate_kept(original: Callable, state: Any, batch: Any, learning_rate: float, *key: Any, **how: Any) -> Any:
    """Take every step with the first one's learning rate, as a program that was compiled with it would."""
    rates = [group["lr"] for group in state.moments.param_groups if state.step]
    return original(state, batch, rates[0] if rates else learning_rate, *key, **how)


def _unclipped(original: Callable, x: torch.Tensor, **limits: Any) -> torch.Tensor:
    return torch.ones_like(x) if limits == {"max": 1.0} else original(x, **limits)


_bug = functools.partial(Mutation, case="transformer/llama-run-step")
STEP_BUGS: tuple[Mutation, ...] = (
    _bug("clipping-ignored", place=(torch, "clamp"), bug=_unclipped),
    _bug("clipping-by-the-largest-norm", place=(torch.nn.utils, "get_total_norm"),
         bug=lambda original, grads: original(grads, float("inf"))),
    _bug("clipping-eps-1e-4", place=(optimizer_step, "CLIP_EPS"), bug=1e-4),
    _bug("decay-of-norms-too", place=(optimizer_step, "_optimizer"), bug=_decays_all),
    _bug("micro-batches-of-equal-weight", place=(optimizer_step, "_accumulate"), bug=_unweighted),
    _bug("dropout-of-the-step-in-every-micro-batch", place=(functional, "DropoutStream"),
         bug=lambda original, key, step: original(key, step // 2)),
    _bug("micro-batches-of-adjacent-rows", place=(optimizer_step, "_micro_batches"), bug=_adjacent_rows),
    _bug("learning-rate-of-the-first-step", place=(optimizer_step, "train_step"), bug=_first_rate_kept),
    _bug("sgd-with-nesterov-momentum", case="transformer/llama-sgd", place=(torch.optim, "SGD"),
         bug=lambda original, groups, **how: original(groups, **how, nesterov=True)),
)  # fmt: skip
