"""The training step and its loss against numpy, in each of the three backends."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jaxbench import functional, parameters, train, transformer
from jaxbench.eqx import transformer as eqx_transformer
from jaxbench.parity import cases
from jaxbench.training import optimizer_step, optimizers
from jaxbench.training.step_config import OptimizerConfig, StepConfig
from torch_ref import train as torch_train
from torch_ref import transformer as torch_transformer
from torch_ref.training import optimizer_step as torch_update

BACKENDS = {
    "flax": (train, optimizer_step, transformer, jnp.asarray),
    "equinox": (train, optimizer_step, eqx_transformer, jnp.asarray),
    "torch": (torch_train, torch_update, torch_transformer, torch.tensor),
}
LEARNING_RATE = 0.01
HOW = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
STEP = StepConfig(clip_norm=None, optimizer=OptimizerConfig(**HOW, decay="all"))
CASE = cases.find("transformer/llama-multi-query")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


def numpy_loss(logits, targets, mask):
    total = np.log(np.exp(logits).sum(-1))
    losses = total - np.take_along_axis(logits, targets[:, :, None], -1)[:, :, 0]
    return losses[mask].mean()


def test_cross_entropy_is_the_mean_over_the_targets_that_count(backend):
    library, _, _, array = backend
    random = np.random.default_rng(0)
    logits, targets = random.normal(size=(2, 5, 7)).astype(np.float32), random.integers(0, 7, (2, 5), dtype=np.int32)
    mask = random.random((2, 5)) < 0.5
    found = float(library.cross_entropy(array(logits), array(targets), array(mask)))
    assert found == pytest.approx(numpy_loss(logits.astype(np.float64), targets, mask), rel=1e-6)


def test_the_gradient_of_cross_entropy_is_that_of_its_formula():
    def formula(logits, targets, mask):
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, :, None], axis=-1)[:, :, 0]
        return -jnp.sum(jnp.where(mask, picked, 0.0)) / jnp.sum(mask)

    random = np.random.default_rng(1)
    logits, targets = random.normal(scale=5.0, size=(2, 5, 7)), random.integers(0, 7, (2, 5), dtype=np.int32)
    mask = np.arange(10).reshape(2, 5) % 3 > 0
    with jax.enable_x64(True):
        found, wanted = (jax.jit(jax.grad(loss))(logits, targets, mask) for loss in (train.cross_entropy, formula))
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("way", [train._scattered, train._compared])
def test_both_ways_to_the_gradient_of_a_targets_logit_are_that_of_take_along_axis(way, x64, monkeypatch):
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *arrays, cpu=None, default=None, **_: default(*arrays)
    )  # as on a GPU
    random = np.random.default_rng(2)
    logits, targets = random.normal(scale=5.0, size=(2, 5, 7)), random.integers(0, 7, (2, 5), dtype=np.int32)
    weights = random.normal(size=(2, 5)) * (np.arange(10).reshape(2, 5) % 3 > 0)  # 0 where a target does not count

    def picked(logits):
        return jnp.sum(jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0] * weights)

    wanted = jax.grad(picked)(jnp.asarray(logits))
    np.testing.assert_array_equal(way(jnp.asarray(weights), jnp.asarray(targets), vocab_size=7), wanted)
    found = jax.grad(lambda logits: jnp.sum(train._picked(logits, jnp.asarray(targets)) * weights))(jnp.asarray(logits))
    np.testing.assert_array_equal(found, wanted)
    outside = np.where(weights == 0, -1, targets)  # what does not count may be no token
    np.testing.assert_array_equal(way(jnp.asarray(weights), jnp.asarray(outside), vocab_size=7), wanted)


def test_one_pass_over_the_logits_gives_their_log_sum_of_exponentials_and_its_gradient(x64):
    random = np.random.default_rng(4)
    logits = random.normal(scale=50.0, size=(3, 4, 200))
    logits[0, 0, :50], logits[0, 1] = -np.inf, 7.0  # tokens that are ruled out; none larger than another
    logits[0, 2, 3], logits[0, 3, 100] = 1e4, -1e4
    logits = jnp.asarray(logits)
    np.testing.assert_allclose(train._log_sum_exp(logits), jax.nn.logsumexp(logits, axis=-1), rtol=1e-14)
    weights = random.normal(size=(3, 4))
    found = jax.grad(lambda logits: jnp.sum(train._log_sum_exp(logits) * weights))(logits)
    np.testing.assert_allclose(found, weights[:, :, None] * jax.nn.softmax(logits, axis=-1), rtol=1e-11, atol=1e-300)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_one_pass_over_logits_that_are_not_finite_says_so(value):
    assert not np.isfinite(train._log_sum_exp(jnp.zeros((1, 1, 9)).at[0, 0, 4].set(value)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_few_bfloat16_rows_have_the_products_that_they_have_among_others(count, transposed, monkeypatch):
    random = np.random.default_rng(3)
    rows = jnp.asarray(random.normal(size=(functional.MIN_ROWS, 64)), jnp.bfloat16)
    kernel = jnp.asarray(random.normal(size=(48, 64) if transposed else (64, 48)), jnp.bfloat16)
    padded = functional.matmul(rows.at[count:].set(0), kernel, transposed=transposed)[:count]

    def product(rows):
        return jax.jit(lambda rows: functional.matmul(rows, kernel, transposed=transposed))(rows)

    found = product(rows[:count])
    assert found.shape == (count, 48) and found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), padded.astype(jnp.float32))
    monkeypatch.setattr(
        functional.lax, "platform_dependent", lambda *x, cpu=None, default=None, **_: default(*x)
    )  # as on a GPU
    wide, matrix = np.asarray(rows[:count], np.float64), np.asarray(kernel, np.float64)
    exact = wide @ (matrix.T if transposed else matrix)
    for each in (found, product(rows[:count])):
        np.testing.assert_allclose(np.asarray(each, np.float64), exact, rtol=2.0**-8, atol=1e-4)
    gradient = jax.grad(lambda rows: jnp.sum(functional.matmul(rows, kernel, transposed=transposed)[:, 0]))
    wanted = np.broadcast_to(matrix[0] if transposed else matrix[:, 0], (count, 64))
    np.testing.assert_array_equal(np.asarray(gradient(rows[:count]), np.float64), wanted)


def product_operands(function, *arrays) -> set[str]:
    """Element types of the operands of all matrix products in a function's compiled program."""
    text = jax.jit(function).lower(*arrays).compile().as_text()
    entry = text[text.index("ENTRY") :]
    types = dict(re.findall(r"%([\w.-]+) = (\w+)\[", entry))
    products = re.findall(r"(?: dot|ynn_fusion[\w.-]* = \S+ fusion)\(([^)]*)\)", entry)
    return {types[name.strip().lstrip("%")] for product in products for name in product.split(",")}


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_bfloat16_products_multiply_bfloat16_numbers(transposed):
    x, kernel = (jnp.ones(shape, jnp.bfloat16) for shape in ((48, 128), (320, 128) if transposed else (128, 320)))

    def product(x, kernel):
        return functional.matmul(x, kernel, transposed=transposed)

    if product_operands(product, x, kernel) != {"bf16"}:
        pytest.skip("this processor has no bfloat16 products, so XLA widens them all")
    gradients = jax.grad(lambda *args: jnp.sum(jnp.sin(product(*args).astype(jnp.float32))), argnums=(0, 1))
    assert product_operands(gradients, x, kernel) == {"bf16"}


