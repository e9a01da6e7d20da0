"""What the banks of a decoder in training hold, for its statistics, in PyTorch. Twin: jaxbench/memory/watch.py."""

from __future__ import annotations

from typing import Any

import torch

from jaxbench.training import precision
from jaxbench.training.step_config import StepConfig
from torch_ref.memory.bank import BankState
from torch_ref.training import optimizer_step


@torch.no_grad()
def bank_states(params: Any, batch: Any, *, graph: Any, step_config: StepConfig) -> dict[int, BankState]:
    """States of a decoder's banks behind a batch's rows, by layer; each row is read as one document.

    params is the model, graph is unused.
    """
    is_token = batch.positions >= 0
    positions = torch.where(is_token, torch.cumsum(is_token, dim=1) - 1, -1).to(torch.int32)
    with optimizer_step._autocast(params, precision.policy(step_config.precision)):
        _, cache = params.features(batch.tokens, positions)
    states = {i: layer.state.memory for i, layer in enumerate(cache.memory) if layer is not None}
    return {i: state for i, state in states.items() if isinstance(state, BankState)}
