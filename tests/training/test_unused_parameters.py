"""Steps of a loss that does not read every parameter: on both backends such a parameter has a gradient of zeros."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxbench import train, transformer
from jaxbench.parity import cases
from jaxbench.training import optimizer_step
from jaxbench.training.step_config import OptimizerConfig, StepConfig
from torch_ref import train as torch_train
from torch_ref import transformer as torch_transformer
from torch_ref.training import optimizer_step as torch_update

CASE = cases.find("transformer/llama-untied")
HOW = StepConfig(hold_zeros=True, optimizer=OptimizerConfig(weight_decay=0.5, decay="all"))


def mean_square(model, batch, *, dropout=None):
    """Return a loss that reads no logits, and so no head."""
    hidden, _ = model.features(batch.tokens, batch.positions, segments=batch.segments, dropout=dropout)
    return (hidden * hidden).mean()


def test_a_parameter_that_the_loss_does_not_read_decays_alike_on_both_backends():
    config, params = cases.load(CASE)
    arrays, found = cases.arrays(CASE, CASE.config, step=0), []
    state = optimizer_step.init_state(transformer.build(config, params), params, HOW)
    step = jax.jit(functools.partial(optimizer_step.train_step, step_config=HOW, loss_fn=mean_square))
    batch = train.Batch(*(None if x is None else jnp.asarray(x) for x in arrays))
    for _ in range(2):
        state, metrics = step(state, batch, 0.1)
    found.append((metrics, optimizer_step.state_arrays(state)["params"]))

    state = torch_update.init_state(torch_transformer.build(config, params), params, HOW)
    batch = torch_train.Batch(*(None if x is None else torch.tensor(x) for x in arrays))
    for _ in range(2):
        state, metrics = torch_update.train_step(state, batch, 0.1, step_config=HOW, loss_fn=mean_square)
    found.append((metrics, torch_update.state_arrays(state)["params"]))

    (one, flax), (two, twin) = found
    np.testing.assert_allclose(two.grad_norm, one.grad_norm, rtol=1e-4)
    name = "head.kernel"
    for after in (flax, twin):
        np.testing.assert_allclose(after[name], params[name] * 0.95**2, rtol=1e-6, err_msg=name)