def test_cross_entropy_of_no_target_is_zero_and_of_large_logits_finite(backend):
    library, _, _, array = backend
    targets = np.zeros((1, 2), np.int32)
    none = library.cross_entropy(array(np.ones((1, 2, 3), np.float32)), array(targets), array(np.zeros((1, 2), bool)))
    assert float(none) == 0.0
    logits = np.array([[[1e4, 0.0, 0.0], [0.0, 1e4, 0.0]]], np.float32)
    large = library.cross_entropy(array(logits), array(targets), array(np.ones((1, 2), bool)))
    assert float(large) == pytest.approx(5e3)


@pytest.mark.parametrize("target", [-100, -1, 7, 2**31 - 1])
def test_a_target_that_does_not_count_may_be_any_number(backend, target):
    library, _, _, array = backend
    logits = np.random.default_rng(2).normal(size=(1, 3, 7)).astype(np.float32)
    targets, mask = np.array([[3, target, 5]], np.int32), np.array([[True, False, True]])
    found = library.cross_entropy(array(logits), array(targets), array(mask))
    kept = mask[0].nonzero()[0]
    wanted = numpy_loss(logits[:, kept].astype(np.float64), targets[:, kept], mask[:, kept])
    assert float(found) == pytest.approx(wanted, rel=1e-6)
    if library is torch_train:
        leaf = torch.tensor(logits, requires_grad=True)
        library.cross_entropy(leaf, array(targets), array(mask)).backward()
        gradient = leaf.grad.numpy()
    else:
        gradient = np.asarray(jax.grad(library.cross_entropy)(array(logits), array(targets), array(mask)))
    assert np.isfinite(gradient).all() and (gradient[0, 1] == 0).all() and (gradient[0, kept] != 0).all()


