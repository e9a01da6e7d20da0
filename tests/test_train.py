"""The training step and its loss against numpy, in each of the three backends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxbench import train, transformer
from jaxbench.eqx import train as eqx_train
from jaxbench.eqx import transformer as eqx_transformer
from jaxbench.parity import cases
from torch_ref import train as torch_train
from torch_ref import transformer as torch_transformer

BACKENDS = {
    "flax": (train, transformer, jnp.asarray),
    "equinox": (eqx_train, eqx_transformer, jnp.asarray),
    "torch": (torch_train, torch_transformer, torch.tensor),
}
HOW = {"learning_rate": 0.01, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
CASE = cases.find("transformer/llama-multi-query")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


def numpy_loss(logits, targets, mask):
    total = np.log(np.exp(logits).sum(-1))
    losses = total - np.take_along_axis(logits, targets[:, :, None], -1)[:, :, 0]
    return losses[mask].mean()


def test_cross_entropy_is_the_mean_over_the_targets_that_count(backend):
    library, _, array = backend
    random = np.random.default_rng(0)
    logits, targets = random.normal(size=(2, 5, 7)).astype(np.float32), random.integers(0, 7, (2, 5), dtype=np.int32)
    mask = random.random((2, 5)) < 0.5
    found = float(library.cross_entropy(array(logits), array(targets), array(mask)))
    assert found == pytest.approx(numpy_loss(logits.astype(np.float64), targets, mask), rel=1e-6)


def test_cross_entropy_of_no_target_is_zero_and_of_large_logits_finite(backend):
    library, _, array = backend
    targets = np.zeros((1, 2), np.int32)
    none = library.cross_entropy(array(np.ones((1, 2, 3), np.float32)), array(targets), array(np.zeros((1, 2), bool)))
    assert float(none) == 0.0
    logits = np.array([[[1e4, 0.0, 0.0], [0.0, 1e4, 0.0]]], np.float32)
    large = library.cross_entropy(array(logits), array(targets), array(np.ones((1, 2), bool)))
    assert float(large) == pytest.approx(5e3)


def test_loss_accumulates_in_float32_when_logits_are_bfloat16(backend):
    library, _, array = backend
    logits, targets = array(np.zeros((1, 4, 8), np.float32)), array(np.zeros((1, 4), np.int32))
    narrow = logits.astype(jnp.bfloat16) if isinstance(logits, jax.Array) else logits.bfloat16()
    found = library.cross_entropy(narrow, targets, array(np.ones((1, 4), bool)))
    assert str(found.dtype).endswith("float32") and float(found) == pytest.approx(np.log(8), rel=1e-6)


def two_steps(backend):
    """Return parameters before, gradients of each step's loss, and the state after two steps."""
    library, models, array = backend
    config, params = cases.load(CASE)
    model = models.build(config, params, dtype="float32")
    state = library.init_state(model, library.AdamW(**HOW))
    batch = library.Batch(*(None if x is None else array(x) for x in cases.arrays(CASE, config)))
    before = dict(params)
    step = jax.jit(library.train_step) if library is not torch_train else library.train_step
    losses, arrays = [], []
    for _ in range(2):
        state, loss = step(state, batch)
        losses.append(float(loss))
        arrays.append(library.state_arrays(state))
    return before, losses, arrays


def test_steps_follow_the_equations_of_adamw(backend):
    before, losses, (one, two) = two_steps(backend)
    assert losses[1] < losses[0]
    assert one["params"].keys() == two["first_moment"].keys() == before.keys()
    for name, start in before.items():
        # The first moment after step 1 is (1 - b1) g, so the state itself tells the gradients.
        gradient = one["first_moment"][name].astype(np.float64) / (1 - HOW["b1"])
        np.testing.assert_allclose(one["second_moment"][name], (1 - HOW["b2"]) * gradient**2, rtol=2e-4, atol=1e-12)
        update = gradient / (np.abs(gradient) + HOW["eps"]) + HOW["weight_decay"] * start
        wanted = start - HOW["learning_rate"] * update
        np.testing.assert_allclose(one["params"][name], wanted, rtol=1e-4, atol=2e-5)
        first = two["first_moment"][name].astype(np.float64) / (1 - HOW["b1"] ** 2)
        second = two["second_moment"][name].astype(np.float64) / (1 - HOW["b2"] ** 2)
        middle = one["params"][name].astype(np.float64)
        update = first / (np.sqrt(second) + HOW["eps"]) + HOW["weight_decay"] * middle
        wanted = middle - HOW["learning_rate"] * update
        np.testing.assert_allclose(two["params"][name], wanted, rtol=1e-4, atol=2e-5)


def test_a_compiled_step_can_use_up_its_state():
    config, params = cases.load(CASE)
    model = transformer.build(config, params, dtype="float32")
    batch = train.Batch(*(None if x is None else jnp.asarray(x) for x in cases.arrays(CASE, config)))
    fresh = jax.tree.map(jnp.copy, train.init_state(model, train.AdamW(**HOW)))
    step = jax.jit(train.train_step, donate_argnums=0)
    state, first = step(fresh, batch)
    state, second = step(state, batch)
    assert float(second) < float(first) and step._cache_size() == 1
