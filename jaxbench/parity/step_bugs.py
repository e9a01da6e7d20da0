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
    _bug("sgd-with-nesterov-momentum", case="transformer/llama-sgd", place=(torch.optim, "SGD"),
         bug=lambda original, groups, **how: original(groups, **how, nesterov=True)),
)  # fmt: skip