def test_loss_accumulates_in_float32_when_logits_are_bfloat16(backend):
    library, _, _, array = backend
    logits, targets = array(np.zeros((1, 4, 8), np.float32)), array(np.zeros((1, 4), np.int32))
    narrow = logits.astype(jnp.bfloat16) if isinstance(logits, jax.Array) else logits.bfloat16()
    found = library.cross_entropy(narrow, targets, array(np.ones((1, 4), bool)))
    assert str(found.dtype).endswith("float32") and float(found) == pytest.approx(np.log(8), rel=1e-6)


def two_steps(backend, *, is_guarded=True):
    """Return parameters before, gradients of each step's loss, and the state after two steps."""
    library, updates, models, array = backend
    config, params = cases.load(CASE)
    model = models.build(config, params, dtype="float32")
    state = updates.init_state(model, params, STEP)
    batch = library.Batch(*(None if x is None else array(x) for x in cases.arrays(CASE, config)))
    before = dict(params)
    step = functools.partial(updates.train_step, learning_rate=LEARNING_RATE, step_config=STEP, is_guarded=is_guarded)
    step = jax.jit(step) if library is not torch_train else step
    losses, arrays = [], []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
        arrays.append(updates.state_arrays(state))
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
        wanted = start - LEARNING_RATE * update
        np.testing.assert_allclose(one["params"][name], wanted, rtol=1e-4, atol=2e-5)
        first = two["first_moment"][name].astype(np.float64) / (1 - HOW["b1"] ** 2)
        second = two["second_moment"][name].astype(np.float64) / (1 - HOW["b2"] ** 2)
        middle = one["params"][name].astype(np.float64)
        update = first / (np.sqrt(second) + HOW["eps"]) + HOW["weight_decay"] * middle
        wanted = middle - LEARNING_RATE * update
        np.testing.assert_allclose(two["params"][name], wanted, rtol=1e-4, atol=2e-5)


def test_a_compiled_step_can_use_up_its_state():
    config, params = cases.load(CASE)
    model = transformer.build(config, params, dtype="float32")
    batch = train.Batch(*(None if x is None else jnp.asarray(x) for x in cases.arrays(CASE, config)))
    step = functools.partial(optimizer_step.train_step, learning_rate=LEARNING_RATE, step_config=STEP)
    step = jax.jit(step, donate_argnums=0)
    state, first = step(optimizer_step.init_state(model, params, STEP), batch)
    state, second = step(state, batch)
    assert float(second.loss) < float(first.loss) and step._cache_size() == 1


def test_a_step_without_a_guard_is_the_same_step_and_has_no_norm(backend):
    _, losses, guarded = two_steps(backend)
    _, found, arrays = two_steps(backend, is_guarded=False)
    assert found == losses
    for name, value in guarded[1]["params"].items():
        np.testing.assert_allclose(arrays[1]["params"][name], value, rtol=1e-6, atol=1e-7)


def test_what_a_step_does_not_use_costs_nothing():
    config, params = cases.load(CASE)
    state = optimizer_step.init_state(transformer.build(config, params, dtype="float32"), params, STEP)
    batch = train.Batch(*(None if x is None else jnp.asarray(x) for x in cases.arrays(CASE, config)))

    def flops(function, *arguments) -> float:
        return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]

    def bare(params, moments, batch):
        """Return the loss, and parameters and moments after AdamW, with nothing around it."""
        loss, grads = jax.value_and_grad(lambda p: train.loss_fn(parameters.merge(state.graph, p), batch))(params)
        updates, moments = optimizers.transform(STEP.optimizer, LEARNING_RATE, params).update(grads, moments, params)
        return loss, optax.apply_updates(params, updates), moments

    step = functools.partial(optimizer_step.train_step, learning_rate=LEARNING_RATE, step_config=STEP)
    least, num_parameters = flops(bare, state.params, state.moments, batch), sum(x.size for x in params.values())
    assert flops(functools.partial(step, is_guarded=False), state, batch) <= least + 64  # the counters
    assert flops(step, state, batch) >= least + 2 * num_parameters  # the norm
